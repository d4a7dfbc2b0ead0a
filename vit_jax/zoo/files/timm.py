"""Weights under timm's and Meta's names: ViT and later models, hybrids, BiT.

`timm_rows` has the key tables and the layouts of blocks, `timm_names` the names
of timm's models. A new series gets a layout, or its own table, and a row in
`FACTS`. A difference in its computation becomes an option in
`vit_jax/families/`.

Names, layouts and numbers are those of timm 1.0.31. Its GELU is exact, except
for the architectures in `TANH` and `QUICK`. The epsilon of LayerNorm is 1e-6
(1e-5 for CLIP and DINOv3), that of GroupNorm 1e-5. Weight standardisation adds
1e-8 to the variance. Meta's files of DeiT, DINOv2, DINOv3 and MAE differ only
in names.

config.json beside a file states what arrays cannot show: the number of heads,
the activation, the preprocessing of images, the class names.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from vit_jax.config import ModelConfig, json_file
from vit_jax.config.from_dict import at_least
from vit_jax.losses import REGRESSION
from vit_jax.models.posemb import sincos2d
from vit_jax.options import shown, unexpected
from vit_jax.weights import eval_preprocessing
from vit_jax.weights.identification import identify
from vit_jax.weights.weights_file import (
  POS_EMBEDDING,
  LazyArray,
  Pixels,
  StateDict,
  Weights,
  has_row_of_class,
  height_and_width,
)
from vit_jax.zoo.files import hf, timm_names
from vit_jax.zoo.files.series import Arrays, Params, Series, Stated
from vit_jax.zoo.files.timm_names import CLIP_LN_EPS, LN_EPS
from vit_jax.zoo.files.timm_rows import (
  BIASES,
  META_APART,
  META_PACKED,
  TIMM_APART,
  VIT,
  Layout,
  bit_rows,
  count_units,
  layout_of,
  stem_rows,
  vit_rows,
)
from vit_jax.zoo.files.torch_layout import (
  Row,
  count_blocks,
  length,
  option_errors,
  to_theirs,
)

# timm's act_layer -> our GELU.
GELUS = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}
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
QUICK = "_clip_quickgelu_"  # in names of architectures with OpenAI's GELU
# num_heads of architectures that differ from other models of the same shapes.
HEADS = {"vit_base_patch16_gap_224": 16}
# In names of architectures: rotary positions that are neither DINOv3's nor
# EVA-02's, norms after attention and MLP, attention pooling of registers. Their
# arrays are those of models that compute something else.
UNLIKE = ("_rope_", "_rpn_", "test_vit3")


class Fact(NamedTuple):
  """Options that no array shows, by the arrays that a file has and lacks.

  has, lacks: Keys of the result of `_marks`.
  options: The options; None if vit_jax does not compute such models.
  models: Those models, for the message.
  """

  has: str
  lacks: str
  options: dict[str, Any] | None
  models: str = ""


_DINOV3 = {"rope": "dinov3", "posemb": "none", "ln_eps": CLIP_LN_EPS}
_ROPE = "timm's _rope_ models, without a class token"
_EVA = "timm's class Eva, without a sign of its positions"
_PE = "a Perception Encoder"
# In each group the first one that fits counts.
FACTS = (
  (Fact("stages", "", timm_names.RESNET),),
  (
    Fact("registers scales eva cls", "table", _DINOV3),
    Fact("registers scales storage cls", "table", _DINOV3),
    Fact("registers scales eva", "table", None, _ROPE),
    Fact("registers scales storage", "table", None, _ROPE),
    Fact("biases", "", {"posemb": "relative_bias"}),
    Fact("eva gated", "registers", {"rope": "eva02"}),
    Fact("eva apart", "", None, _EVA),
    Fact("eva registers", "", None, _EVA),
  ),
  (
    Fact("pre_norm attn_pool", "", None, _PE),
    Fact("pre_norm scales", "", None, _PE),
    Fact("pre_norm", "last_norm", None, _PE),
    Fact("pre_norm", "", {"ln_eps": CLIP_LN_EPS}),
  ),
)

# Arrays that pre-training alone has.
PRETRAINING = re.compile(
  r"mask_token$|decoder_|local_cls_norm\.|lm_head\.|projectors\."
  r"|(dino|ibot)_head\.|head\.(mlp|last_layer)\."
)
# Constants in files of Meta and of EVA-02, which are computed here.
CONSTANTS = re.compile(
  r"rope(_embed)?\.(?!freqs$)|blocks\.\d+\.attn\.(rope\.|qkv\.bias_mask$)"
  r"|blocks\.\d+\.attn\.relative_position_index$"
)
PERIODS = "rope_embed.periods"

_BLOCK = "Transformer/encoderblock_0"
_MLP_NORM = f"{_BLOCK}/MlpBlock_0/LayerNorm_0/scale"
# Arguments of timm's models -> the parameters that they add.
ADDED = {
  "class_token": "cls",
  "init_values": f"{_BLOCK}/LayerScale_0/scale",
  "pre_norm": "Transformer/pre_norm/scale",
  "scale_mlp": _MLP_NORM,
  "scale_mlp_norm": _MLP_NORM,
}
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
# Values of timm's arguments for which our ResNet computes the same.
RESNET = {
  "act_layer": ("relu",),
  "avg_down": (False,),
  "global_pool": ("avg",),
  "output_stride": (32,),
  "preact": (True,),
  "stem_type": ("fixed",),
}

# Form of rotary positions -> values of the arguments of timm's Eva for which
# our model computes the same.
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
      raise ValueError(f"config.json: got {stated} without {missing}.")
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
  def name(self) -> str:
    """The architecture without its tag."""
    return self.architecture.partition(".")[0]

  @property
  def act_layer(self) -> str:
    """timm's activation; arguments have precedence over the architecture."""
    default = "quick_gelu" if QUICK in self.name else "gelu"
    default = "gelu_tanh" if self.name in TANH else default
    return self.args.act_layer or default

  @property
  def pool(self) -> Any:
    """timm's global_pool; None if it follows from the arrays."""
    if pool := self.model_args.get("global_pool") or self.global_pool:
      return pool
    # The mean, and not the class token, as Meta's.
    return "avg" if "dinov3" in self.name else None

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


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a ViT, a hybrid or a ResNet V2 of timm's.

  A related model with parts that vit_jax does not have may also have such
  names.
  """
  names = set(names)
  if "patch_embed.proj.weight" in names:
    return any(n.startswith("blocks.0.") for n in names)
  return _is_resnet(names)


def _is_resnet(names) -> bool:
  return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= set(names)


def config(file: StateDict | None) -> Stated:
  """Returns what config.json beside a file states."""
  if file is None:
    return Stated(config=TimmConfig())
  return stated(
    TimmConfig.of(file.config, f"{file.path}: config.json"), "config.json"
  )


def stated(
  about: TimmConfig,
  file: str,
  keys: tuple[str, str] = ("model_args", "global_pool"),
) -> Stated:
  """Returns the statements of a config.

  Args:
    about: Its contents.
    file: Its name.
    keys: Its names of the arguments of the model, and of the pooling.
  """
  values = {f"{keys[0]}.{k}": v for k, v in about.model_args.items()}
  for name in ADDED:  # an initial value, or whether there is such a part
    if key := values.pop(f"{keys[0]}.{name}", None):
      values[f"{keys[0]}.{name}"] = bool(key)
  values |= {keys[1]: about.global_pool, "problem_type": about.problem_type}
  for key in (keys[1], f"{keys[0]}.global_pool"):
    if values.get(key) == "":  # timm's model returns tokens, ours pools them
      del values[key]
  return Stated(
    file,
    about,
    about.args.num_heads or HEADS.get(about.name),
    {key: value for key, value in values.items() if value is not None},
    about.model_args.get("pos_embed") in ("none", ""),
  )


def rows(arrays: Arrays, _: Stated) -> list[Row]:
  """Returns the key table of a Transformer, a hybrid or BiT."""
  if _is_resnet(arrays):
    units = count_units(arrays, r"stages\.(\d)\.blocks\.(\d{1,3})\.", 0)
    return bit_rows(units)
  depth = count_blocks(arrays, r"blocks\.(\d{1,3})\.")
  units = count_units(
    arrays, r"\w+\.backbone\.stages\.(\d)\.blocks\.(\d{1,3})\.", 0
  )
  has_stages = "patch_embed.backbone.stem.conv.weight" in arrays
  return vit_rows(depth, layout_of(arrays)) + stem_rows(units, has_stages)


def _marks(arrays: Arrays) -> set[str]:
  """Returns the marks of the arrays, for `FACTS`."""
  layout = layout_of(arrays)
  has = {
    "table": "pos_embed" in arrays,
    "cls": "cls_token" in arrays,
    "registers": layout.registers in arrays,
    "storage": layout.registers == "storage_tokens",  # DINOv3 of Meta
    "scales": f"blocks.0.{layout.scale.format(1)}" in arrays,
    "gated": layout.mlp != "gelu",
    "apart": layout.qkv != "fused",
    # timm's VisionTransformer and Meta's DINOv2 have other names of these.
    "eva": layout.qkv in ("own", "apart") or layout.scale == "gamma_{}",
    "biases": f"blocks.0.attn.{BIASES}" in arrays,
    "pre_norm": "norm_pre.weight" in arrays,
    "attn_pool": "attn_pool.latent" in arrays,
    "last_norm": bool({"norm.weight", "fc_norm.weight"} & arrays.keys()),
    "stages": any(n.startswith("patch_embed.backbone.") for n in arrays),
  }
  return {mark for mark, is_there in has.items() if is_there}


def facts(
  arrays: Arrays, params: Params, stated: Stated
) -> tuple[dict[str, Any], list[str]]:
  """Returns the options that follow from timm's code, and errors.

  They are gelu and ln_eps, pool if there is a choice, rotary positions and
  their periods; gn_eps, ws_eps and ws_eps_on of a ResNet; root_pad of BiT.
  """
  about = stated.config
  name, errors = about.architecture, []
  if any(part in name for part in UNLIKE):
    errors.append(f"{stated.file}: got {name!r}, expected another model.")
  if _is_resnet(arrays):
    return timm_names.RESNET | {"root_pad": "zero"}, errors
  options = {"gelu": GELUS.get(about.act_layer), "ln_eps": LN_EPS}
  marks = _marks(arrays)
  for group in FACTS:
    for fact in group:
      if {*fact.has.split()} <= marks and not {*fact.lacks.split()} & marks:
        if fact.options is None:
          errors.append(f"got the arrays of {fact.models}: not computed here.")
        options |= fact.options or {}
        break
  if options.get("rope") == "dinov3" and PERIODS in arrays:
    options |= _periods(arrays[PERIODS], errors)
  if about.pool in ("avg", "token") and "cls" in params:
    options["pool"] = {"avg": "gap"}.get(about.pool, about.pool)
  elif "fc_norm.weight" in arrays:
    options["pool"] = "gap"
  is_mean = options.get("pool") == "gap" and "cls" in params
  if is_mean or options["gelu"] == "quick":
    options["name"] = "modern"  # no array tells
  if about.model_args.get("no_embed_class") is True and "cls" in params:
    options["cls_row"] = False
  return options, errors


def _periods(array: LazyArray, errors: list[str]) -> dict[str, Any]:
  """Returns the type of the periods in a file of Meta's."""
  periods = np.asarray(array, np.float32)
  expected = np.float32(100.0 ** (np.arange(len(periods)) / len(periods)))
  for name in ("float32", "bfloat16"):
    rounded = expected.astype(getattr(ml_dtypes, name, name)).astype("float32")
    if np.allclose(periods, rounded, rtol=1e-5, atol=0):
      return {"rope_periods": name}
  got = shown(periods.tolist())
  errors.append(f"{PERIODS}: got {got}, expected powers of 100 from 1.")
  return {}


