"""A file of timm's, with the config.json that may be beside it.

config.json states what arrays cannot show: the number of heads, the activation,
the preprocessing of images, the class names.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config import json_file
from vit_jax.config.from_dict import at_least
from vit_jax.losses import REGRESSION
from vit_jax.options import shown
from vit_jax.weights import eval_preprocessing
from vit_jax.weights.identify import identify
from vit_jax.weights.weights_file import (
  POS_EMBEDDING,
  Pixels,
  StateDict,
  Weights,
  height_and_width,
  metadata_of,
  num_heads_of,
  with_metadata,
)
from vit_jax.zoo.files import hf_head, timm, timm_names
from vit_jax.zoo.files.assumed import LOST_POSITIONS
from vit_jax.zoo.files.torch_layout import count_blocks, shorten

# Architectures whose activation is gelu_tanh.
TANH = frozenset(
  f"vit_{size}_siglip{gap}_{side}"
  for size, side in (
    ("so400m_patch16", 256),
    ("so400m_patch16", 384),
    ("so400m_patch16", 512),
    ("large_patch16", 512),
    ("base_patch32", 256),
    ("giantopt_patch16", 256),
    ("giantopt_patch16", 384),
  )
  for gap in ("", "_gap")
)
# Architectures -> their heads, if the known size of the same arrays has others.
HEADS = {"vit_base_patch16_gap_224": 16}
# Parts of names of architectures -> what these compute, and vit_jax does not.
# Their arrays are those of other models.
FOREIGN = {
  "_rope_": "rotary positions (neither DINOv3's nor EVA-02's)",
  "_rpn_": "norms after attention and MLP",
  "test_vit3": "attention pooling of registers",
}
_BLOCK = "Transformer/encoderblock_0"
_SCALE = f"{_BLOCK}/LayerScale_0/scale"
_MLP_NORM = f"{_BLOCK}/MlpBlock_0/LayerNorm_0/scale"
# Arguments of timm's models -> the parameters that they add.
ADDED = {
  "class_token": "cls",
  "init_values": _SCALE,
  "pre_norm": "Transformer/pre_norm/scale",
  "scale_mlp": _MLP_NORM,
  "scale_mlp_norm": _MLP_NORM,
}
QUICK = "_clip_quickgelu_"  # in names of architectures with OpenAI's GELU

# Arguments of timm's models that are read here, that follow from the arrays,
# that only training uses, or that change nothing at the size of the weights.
KNOWN = frozenset(
  """
  act_layer basic bottle_ratio channels class_token depth embed_dim fc_norm
  final_norm img_size in_chans init_values layers mlp_ratio no_embed_class
  num_classes num_heads patch_size pre_norm proj_bias qkv_bias
  reg_tokens scale_mlp_norm stem_chs width_factor
  attn_drop_rate drop_path_rate drop_rate fix_init patch_drop_rate
  pos_drop_rate proj_drop_rate weight_init zero_init_last
  dynamic_img_pad dynamic_img_size pool_include_prefix strict_img_size
  num_reg_tokens qkv_fused swiglu_mlp swiglu_align_to scale_mlp use_abs_pos_emb
  use_fc_norm rope_rescale_coords rope_shift_coords
  rope_jitter_coords head_init_scale
  """.split()
)
# The arguments of timm's ResNets that ours agree with.
RESNET = {
  "act_layer": ("relu",),
  "avg_down": (False,),
  "global_pool": ("avg",),
  "output_stride": (32,),
  "preact": (True,),
  "stem_type": ("fixed",),
}


# Form of rotary positions -> the arguments of timm's Eva that ours agrees with.
ROPES = {
  None: {"use_rot_pos_emb": (False,)},
  "dinov3": {
    "use_rot_pos_emb": (True,),
    "rope_type": ("dinov3",),
    "rope_temperature": (100, 100.0),
    "rope_rotate_half": (True,),
  },
  "eva02": {
    "use_rot_pos_emb": (True,),
    "rope_type": ("cat",),
    "ref_feat_shape": ([16, 16], 16),
    "rope_temperature": (10000, 10000.0),
    "rope_rotate_half": (False,),
    "rope_grid_offset": (0, 0.0),
    "rope_grid_indexing": ("ij",),
    "scale_attn_inner": (False,),
  },
}


@dataclasses.dataclass(frozen=True)
class Args:
  """The entries of `model_args` that are read.

  Sizes are pixels, one side or two.
  """

  num_heads: int | None = at_least(1)
  act_layer: str | None = None
  img_size: tuple[int, ...] = at_least(1, ())


@dataclasses.dataclass(frozen=True)
class Images:
  """Contents of `pretrained_cfg`, or of the top level of older files."""

  input_size: tuple[int, int, int] | None = at_least(1)
  label_names: tuple[str, ...] | None = None
  crop_pct: float = 0.875
  interpolation: str = "bicubic"
  crop_mode: str = "center"
  mean: tuple[float, ...] | None = None
  std: tuple[float, ...] | None = None

  @property
  def pixels(self) -> Pixels | None:
    """The normalisation; None if it is not stated.

    Raises:
      ValueError: Only one of mean and deviation is stated.
    """
    if (self.mean is None) != (self.std is None):
      stated, missing = ("mean", "std") if self.mean else ("std", "mean")
      raise ValueError(
        f"config.json: got {stated} without {missing}, expected both or none."
      )
    return None if self.mean is None else Pixels(self.mean, self.std)


@dataclasses.dataclass(frozen=True)
class TimmConfig:
  """Contents of config.json.

  Attributes:
    architecture: NAME or NAME.TAG of timm's.
    global_pool: Pooling of the model; None for that of its architecture.
    problem_type: What the head was trained for, in transformers' files of
      timm's models; None if it is not stated.
    model_args: All arguments of the model.
    args: The arguments among them that are read.
    images: Preprocessing of images.
    image_json: The values of `images` as they are written.
  """

  architecture: str = ""
  global_pool: Any = None
  problem_type: str | None = None
  model_args: dict = dataclasses.field(default_factory=dict)
  args: Args = Args()
  images: Images = Images()
  image_json: dict = dataclasses.field(default_factory=dict)

  @classmethod
  def of(cls, config: Mapping[str, Any], where: str) -> "TimmConfig":
    """Returns the contents of config.json with their types.

    Args:
      config: The contents; {} without such a file.
      where: The file, for messages.

    Raises:
      ValueError: Values have other types.
    """
    top = json_file.build(_Top, config, where)
    about = {**config, **top.pretrained_cfg}
    return cls(
      top.architecture,
      top.global_pool,
      top.problem_type,
      top.model_args,
      json_file.build(Args, top.model_args, where, "model_args"),
      json_file.build(Images, about, where),
      about,
    )

  @property
  def image_size(self) -> tuple[int, int] | None:
    """(height, width) of the images, in pixels; None if not stated.

    img_size, the size of the model's positions, has precedence: timm does not
    update input_size, which may be that of other weights.
    """
    if self.args.img_size:
      key = "config.json: model_args.img_size"
      return height_and_width(self.args.img_size, key)
    return self.images.input_size and self.images.input_size[1:]


@dataclasses.dataclass(frozen=True)
class _Top:
  architecture: str = ""
  global_pool: Any = None
  problem_type: str | None = None
  model_args: dict = dataclasses.field(default_factory=dict)
  pretrained_cfg: dict = dataclasses.field(default_factory=dict)


def read(file: StateDict) -> Weights:
  """Returns the weights of a file, from its arrays, header and config.json.

  If vit_jax wrote the file, its metadata are in the header, and config.json is
  not read.

  Raises:
    ValueError: The arrays fit no model of vit_jax; or config.json is damaged,
      or states something that our model does not compute.
  """
  if ours := metadata_of(file):
    arguments = {"num_heads": num_heads_of(ours)}
  else:
    config = TimmConfig.of(file.config, f"{file.path}: config.json")
    arguments = read_arguments(config)
  if num_heads := file.options.get("num_heads"):
    arguments["num_heads"] = num_heads
  params, options = timm.read(file.arrays, **arguments)
  notes = ()
  if beside := [n for n in file.arrays if timm.PRETRAINING.match(n)]:
    notes = (f"left out: {shorten(beside)}, which only pre-training uses.",)
  weights = Weights(
    str(file.path),
    "timm",
    params,
    options,
    notes=notes,
  )
  if ours:
    return _of_ours(with_metadata(weights, ours))
  options |= options_of(config, params, options)
  states_none = config.model_args.get("pos_embed") in ("none", "")
  is_lost = options.get("posemb") == "none" and not options.get("rope")
  if is_lost and not (states_none or "posemb" in file.options):
    raise ValueError(LOST_POSITIONS)  # timm's models have a table
  loss = None
  if config.problem_type and "head/kernel" in params:
    loss = hf_head.LOSSES[config.problem_type]
  if loss == REGRESSION:
    notes += (hf_head.IS_REGRESSION,)
  size, grid = config.image_size, None
  if size and size[0] != size[1] and POS_EMBEDDING in params:
    grid = identify(params, options).grid(size)
  weights = dataclasses.replace(
    weights,
    grid=grid,
    image_size=size,
    class_names=hf_head.named(config.images.label_names or ()),
    loss=loss,
    pixels=config.images.pixels,
    is_bare=not file.config,
    notes=notes,
  )
  if size:
    weights = _with_preprocessing(weights, config)
  return weights


def _of_ours(weights: Weights) -> Weights:
  """Corrects a file from vit_jax: with registers it has no row for cls."""
  if "registers" in weights.params and weights.options.get("cls_row"):
    options = {k: v for k, v in weights.options.items() if k != "cls_row"}
    return dataclasses.replace(weights, options=options)
  return weights


def _with_preprocessing(weights: Weights, config: TimmConfig) -> Weights:
  """Adds timm's evaluation preprocessing, or the nearest one and a note."""
  size, notes = weights.image_size, weights.notes
  share, filter = config.images.crop_pct, config.images.interpolation
  mode = config.images.crop_mode
  if not 0.01 <= share <= 100:
    raise ValueError(
      f"config.json: crop_pct: got {share}, expected the side of the crop by"
      " that of the image, such as 0.875."
    )
  path = eval_preprocessing.timm(size, min(share, 1.0), filter, mode)
  ops = path.ops
  if mode == "squash" and share < 1:
    ops = eval_preprocessing.centre_of(
      path, tuple(int(s / share) for s in size)
    )
  # Above 1, timm alone puts a frame around the image.
  if path.filter != filter or share > 1 or not (path.short or mode == "squash"):
    keys = "input_size", "interpolation", "crop_pct", "crop_mode"
    notes += (
      eval_preprocessing.unlike("config.json", config.image_json, keys, size),
    )
  return dataclasses.replace(
    weights,
    ops=ops,
    notes=notes,
    crop_share=min(share, 1.0) if path.short else None,
  )


