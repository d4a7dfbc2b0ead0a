"""Image towers of CLIP under OpenAI's and OpenCLIP's names.

The arrays of the text tower and the prefix `visual.` are removed before. A
tower that OpenCLIP takes from timm (`visual.trunk.`) has timm's names.
Where open_clip_config.json states nothing else, LayerNorm's epsilon is 1e-5 and
the output is the class token. No array shows the GELU: it is exact in
OpenCLIP's models, and x sigmoid(1.702 x) in OpenAI's.

Source: open_clip, src/open_clip/transformer.py.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.config import ModelConfig, json_file
from vit_jax.config.from_dict import at_least
from vit_jax.options import shown
from vit_jax.paths import file_in
from vit_jax.weights import eval_preprocessing
from vit_jax.weights.assumptions import LOST_POSITIONS
from vit_jax.weights.normalisation import NAMED
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
from vit_jax.zoo.files import timm_file, timm_names
from vit_jax.zoo.files.torch_layout import (
  Row,
  count_blocks,
  dense_rows,
  in_proj_rows,
  length,
  norm_rows,
  option_errors,
  shorten,
  to_ours,
  to_theirs,
  unplaced,
)

CONFIG = "open_clip_config.json"
PREFIX = "visual."
TRUNK = PREFIX + "trunk."
TRUNK_KEYS = ("timm_model_name", "timm_pool", "timm_model_kwargs")
LN_EPS = timm_names.CLIP_LN_EPS
# Options -> values that the tower supports.
OPTIONS = {
  "name": ("modern",),
  "pool": ("token",),
  "posemb": ("learn",),
  "cls_row": (True,),
  "pre_logits": (False,),
  "pre_norm": (True,),
  "patch_bias": (False,),
  "registers": (0,),
  "distilled": (False,),
  "final_norm": ("tokens",),
  "layer_scale": (None,),
  "qkv_bias": ("all",),
  "mlp": ("gelu",),
  "mlp_norm": (False,),
  "rope": (None,),
}


# act_kwargs.approximate, of PyTorch's GELU -> our GELU.
GELUS = {"none": "erf", "tanh": "tanh"}


@dataclasses.dataclass(frozen=True)
class _Gelu:
  approximate: str = "none"


@dataclasses.dataclass(frozen=True)
class _Norm:
  eps: float = LN_EPS


@dataclasses.dataclass(frozen=True)
class _Vision:
  """What no array of the tower shows, with OpenCLIP's defaults.

  `image_size` is in pixels, one side or two. With `head_width` None, the size
  of the tower decides on the heads. The entries timm_* are those of a tower
  that timm computes.
  """

  image_size: tuple[int, ...] = at_least(1, ())
  head_width: int | None = at_least(1, 64)
  pool_type: str = "tok"
  global_average_pool: bool = False
  final_ln_after_pool: bool = False
  no_ln_pre: bool = False
  act_kwargs: _Gelu = _Gelu()
  norm_kwargs: _Norm = _Norm()
  timm_model_name: str = ""
  timm_pool: str = "avg"
  timm_model_kwargs: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Model:
  """The towers; without a `vision_cfg`, the size decides on the heads."""

  quick_gelu: bool = False
  vision_cfg: _Vision = _Vision(head_width=None)


@dataclasses.dataclass(frozen=True)
class _Images:
  """The preprocessing of images; `size` is in pixels, one side or two."""

  size: tuple[int, ...] = at_least(1, ())
  mean: tuple[float, float, float] = NAMED["clip"].mean
  std: tuple[float, float, float] = NAMED["clip"].std
  interpolation: str = "bicubic"
  resize_mode: str = "shortest"


@dataclasses.dataclass(frozen=True)
class OpenClipConfig:
  """Contents of open_clip_config.json."""

  model_cfg: _Model = _Model()
  preprocess_cfg: _Images = _Images()


def rows(depth: int, last: str = "Transformer/encoder_norm") -> list[Row]:
  """Returns the key table of a tower; `last` is our name of its last norm."""
  table = [
    Row("class_embedding", "cls", "token"),
    Row("positional_embedding", POS_EMBEDDING, "table"),
    Row("conv1.weight", "embedding/kernel", "conv"),
    *norm_rows("ln_pre", "Transformer/pre_norm"),
  ]
  for block in range(depth):
    theirs = f"transformer.resblocks.{block}"
    ours = f"Transformer/encoderblock_{block}"
    attention = f"{ours}/MultiHeadDotProductAttention_0"
    table += [
      *in_proj_rows(f"{theirs}.attn.in_proj", attention),
      *dense_rows(f"{theirs}.attn.out_proj", f"{attention}/out", "from_heads"),
      *norm_rows(f"{theirs}.ln_1", f"{ours}/LayerNorm_0"),
      *norm_rows(f"{theirs}.ln_2", f"{ours}/LayerNorm_1"),
      *dense_rows(f"{theirs}.mlp.c_fc", f"{ours}/MlpBlock_0/Dense_0"),
      *dense_rows(f"{theirs}.mlp.c_proj", f"{ours}/MlpBlock_0/Dense_1"),
    ]
  return [
    *table,
    *norm_rows("ln_post", last),
    Row("proj", "projection/kernel"),
  ]


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a tower, without its prefix."""
  names = set(names)
  return {"class_embedding", "conv1.weight"} <= names and any(
    n.startswith("transformer.resblocks.0.") for n in names
  )