def values(
  params: Params, options: Mapping[str, Any], _: Stated
) -> dict[str, tuple]:
  """Returns the values of timm's arguments for which our model is the same."""
  problem = {"problem_type": tuple(hf.LOSSES)}
  if "embedding/kernel" not in params:
    return RESNET | problem
  pools = ("map",) if "MAPHead_0/probe" in params else ("avg",)
  if "dist" in params:
    pools = ("token",)
  elif "cls" in params:
    pools = ("token", "avg")
  has_table = POS_EMBEDDING in params
  default = "token" if "cls" in params else "gap"
  is_mean = options.get("pool", default) == "gap"
  has_prefix = bool({"cls", "registers"} & params.keys())
  registers = params["registers"].shape[1] if "registers" in params else 0
  return {
    **problem,
    **{key: (name in params,) for key, name in ADDED.items()},
    "act_layer": tuple(GELUS),
    "depth": (count_blocks(params, r"Transformer/encoderblock_(\d+)/"),),
    "reg_tokens": (registers,),
    "num_reg_tokens": (registers,),
    "global_pool": pools,
    "timm_pool": pools,
    "pos_embed": ("learn",) if has_table else ("none", ""),
    "qk_norm": (False,),
    "scale_attn_norm": (False,),
    **({"pool_include_prefix": (False,)} if is_mean and has_prefix else {}),
    **ROPES[options.get("rope")],
  }