def read_arguments(config: TimmConfig) -> dict[str, Any]:
  """Returns the arguments of `timm.read`: num_heads, act_layer and pool.

  Arguments of the model have precedence over its architecture.
  """
  name = config.architecture.partition(".")[0]  # NAME.TAG
  act_layer = "gelu_tanh" if name in TANH else "gelu"
  if QUICK in name:
    act_layer = "quick_gelu"
  pool = config.model_args.get("global_pool") or config.global_pool
  if pool is None and "dinov3" in name:
    pool = "avg"  # and not the class token, as Meta's
  return {
    "num_heads": config.args.num_heads or HEADS.get(name),
    "act_layer": config.args.act_layer or act_layer,
    "pool": pool,
  }


def options_of(
  config: TimmConfig, params: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns options of the model that follow from config.json and arrays.

  Args:
    config: The result of `TimmConfig.of`.
    params: Our flat names -> anything.
    options: The options from `timm.read`.

  Returns:
    cls_row=False if the table has no row for the class token.

  Raises:
    ValueError: timm's model computes something else than ours.
  """
  if errors := list(_errors(config, params, options)):
    raise ValueError("\n".join(errors))
  if config.model_args.get("no_embed_class") is True and "cls" in params:
    return {"cls_row": False}
  return {}


def _errors(
  config: TimmConfig, params: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[str]:
  for part, what in FOREIGN.items():
    if part in config.architecture:
      yield (
        f"config.json: architecture: got {shown(config.architecture)}, whose"
        f" {what} vit_jax does not have. Use other weights."
      )
  for error in hf_head.problem_errors(config.problem_type):
    yield f"config.json: {error}"
  args = config.model_args
  stated = {f"model_args.{k}": v for k, v in args.items() if v is not None}
  if config.global_pool is not None:
    stated["global_pool"] = config.global_pool
  yield from _lost(config, params)
  ours = _our_arguments(params, options)
  for key, value in stated.items():
    name = key.removeprefix("model_args.")
    # By type as well: 1 is not True.
    if name in ours and (type(value), value) not in [
      (type(v), v) for v in ours[name]
    ]:
      expected = " or ".join(map(repr, ours[name]))
      yield (
        f"config.json: {key}: got {shown(value)}, expected {expected}, which"
        " vit_jax computes with these arrays. Use other weights, or correct"
        " config.json."
      )
    elif name not in ours and name not in KNOWN:
      yield (
        f"config.json: {key}: got {shown(value)}, expected no such key, because"
        " timm's model may depend on it. If timm's logits are the same without"
        " it, remove it from config.json."
      )


def _lost(config: TimmConfig, params: Mapping[str, Any]) -> Iterator[str]:
  """Yields an error for each part that is stated and that the file lacks."""
  if "embedding/kernel" not in params:
    return
  registers = params["registers"].shape[1] if "registers" in params else 0
  has = {key: name in params for key, name in ADDED.items()} | {
    "depth": count_blocks(params, r"Transformer/encoderblock_(\d+)/"),
    "reg_tokens": registers,
    "num_reg_tokens": registers,
  }
  width = params["embedding/kernel"].shape[-1]
  named, args = named_arguments(config.architecture, width), config.model_args
  for key, ours in has.items():
    value = args.get(key, named.get(key))
    if key in ADDED:  # an initial value, or whether there is such a part
      value = bool(value) or None
    if value is None or value == ours:
      continue
    where = f"model_args.{key}: got {shown(args.get(key))}"
    if key not in args:
      name = shown(config.architecture)
      where = f"architecture: got {name}, a model with {key}={value}"
    yield (
      f"config.json: {where}, expected {ours} by the arrays. Use a complete"
      f" file, or correct model_args.{key} in config.json."
    )


def named_arguments(architecture: str, width: int) -> dict[str, Any]:
  """Returns the arguments of timm's models that a name states.

  They are the number of blocks, if a model of `timm_names` has this size and
  width; the number of registers; and whether there is LayerScale.

  Args:
    architecture: NAME or NAME.TAG of timm's.
    width: Width of the tokens.

  Example:
    >>> named_arguments("vit_small_patch14_reg4_dinov2.lvd142m", 384)
    {'depth': 12, 'reg_tokens': 4, 'init_values': True}
  """
  name = architecture.partition(".")[0]
  stated: dict[str, Any] = {}
  size = name.split("_")[1:2]
  if not re.search(r"_\d+x\d+_", name):  # vit_small_patch16_36x1_224
    for model, names in timm_names.published():
      sizes = [name.split("_")[1:2] for name in names]
      if size in sizes and model.name != "bit" and model.size.width == width:
        stated["depth"] = model.size.depth
  if registers := re.search(r"_reg(\d+)_", name):
    stated["reg_tokens"] = int(registers[1])
  if re.search(r"_dinov[23]|^deit3_|^beit(v2)?_|_tipsv2", name):
    stated["init_values"] = True
  return stated


def _our_arguments(
  params: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, tuple]:
  """Returns the values of timm's arguments for which our model is the same."""
  if "embedding/kernel" not in params:
    return RESNET
  pools = ("map",) if "MAPHead_0/probe" in params else ("avg",)
  if "dist" in params:
    pools = ("token",)
  elif "cls" in params:
    pools = ("token", "avg")
  has_table = POS_EMBEDDING in params
  default = "token" if "cls" in params else "gap"
  is_mean = options.get("pool", default) == "gap"
  has_prefix = bool({"cls", "registers"} & params.keys())
  return {
    "global_pool": pools,
    "pos_embed": ("learn",) if has_table else ("none", ""),
    "qk_norm": (False,),
    "scale_attn_norm": (False,),
    **({"pool_include_prefix": (False,)} if is_mean and has_prefix else {}),
    **ROPES[options.get("rope")],
  }