def read(file: StateDict) -> Weights:
  """Returns the weights of a file and the contents of open_clip_config.json.

  A file that vit_jax wrote has its own metadata in the header instead.

  Raises:
    ValueError: Arrays have no place in our models, or unexpected shapes; the
      number of heads is not known; or the config is damaged, or states
      something that our model does not compute.
  """
  ours = metadata_of(file)
  stated, config = ({}, OpenClipConfig()) if ours else _config(file)
  arrays, vision = file.arrays, config.model_cfg.vision_cfg
  errors = list(_errors(vision, arrays))
  if "positional_embedding" not in arrays and "posemb" not in file.options:
    errors.append(LOST_POSITIONS)
  depth = count_blocks(arrays, r"transformer\.resblocks\.(\d{1,3})\.")
  num_heads = file.options.get("num_heads") or num_heads_of(ours)
  width = length(arrays["class_embedding"])
  if num_heads is None and vision.head_width:
    num_heads, rest = divmod(width, vision.head_width)
    if rest:
      errors.append(
        f"{CONFIG}: model_cfg.vision_cfg.head_width: got {vision.head_width},"
        f" expected a divisor of the width {width}. Pass num_heads."
      )
  if num_heads is None:
    mlp_dim = length(arrays.get("transformer.resblocks.0.mlp.c_proj.weight"))
    num_heads, error = timm_names.known_heads(width, depth, mlp_dim)
    errors += [error] if error else []
  is_mean = vision.pool_type == "avg"
  if is_mean and vision.final_ln_after_pool:
    table = rows(depth, "pooled_norm")
  else:  # a norm of all tokens, or of one of them, is the same for that one
    table = rows(depth)
  params, shape_errors = to_ours(table, arrays, num_heads or 1)
  errors += shape_errors
  known = {row.theirs for row in table}
  if unknown := [n for n in arrays if n not in known]:
    errors.append(
      unplaced(unknown, (), "a Vision Transformer of OpenAI's or OpenCLIP's")
    )
  if errors:
    raise ValueError("weights of OpenCLIP: " + "\n".join(errors))
  options = {
    "name": "modern",
    "ln_eps": vision.norm_kwargs.eps,
    "gelu": GELUS[vision.act_kwargs.approximate],
    "patch_bias": False,
    "rope": None,
  }
  if config.model_cfg.quick_gelu:
    options["gelu"] = "quick"
  if is_mean:
    options["pool"] = "gap"
  weights = Weights(str(file.path), "openclip", params, options)
  if ours:
    return with_metadata(weights, ours)
  if not stated and "gelu" not in file.options:
    note = (
      f"no {CONFIG} is beside the file: gelu='erf' is assumed, as in OpenCLIP's"
      " models; OpenAI's, and those named quickgelu, have gelu='quick'."
    )
    weights = dataclasses.replace(weights, notes=(note,))
  return _with_images(weights, stated, config)


def has_trunk(names: Iterable[str]) -> bool:
  """Whether the names are those of a tower that OpenCLIP takes from timm."""
  return any(f".{TRUNK}" in f".{name}" for name in names)


def refuse_head(names: Iterable[str]) -> None:
  """Checks that OpenCLIP has no layers after a tower that it takes from timm.

  Raises:
    ValueError: There are such layers, `visual.head.`.
  """
  names = list(names)
  after = [n for n in names if f".{PREFIX}head." in f".{n}"]
  if after and has_trunk(names):
    raise ValueError(
      f"got {shorten(after)}, layers of OpenCLIP after a tower of timm's, which"
      f" vit_jax does not compute; expected the tower, {TRUNK!r}, alone."
    )