def heads(arrays: Arrays) -> tuple[int | None, str | None]:
  """Returns the heads of the known size with these arrays, or an error."""
  if _is_resnet(arrays):
    return 1, None  # there is no attention
  layout = layout_of(arrays)
  width = length(arrays.get("blocks.0.norm1.weight"))
  mlp_dim = length(arrays.get(f"blocks.0.mlp.{layout.swiglu[2]}.weight"))
  is_dinov3 = layout.registers in arrays and "pos_embed" not in arrays
  depth = count_blocks(arrays, r"blocks\.(\d{1,3})\.")
  return timm_names.known_heads(width, depth, mlp_dim, is_dinov3)


def complete(weights: Weights, stated: Stated, file: StateDict) -> Weights:
  """Returns weights with the images, class names and loss of config.json."""
  about, params, notes = stated.config, weights.params, weights.notes
  loss = None
  if about.problem_type and "head/kernel" in params:
    loss = hf.LOSSES[about.problem_type]
  if loss == REGRESSION:
    notes += (hf.IS_REGRESSION,)
  size, grid = about.image_size, None
  if size and size[0] != size[1] and POS_EMBEDDING in params:
    grid = identify(params, weights.options).grid(size)
  weights = dataclasses.replace(
    weights,
    grid=grid,
    image_size=size,
    class_names=hf.named(about.images.label_names or ()),
    loss=loss,
    pixels=about.images.pixels,
    is_bare=not file.config,
    notes=notes,
  )
  return _with_preprocessing(weights, about) if size else weights


