"""Weights under timm's and Meta's names: ViT and later models, hybrids, BiT.

`timm_rows` has the key tables and the layouts of blocks, `timm_names` the names
of timm's models. A new series gets a layout, or its own table. A difference in
its computation becomes an option in `vit_jax/families/`.

Names, layouts and numbers are those of timm 1.0.31. Its GELU is exact, except
for the architectures in `timm_file.TANH` and `timm_file.QUICK`. The epsilon of
LayerNorm is 1e-6 (1e-5 for CLIP and DINOv3), that of GroupNorm 1e-5. Weight
standardisation adds 1e-8 to the variance. Meta's files of DeiT, DINOv2, DINOv3
and MAE differ only in names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from vit_jax.config import ModelConfig
from vit_jax.models.posemb import sincos2d
from vit_jax.options import shown
from vit_jax.weights.identification import has_modern_parts
from vit_jax.weights.weights_file import POS_EMBEDDING, LazyArray
from vit_jax.zoo.files import timm_names
from vit_jax.zoo.files.timm_names import CLIP_LN_EPS, LN_EPS, RESNET
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
  add_zero_biases,
  count_blocks,
  length,
  option_errors,
  to_ours,
  to_theirs,
  unplaced,
)

# timm's act_layer -> our GELU.
GELUS = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}

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

# Names of arrays that our models have no place for -> what they are part of.
PARTS = (
  (r"[qk]_norm\.|attn\.norm\.", "norms in attention"),
  (r"freqs", "rotary positions that are learned"),
  (r"rel_pos|relative_position", "relative positions that blocks share"),
  (r"running_(mean|var)$|num_batches_tracked$", "BatchNorm"),
)


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a ViT, a hybrid or a ResNet V2 of timm's.

  A related model with parts that `read` does not support may also have such
  names.
  """
  names = set(names)
  if "patch_embed.proj.weight" in names:
    return any(n.startswith("blocks.0.") for n in names)
  return _is_resnet(names)


def _is_resnet(names) -> bool:
  return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= set(names)


def read(
  arrays: Mapping[str, LazyArray],
  num_heads: int | None = None,
  act_layer: str = "gelu",
  pool: str | None = None,
) -> tuple[dict[str, LazyArray], dict[str, Any]]:
  """Returns parameters by our flat names, and options of the model.

  Arrays are lazy. A ViT's attention without biases gets biases of zero. Arrays
  that only pre-training uses (`PRETRAINING`) are left out.

  Args:
    arrays: Name -> array.
    num_heads: Attention heads, which no array shows; None for those of the
      known size with the same width, depth and mlp_dim.
    act_layer: Activation of a Transformer's MLPs, a key of `GELUS`; not used
      for a ResNet.
    pool: timm's global_pool; None if it follows from the arrays.

  Returns:
    Parameters; options of the model that follow from timm's code, not from the
    arrays: gelu and ln_eps, pool if there is a choice, rotary positions and
    their periods, and posemb without a table; gn_eps, ws_eps and ws_eps_on of a
    ResNet; root_pad of BiT.

  Raises:
    ValueError: Arrays have no place in our models, or unexpected shapes; the
      number of heads is not known; or the activation is not a GELU.
  """
  arrays = {n: a for n, a in arrays.items() if not PRETRAINING.match(n)}
  if _is_resnet(arrays):
    rows = bit_rows(
      count_units(arrays, r"stages\.(\d)\.blocks\.(\d{1,3})\.", 0)
    )
    options, errors = RESNET | {"root_pad": "zero"}, []
    num_heads = 1  # there is no attention
  else:
    depth = count_blocks(arrays, r"blocks\.(\d{1,3})\.")
    units = count_units(
      arrays, r"\w+\.backbone\.stages\.(\d)\.blocks\.(\d{1,3})\.", 0
    )
    has_stages = "patch_embed.backbone.stem.conv.weight" in arrays
    layout = layout_of(arrays)
    rows = vit_rows(depth, layout) + stem_rows(units, has_stages)
    options, errors = _options(arrays, layout, act_layer, pool)
    if num_heads is None:
      num_heads, error = _known_heads(arrays, depth, layout)
      errors += [error] if error else []
  params, shape_errors = to_ours(rows, arrays, num_heads or 1)
  errors += shape_errors
  if not is_modern(params, options):
    add_zero_biases(params)
  known = {row.theirs for row in rows}
  unknown = [n for n in arrays if n not in known and not CONSTANTS.match(n)]
  if unknown:
    takes = "a ViT with the parts of config.model.name=modern, a hybrid, BiT"
    errors.append(unplaced(unknown, PARTS, takes))
  if errors:
    raise ValueError("weights of timm: " + "\n".join(errors))
  is_mean = options.get("pool") == "gap" and "cls" in params
  if is_mean or options.get("gelu") == "quick":
    options["name"] = "modern"  # no array tells
  if "posemb" not in options and POS_EMBEDDING not in params:
    if not _is_resnet(arrays):
      options["posemb"] = "none"  # timm computes no positions
      if is_modern(params, options):
        options["rope"] = None  # whose arrays alone would be DINOv3's
  return params, options