def read_trunk(file: StateDict) -> Weights:
  """Returns the weights of a tower of timm's, without its prefix.

  Raises:
    ValueError: As `timm_file.read`, and the config is damaged.
  """
  stated, config = _config(file)
  vision = config.model_cfg.vision_cfg
  if not vision.timm_model_name:
    return timm_file.read(file)
  about = {
    "architecture": vision.timm_model_name,
    "global_pool": vision.timm_pool or None,
    "model_args": vision.timm_model_kwargs,
  }
  try:
    weights = timm_file.read(file._replace(config=about))
  except ValueError as e:  # it names config.json and its keys
    text = str(e).replace("config.json", CONFIG)
    for theirs, key in zip(about, TRUNK_KEYS, strict=True):
      text = re.sub(rf"({CONFIG}: |correct ){theirs}", rf"\1{key}", text)
    raise ValueError(text) from None
  return _with_images(weights, stated, config)


def _config(file: StateDict) -> tuple[dict[str, Any], OpenClipConfig]:
  """Returns open_clip_config.json as it is written, and with its types.

  Raises:
    ValueError: It is damaged.
  """
  folder = file.path if file.path.is_dir() else file.path.parent
  stated = json_file.read(file_in(folder, CONFIG))
  return stated, json_file.build(OpenClipConfig, stated, f"{folder / CONFIG}")


def _errors(vision: _Vision, arrays: Mapping[str, Any]) -> Iterator[str]:
  """Yields statements that our model does not compute with these arrays."""
  has_norm = "ln_pre.weight" in arrays
  for key, value, expected in (
    ("pool_type", vision.pool_type, ("tok", "avg")),
    # It is the mean of all tokens, with the class token.
    ("global_average_pool", vision.global_average_pool, (False,)),
    ("act_kwargs.approximate", vision.act_kwargs.approximate, tuple(GELUS)),
    ("no_ln_pre", vision.no_ln_pre and has_norm, (False,)),
  ):
    if value not in expected:
      yield (
        f"{CONFIG}: model_cfg.vision_cfg.{key}: got {shown(value)}, expected"
        f" {' or '.join(map(repr, expected))}, which vit_jax computes with"
        " these arrays. Use other weights."
      )
  if not (vision.no_ln_pre or has_norm):
    yield (
      "ln_pre: missing, expected a norm before the blocks. Use a complete file."
      f" For a model that has none, such as CLIPA, {CONFIG} beside the file"
      ' states it: {"model_cfg": {"vision_cfg": {"no_ln_pre": true}}}.'
    )


def _with_images(
  weights: Weights, stated: Mapping[str, Any], config: OpenClipConfig
) -> Weights:
  """Adds OpenCLIP's preprocessing of images, if it is stated.

  Args:
    weights: Weights of the tower.
    stated: Contents of open_clip_config.json.
    config: The same with types.
  """
  if not stated.get("preprocess_cfg"):
    return weights
  images = config.preprocess_cfg
  weights = dataclasses.replace(weights, pixels=Pixels(images.mean, images.std))
  # OpenCLIP resizes images to the size of the model.
  of_model = config.model_cfg.vision_cfg.image_size
  table = weights.params.get(POS_EMBEDDING)
  patch = 1 if table is None else weights.params["embedding/kernel"].shape[0]
  sides = of_model or images.size
  if not sides and table is not None:
    # With or without a row for the class token, for which the root is the same.
    sides = (math.isqrt(table.shape[1]) * patch,)
  if not sides:
    return weights
  size, mode = height_and_width(sides, f"{CONFIG}: size"), "center"
  if images.resize_mode == "squash":
    mode = "squash"
  grid = None
  if of_model and size[0] != size[1] and table is not None:
    grid = size[0] // patch, size[1] // patch
  path = eval_preprocessing.timm(size, 1.0, images.interpolation, mode)
  notes = weights.notes
  has_mode = images.resize_mode in ("shortest", "squash")
  if path.filter != images.interpolation or not has_mode:
    about, keys = dataclasses.asdict(images), ("resize_mode", "interpolation")
    notes += (eval_preprocessing.unlike(CONFIG, about, keys, size),)
  return dataclasses.replace(
    weights,
    grid=grid,
    image_size=path.size,
    ops=path.ops,
    crop_share=1.0 if path.short else None,
    notes=notes,
  )


def write(
  params: Mapping[str, Any], model: ModelConfig
) -> dict[str, np.ndarray]:
  """Returns the arrays of a tower, by OpenCLIP's names.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.

  Raises:
    ValueError: OpenCLIP's tower lacks a part of the model.
  """
  errors = (
    option_errors(model, OPTIONS)
    if model.name == "modern"
    else [f"config.model.name: got {model.name!r}, expected 'modern'."]
  )
  table = rows(count_blocks(params, r"Transformer/encoderblock_(\d+)/"))
  arrays, missing = to_theirs(table, params)
  errors += missing
  if errors:
    raise ValueError("OpenCLIP cannot hold this model:\n" + "\n".join(errors))
  return {PREFIX + name: array for name, array in arrays.items()}