def _with_preprocessing(weights: Weights, config: TimmConfig) -> Weights:
  """Adds timm's evaluation preprocessing, or the nearest one and a note."""
  size, notes = weights.image_size, weights.notes
  share, filter = config.images.crop_pct, config.images.interpolation
  mode = config.images.crop_mode
  if not 0.01 <= share <= 100:
    raise ValueError(f"config.json: crop_pct: got {share}, expected a share.")
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


def without_rows_of_registers(
  weights: Weights, grid: tuple[int, int] | None
) -> Weights:
  """Adds the positions of registers and class token to these tokens.

  timm's tables have rows for both or, if no_embed_class is True, for neither.

  Args:
    weights: Weights of timm's or Meta's.
    grid: Rows and columns of the position table, or None.
  """
  params, table = weights.params, weights.params.get(POS_EMBEDDING)
  if "registers" not in params or table is None:
    return weights
  num_rows, ends = table.shape[1], [0]
  tokens = [name for name in ("cls", "registers") if name in params]
  for name in tokens:
    ends.append(ends[-1] + params[name].shape[1])
  others = [n for n in ends if n < num_rows]
  fits = [n for n in others if not has_row_of_class(num_rows - n, grid)]
  widths = {params[name].shape[2] for name in tokens}
  if fits != ends[-1:] or widths != {table.shape[2]}:
    return weights
  new = {POS_EMBEDDING: _sum_of(table, None, ends[-1], num_rows)}
  for name, start, end in zip(tokens, ends[:-1], ends[1:], strict=True):
    new[name] = _sum_of(table, params[name], start, end)
  note = (
    f"the position table of {num_rows} rows has {ends[-1]} for"
    f" {' and '.join(tokens)}, which were added to their values."
  )
  notes = (*weights.notes, note)
  return dataclasses.replace(weights, params=params | new, notes=notes)