def is_modern(params: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
  """Whether a part other than biases requires the family `modern`."""
  return bool(options.get("rope")) or has_modern_parts(params)


def _options(
  arrays: Mapping[str, LazyArray],
  layout: Layout,
  act_layer: str,
  pool: str | None,
) -> tuple[dict[str, Any], list[str]]:
  """Returns the options of a Transformer, and errors."""
  errors = []
  options: dict[str, Any] = {"gelu": GELUS.get(act_layer), "ln_eps": LN_EPS}
  if act_layer not in GELUS:
    errors.append(
      f"config.json: model_args.act_layer: got {shown(act_layer)}, expected"
      f" {' or '.join(GELUS)}: vit_jax has no other activation. Use other"
      " weights."
    )
  if any(n.startswith("patch_embed.backbone.") for n in arrays):
    options |= RESNET
  is_eva = layout.qkv in ("own", "apart") or layout.scale == "gamma_{}"
  has_scales = f"blocks.0.{layout.scale.format(1)}" in arrays
  # timm's VisionTransformer and Meta's DINOv2 have other names of these.
  of_dinov3 = is_eva or layout.registers == "storage_tokens"
  has_both = layout.registers in arrays and has_scales
  if "pos_embed" not in arrays and has_both and of_dinov3:
    options |= {"rope": "dinov3", "posemb": "none", "ln_eps": CLIP_LN_EPS}
    options |= _periods(arrays, errors)
    if "cls_token" not in arrays:
      errors.append(
        "got registers and LayerScale without a class token and a position"
        " table, the arrays of timm's _rope_ models, whose rotary positions are"
        " not DINOv3's; vit_jax does not have them. Expected DINOv3 (with a"
        " class token) or EVA-02."
      )
  elif f"blocks.0.attn.{BIASES}" in arrays:
    options |= {"posemb": "relative_bias"}
  elif is_eva and layout.mlp != "gelu" and layout.registers not in arrays:
    options |= {"rope": "eva02"}
  elif is_eva and (layout.qkv != "fused" or layout.registers in arrays):
    errors.append(
      "got the names of timm's class Eva without arrays that show its"
      " positions; expected the arrays of DINOv3 or EVA-02."
    )
  if "norm_pre.weight" in arrays:
    options["ln_eps"] = CLIP_LN_EPS
    has_norm = {"norm.weight", "fc_norm.weight"} & arrays.keys()
    if "attn_pool.latent" in arrays or has_scales or not has_norm:
      errors.append(
        "got the arrays of a Perception Encoder (a norm before the blocks, and"
        " attention pooling, LayerScale or no norm after them), whose rotary"
        " positions vit_jax does not have; expected those of CLIP, DINOv3 or"
        " EVA-02."
      )
  if pool in ("avg", "token") and "cls_token" in arrays:
    options["pool"] = {"avg": "gap"}.get(pool, pool)
  elif "fc_norm.weight" in arrays:
    options["pool"] = "gap"
  return options, errors


def _periods(
  arrays: Mapping[str, LazyArray], errors: list[str]
) -> dict[str, Any]:
  """Returns the type of the periods in a file of Meta's; {} for others."""
  if PERIODS not in arrays:
    return {}
  periods = np.asarray(arrays[PERIODS], np.float32)
  expected = np.float32(100.0 ** (np.arange(len(periods)) / len(periods)))
  for name in ("float32", "bfloat16"):
    rounded = expected.astype(getattr(ml_dtypes, name, name)).astype("float32")
    if np.allclose(periods, rounded, rtol=1e-5, atol=0):
      return {"rope_periods": name}
  errors.append(
    f"{PERIODS}: got {shown(periods.tolist())}, expected the powers of 100 from"
    f" 1 to {expected[-1]:.4g}: vit_jax has no other rotary positions."
  )
  return {}


def _known_heads(
  arrays, depth: int, layout: Layout
) -> tuple[int | None, str | None]:
  """Returns the heads of the known size with these arrays, or an error."""
  width = length(arrays.get("blocks.0.norm1.weight"))
  mlp_dim = length(arrays.get(f"blocks.0.mlp.{layout.swiglu[2]}.weight"))
  is_dinov3 = layout.registers in arrays and "pos_embed" not in arrays
  return timm_names.known_heads(width, depth, mlp_dim, is_dinov3)


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
  if model.name not in ("bit", "vit", "modern"):
    raise ValueError(
      f"config.model.name: got {model.name!r}, expected 'bit', 'vit' or"
      " 'modern', which timm has."
    )
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
    errors.append(
      f"config.model: got {model.name} {model.variant}, expected DeiT, DINOv2,"
      " DINOv3 or MAE."
    )
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
