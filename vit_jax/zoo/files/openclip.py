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
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.config import ModelConfig, json_file
from vit_jax.config.from_dict import at_least
from vit_jax.paths import file_in
from vit_jax.weights import eval_preprocessing
from vit_jax.weights.normalisation import NAMED
from vit_jax.weights.weights_file import (
  POS_EMBEDDING,
  Pixels,
  StateDict,
  Weights,
  height_and_width,
  shorten,
)
from vit_jax.zoo.files import timm, timm_names
from vit_jax.zoo.files.series import Arrays, Params, Series, Stated
from vit_jax.zoo.files.torch_layout import (
  Row,
  count_blocks,
  dense_rows,
  in_proj_rows,
  length,
  norm_rows,
  option_errors,
  to_theirs,
)

CONFIG = "open_clip_config.json"
PREFIX = "visual."
TRUNK = PREFIX + "trunk."
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


def config(file: StateDict | None) -> Stated:
  """Returns what open_clip_config.json states of the tower."""
  if file is None:
    return Stated(CONFIG, ({}, OpenClipConfig()))
  contents, about = _config(file)
  vision = about.model_cfg.vision_cfg
  key = "model_cfg.vision_cfg."
  width, num_heads = length(file.arrays["class_embedding"]), None
  if vision.head_width and not file.options.get("num_heads"):
    num_heads, rest = divmod(width, vision.head_width)
    if rest:
      raise ValueError(
        f"{CONFIG}: {key}head_width: got {vision.head_width}, expected a"
        f" divisor of the width {width}."
      )
  values = {
    key + "pool_type": vision.pool_type,
    # It is the mean of all tokens, with the class token.
    key + "global_average_pool": vision.global_average_pool,
    key + "act_kwargs.approximate": vision.act_kwargs.approximate,
    key + "no_ln_pre": vision.no_ln_pre,
  }
  return Stated(CONFIG, (contents, about), num_heads, values)


def table(arrays: Arrays, stated: Stated) -> list[Row]:
  """Returns the key table of a tower with these arrays."""
  vision = stated.config[1].model_cfg.vision_cfg
  depth = count_blocks(arrays, r"transformer\.resblocks\.(\d{1,3})\.")
  # A norm of all tokens, or of one of them, is the same for that one.
  if vision.pool_type == "avg" and vision.final_ln_after_pool:
    return rows(depth, "pooled_norm")
  return rows(depth)


def facts(
  arrays: Arrays, params: Params, stated: Stated
) -> tuple[dict[str, Any], list[str]]:
  """Returns the options that no array of the tower shows."""
  model = stated.config[1].model_cfg
  options = {
    "name": "modern",
    "ln_eps": model.vision_cfg.norm_kwargs.eps,
    "gelu": GELUS.get(model.vision_cfg.act_kwargs.approximate),
    "patch_bias": False,
    "rope": None,
  }
  if model.quick_gelu:
    options["gelu"] = "quick"
  if model.vision_cfg.pool_type == "avg":
    options["pool"] = "gap"
  return options, []


def values(
  params: Params, options: Mapping[str, Any], _: Stated
) -> dict[str, tuple]:
  """Returns the values of the config that our model computes."""
  return {
    "pool_type": ("tok", "avg"),
    "global_average_pool": (False,),
    "approximate": tuple(GELUS),
    # CLIPA has no norm before the blocks, and its config says so.
    "no_ln_pre": ("Transformer/pre_norm/scale" not in params,),
  }


def heads(arrays: Arrays) -> tuple[int | None, str | None]:
  """Returns the heads of the known size with these arrays, or an error."""
  return timm_names.known_heads(
    length(arrays["class_embedding"]),
    count_blocks(arrays, r"transformer\.resblocks\.(\d{1,3})\."),
    length(arrays.get("transformer.resblocks.0.mlp.c_proj.weight")),
  )


def complete(weights: Weights, stated: Stated, file: StateDict) -> Weights:
  """Returns weights with OpenCLIP's preprocessing of images."""
  contents, about = stated.config
  if not contents and "gelu" not in file.options:
    note = (
      f"no {CONFIG} is beside the file: gelu='erf' is assumed, as in OpenCLIP's"
      " models; OpenAI's, and those named quickgelu, have gelu='quick'."
    )
    weights = dataclasses.replace(weights, notes=(*weights.notes, note))
  return _with_images(weights, contents, about)


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
      f"got {shorten(after)}, layers of OpenCLIP after {TRUNK!r}."
    )


def _trunk_config(file: StateDict | None) -> Stated:
  """Returns what a config states of a tower of timm's."""
  if file is None:
    return timm.config(None)
  vision = _config(file)[1].model_cfg.vision_cfg
  if not vision.timm_model_name:
    return timm.config(file)
  about = {
    "architecture": vision.timm_model_name,
    "global_pool": vision.timm_pool or None,
    "model_args": vision.timm_model_kwargs,
  }
  about = timm.TimmConfig.of(about, f"{file.path}: {CONFIG}")
  return timm.stated(about, CONFIG, ("timm_model_kwargs", "timm_pool"))


def _complete_trunk(
  weights: Weights, stated: Stated, file: StateDict
) -> Weights:
  weights = timm.complete(weights, stated, file)
  if stated.file != CONFIG:
    return weights
  weights = dataclasses.replace(weights, is_bare=False)
  return _with_images(weights, *_config(file))


def _config(file: StateDict) -> tuple[dict[str, Any], OpenClipConfig]:
  """Returns open_clip_config.json as it is written, and with its types.

  Raises:
    ValueError: It is damaged.
  """
  folder = file.path if file.path.is_dir() else file.path.parent
  contents = json_file.read(file_in(folder, CONFIG))
  about = json_file.build(OpenClipConfig, contents, f"{folder / CONFIG}")
  return contents, about


def _with_images(
  weights: Weights, contents: Mapping[str, Any], config: OpenClipConfig
) -> Weights:
  """Adds OpenCLIP's preprocessing of images, if it is stated.

  Args:
    weights: Weights of the tower.
    contents: Contents of open_clip_config.json.
    config: The same with types.
  """
  if not contents.get("preprocess_cfg"):
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


SERIES = Series(
  "openclip",
  "OpenCLIP",
  looks_like,
  config,
  table,
  facts,
  values,
  complete,
  heads,
)
TRUNK_SERIES = timm.SERIES._replace(
  config=_trunk_config, complete=_complete_trunk
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
  errors = option_errors(model, {"name": ("modern",)})
  errors = errors or option_errors(model, OPTIONS)
  table = rows(count_blocks(params, r"Transformer/encoderblock_(\d+)/"))
  arrays, missing = to_theirs(table, params)
  errors += missing
  if errors:
    raise ValueError("OpenCLIP cannot hold this model:\n" + "\n".join(errors))
  return {PREFIX + name: array for name, array in arrays.items()}