def _sum_of(
  table: LazyArray, tokens: LazyArray | None, start: int, end: int
) -> LazyArray:
  """Returns rows of a table, plus the tokens at these positions."""

  def read() -> np.ndarray:
    rows = np.asarray(table, np.float32)[:, start:end]
    return rows if tokens is None else rows + np.asarray(tokens, np.float32)

  shape = (table.shape[0], end - start, table.shape[2])
  return LazyArray(shape, np.dtype(np.float32), read)


SERIES = Series(
  "timm",
  "timm",
  looks_like,
  config,
  rows,
  facts,
  values,
  complete,
  heads,
  left_out=PRETRAINING,
  computed=CONSTANTS,
  ignored=KNOWN,
)


# Library -> {(rope, form of the MLP): layout}, for `write` and `write_meta`.
LAYOUTS = {
  "timm": {
    ("dinov3", "gelu"): Layout("own", "gelu", "gamma_{}"),
    ("dinov3", "swiglu"): Layout("own", "apart", "gamma_{}", swiglu=TIMM_APART),
    ("eva02", "swiglu"): Layout("own", "packed", "gamma_{}"),
    (None, "swiglu"): Layout(mlp="packed"),
    (None, "gelu"): VIT,
  },
  "meta": {
    ("dinov3", "gelu"): Layout("no_key", registers="storage_tokens"),
    ("dinov3", "swiglu"): Layout(
      "no_key", "apart", registers="storage_tokens", swiglu=META_APART
    ),
    (None, "swiglu"): Layout(
      mlp="packed", registers="register_tokens", swiglu=META_PACKED
    ),
    (None, "gelu"): Layout(registers="register_tokens"),
  },
}


def _layout_for(model: ModelConfig, library: str) -> Layout | None:
  """Returns how a library stores the blocks of a model; None if it cannot."""
  if model.name == "vit":
    return VIT
  if model.posemb == "relative_bias" and library == "timm":
    return Layout("own", "gelu", "gamma_{}")
  if model.rope == "eva02" and model.mlp_norm and library == "timm":
    return Layout("apart", "apart", "gamma_{}", swiglu=TIMM_APART)
  layout = LAYOUTS[library].get((model.rope, model.mlp))
  is_deit3 = model.layer_scale and not (model.cls_row or model.registers)
  if layout and library == "meta" and not model.rope and is_deit3:
    return layout._replace(scale="gamma_{}")
  return layout


def write(
  params: Mapping[str, Any],
  model: ModelConfig,
  *,
  grid: tuple[int, int] | None = None,
) -> dict[str, np.ndarray]:
  """Returns the arrays of timm's model, by its names.

  `timm_names.create_call` returns the call that makes the model. A fixed
  position table is written as a learned one. With registers, timm's table has
  no row for the class token; the row is added to the class token.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.
    grid: Rows and columns of patches; only sincos2d needs them.

  Raises:
    ValueError: timm's models lack a part of the model.
  """
  if others := option_errors(model, {"name": ("bit", "vit", "modern")}):
    raise ValueError(others[0])
  errors = []
  params = dict(params)
  stages = model.stages
  if model.name == "bit":
    rows = bit_rows(count_units(params, r"block(\d+)/unit(\d+)/", 1))
  else:
    units = count_units(params, r"block(\d+)/unit(\d+)/", 1)
    depth = count_blocks(params, r"Transformer/encoderblock_(\d+)/")
    rows = vit_rows(depth, _layout_for(model, "timm") or VIT)
    rows += stem_rows(units, bool(stages and stages.blocks))
    errors += timm_names.errors(model)
    if "registers" in params and model.has_cls_row:
      table = np.asarray(params[POS_EMBEDDING])
      params["cls"] = np.asarray(params["cls"]) + table[:, :1]
      params[POS_EMBEDDING] = table[:, 1:]
    if model.posemb == "sincos2d":
      width = params["embedding/kernel"].shape[-1]
      params[POS_EMBEDDING] = sincos2d(*grid, width)[None]
  arrays, missing = to_theirs(rows, params)
  errors += missing
  if errors:
    raise ValueError("timm cannot hold this model:\n" + "\n".join(errors))
  return arrays


# Options -> values of Meta's models, beside those of `LAYOUTS`.
META_OPTIONS = {
  "pool": ("token",),
  "posemb": ("learn", "none"),
  "posemb_at": ("stem",),
  "gelu": ("erf",),
}
META_MODERN = {
  "class_token": (True,),
  "patch_bias": (True,),
  "pre_norm": (False,),
  "final_norm": ("tokens",),
  "mlp_norm": (False,),
  "projection": (None,),
}


def write_meta(
  params: Mapping[str, Any], model: ModelConfig
) -> dict[str, np.ndarray]:
  """Returns the arrays of Meta's model: DeiT, DeiT III, DINOv2, DINOv3, MAE.

  DINOv3's key gets biases of zero and a mask there; its periods are written.
  The mask token, which strict loading expects, is zero.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.

  Raises:
    ValueError: Meta's models lack a part of the model.
  """
  layout, errors = None, []
  if model.name in ("vit", "modern"):
    layout = _layout_for(model, "meta")
    options = META_OPTIONS | (META_MODERN if model.name == "modern" else {})
    errors += option_errors(model, options)
  if layout is None or model.stages:
    families = "DeiT, DINOv2, DINOv3 or MAE"
    errors.append(unexpected("config.model", model.variant, families))
  params, rope = dict(params), getattr(model, "rope", None)
  depth = count_blocks(params, r"Transformer/encoderblock_(\d+)/")
  if rope:
    for name in [n for n in params if n.endswith("/query/bias")]:
      params[name.replace("/query/", "/key/")] = np.zeros_like(params[name])
  rows = vit_rows(depth, (layout or VIT)._replace(qkv="fused"))
  arrays, missing = to_theirs(rows, params)
  if errors := errors + missing:
    raise ValueError("Meta's models cannot hold it:\n" + "\n".join(errors))
  if getattr(model, "layer_scale", None) and (rope or model.cls_row):
    width = model.size.width
    arrays["mask_token"] = np.zeros((1, width), np.float32)
  if rope:
    quarter = model.size.width // model.size.num_heads // 4
    periods = np.float32(100.0 ** (np.arange(quarter) / quarter))
    dtype = getattr(ml_dtypes, model.rope_periods, model.rope_periods)
    arrays[PERIODS] = periods.astype(dtype).astype(np.float32)
    for name in [n for n in arrays if n.endswith("qkv.bias")]:
      mask = np.ones((3, arrays[name].size // 3), np.float32)
      mask[1] = 0
      arrays[f"{name}_mask"] = mask.ravel()
  return arrays
