"""Weights under timm's names: ViT, its hybrids, and BiT (`resnetv2_*_bit`).

The key tables are `vit_rows`, `stem_rows` and `bit_rows`. A new family gets
rows in one of them or a table of its own, loses its line in `PARTS`, and what
it computes otherwise becomes an option in `vit_jax/families/`.

Names, layouts and numbers are those of timm 1.0.31. Its GELU is the exact one,
except for the architectures `timm_file.TANH`; LayerNorm and GroupNorm add 1e-6
and 1e-5 to the variance, and weight standardisation adds 1e-8 to the variance.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.config import ModelConfig
from vit_jax.families.vit import SIZES, Size
from vit_jax.models.posemb import sincos2d
from vit_jax.options import shown
from vit_jax.weights.torch_layout import (
  Row,
  add_zero_biases,
  count_blocks,
  dense_rows,
  norm_rows,
  option_errors,
  shorten,
  to_ours,
  to_theirs,
  unplaced,
)
from vit_jax.weights.weights_file import POS_EMBEDDING, LazyArray

LN_EPS = 1e-6
# Options of a ViT -> values that timm's ViT supports.
OPTIONS = {"posemb": ("learn", "sincos2d", "none"), "posemb_at": ("stem",)}
RESNET = {"gn_eps": 1e-5, "ws_eps": 1e-8, "ws_eps_on": "var"}


def vit_rows(depth: int) -> list[Row]:
  """Returns the key table of a ViT; a hybrid has `stem_rows`, too."""
  rows = [
    Row("cls_token", "cls"),
    Row("pos_embed", POS_EMBEDDING),
    *dense_rows("patch_embed.proj", "embedding", "conv"),
  ]
  for i in range(depth):
    theirs, ours = f"blocks.{i}", f"Transformer/encoderblock_{i}"
    attention = f"{ours}/MultiHeadDotProductAttention_0"
    rows += [
      *norm_rows(f"{theirs}.norm1", f"{ours}/LayerNorm_0"),
      *_projections(f"{theirs}.attn.qkv", attention, ("query", "key", "value")),
      *dense_rows(f"{theirs}.attn.proj", f"{attention}/out", "from_heads"),
      *norm_rows(f"{theirs}.norm2", f"{ours}/LayerNorm_1"),
      *_mlp(f"{theirs}.mlp", f"{ours}/MlpBlock_0"),
    ]
  attention = "MAPHead_0/MultiHeadDotProductAttention_0"
  return [
    *rows,
    *norm_rows("norm", "Transformer/encoder_norm"),
    Row("attn_pool.latent", "MAPHead_0/probe"),
    *_projections("attn_pool.q", attention, ("query",)),
    *_projections("attn_pool.kv", attention, ("key", "value")),
    *dense_rows("attn_pool.proj", f"{attention}/out", "from_heads"),
    *norm_rows("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
    *_mlp("attn_pool.mlp", "MAPHead_0/MlpBlock_0"),
    *dense_rows("head", "head"),
  ]


def stem_rows(units: list[int], has_stages: bool) -> list[Row]:
  """Returns the key table of a hybrid's ResNet (activation after norm)."""
  prefix = "patch_embed.backbone."
  stem = prefix + "stem." * has_stages
  rows = [
    Row(f"{stem}conv.weight", "conv_root/kernel", "conv"),
    *norm_rows(f"{stem}norm", "gn_root"),
  ]
  for theirs, ours in _each_unit(units):
    rows += _unit_rows(prefix + theirs, ours)
    rows += norm_rows(f"{prefix}{theirs}.downsample.norm", f"{ours}/gn_proj")
  return rows


def bit_rows(units: list[int]) -> list[Row]:
  """Returns the key table of a ResNet V2 (norm, activation, convolution)."""
  rows = [Row("stem.conv.weight", "conv_root/kernel", "conv")]
  for theirs, ours in _each_unit(units):
    rows += _unit_rows(theirs, ours)
  return [
    *rows,
    *norm_rows("norm", "norm-pre-head"),
    *dense_rows("head.fc", "head", "conv1x1"),
  ]


def _each_unit(units: list[int]) -> list[tuple[str, str]]:
  return [
    (f"stages.{s}.blocks.{u}", f"block{s + 1}/unit{u + 1}")
    for s, count in enumerate(units)
    for u in range(count)
  ]


def _unit_rows(theirs: str, ours: str) -> list[Row]:
  rows = []
  for i in (1, 2, 3):
    kernel = f"{ours}/conv{i}/kernel"
    rows += [
      Row(f"{theirs}.conv{i}.weight", kernel, "conv"),
      *norm_rows(f"{theirs}.norm{i}", f"{ours}/gn{i}"),
    ]
  kernel = f"{ours}/conv_proj/kernel"
  return [*rows, Row(f"{theirs}.downsample.conv.weight", kernel, "conv")]


def _projections(theirs: str, ours: str, names: tuple[str, ...]) -> list[Row]:
  """Returns rows of projections that are stacked in one array."""
  rows = []
  for i, name in enumerate(names):
    part = (i, len(names))
    rows += dense_rows(theirs, f"{ours}/{name}", "to_heads", "heads_bias", part)
  return rows


def _mlp(theirs: str, ours: str) -> list[Row]:
  return [
    *dense_rows(f"{theirs}.fc1", f"{ours}/Dense_0"),
    *dense_rows(f"{theirs}.fc2", f"{ours}/Dense_1"),
  ]


def _count_units(names: Iterable[str], regex: str, first: int) -> list[int]:
  """Returns the number of units of each stage; `first` is the first number."""
  units: dict[int, list[int]] = {}
  for name in names:
    if m := re.match(regex, name):
      units.setdefault(int(m[1]) - first, []).append(int(m[2]) - first)
  num_stages = max(units, default=-1) + 1
  return [max(units.get(s, [-1])) + 1 for s in range(num_stages)]


# Names of arrays that our models have no place for -> what they are part of.
PARTS = (
  (r"dist_token|head_dist", "the distillation token of DeiT"),
  (r"\.ls[12]\.|\.gamma_[12]$", "LayerScale (DINOv2, DeiT III)"),
  (r"mask_token", "masked image modelling"),
  (r"reg(ister)?_token|storage_token", "register tokens (DINOv2, DINOv3)"),
  (r"[qk]_norm\.", "norms of queries and keys"),
  (r"rope|freqs", "rotary positions (DINOv3, EVA-02)"),
  (r"rel_pos|relative_position", "relative positions in timm's form"),
  (r"\.[qkv]_bias$", "biases of queries and values (BEiT, EVA)"),
  (r"mlp\.(w12|w[123]|fc1_[gx]|norm)\.", "a gated MLP (SwiGLU)"),
  (r"^fc_norm\.", "the norm after pooling, timm's form of average pooling"),
  (r"^norm_pre\.", "the norm before the blocks (CLIP)"),
  (r"running_(mean|var)$|num_batches_tracked$", "BatchNorm"),
)

# timm's act_layer -> our GELU.
GELUS = {"gelu": "erf", "gelu_tanh": "tanh"}

# Size -> names at 224 pixels, by the side of the patch; the first one stands
# for other patches.
_SIZES = {
  (192, 12, 768, 3): {16: "vit_tiny_patch16_224"},
  (384, 12, 1536, 6): {
    16: "vit_small_patch16_224",
    32: "vit_small_patch32_224",
    8: "vit_small_patch8_224",
  },
  (768, 12, 3072, 12): {
    16: "vit_base_patch16_224",
    32: "vit_base_patch32_224",
    8: "vit_base_patch8_224",
  },
  (1024, 24, 4096, 16): {
    16: "vit_large_patch16_224",
    32: "vit_large_patch32_224",
    14: "vit_large_patch14_224",
  },
  (1280, 32, 5120, 16): {14: "vit_huge_patch14_224"},
  (1408, 40, 6144, 16): {14: "vit_giant_patch14_224"},
  (1664, 48, 8192, 16): {14: "vit_gigantic_patch14_224"},
  (1152, 27, 4304, 16): {14: "vit_so400m_patch14_siglip_224"},
}
NAMES = {Size(*size): names for size, names in _SIZES.items()}

# Names whose defaults differ from those of the class VisionTransformer.
POOLS = {"vit_so400m_patch14_siglip_224": "map"}

# (units of each stage, size, side of the patch on the stages' output) -> name;
# the first one of the same stages stands for other sizes.
HYBRIDS = (
  ((), Size(192, 12, 768, 3), 8, "vit_tiny_r_s16_p8_224"),
  ((2, 2, 2, 2), Size(384, 12, 1536, 6), 1, "vit_small_r26_s32_224"),
  ((2, 2, 2, 2), Size(768, 12, 3072, 12), 1, "vit_base_r26_s32_224"),
  ((3, 4, 9), Size(768, 12, 3072, 12), 1, "vit_base_r50_s16_224"),
  ((3, 4, 6, 3), Size(1024, 24, 4096, 16), 1, "vit_large_r50_s32_224"),
)

# (units of each stage, factor of the width) -> name.
BITS = {
  ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
  ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
  ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
  ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
  ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
  ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a ViT, a hybrid or a ResNet V2 of timm's.

  A relative with parts that `read` refuses may have such names, too.
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
) -> tuple[dict[str, LazyArray], dict[str, Any]]:
  """Returns parameters by our flat names, and options of the model.

  No array is read before its use. Attention without biases gets biases of zero.

  Args:
    arrays: timm's name -> array.
    num_heads: Attention heads, which no array states; None: those of the known
      size of the same width, depth and mlp_dim.
    act_layer: Activation of a ViT's MLPs, a key of `GELUS`; not read for a
      ResNet.

  Returns:
    Parameters; and options of the model that follow from timm's code, not from
    the arrays: gelu and ln_eps of a ViT, and posemb of one without a table;
    gn_eps, ws_eps and ws_eps_on of a ResNet; root_pad of BiT.

  Raises:
    ValueError: Arrays have no place in our models, or unexpected shapes; the
      number of heads is not known; or the activation is no GELU.
  """
  is_resnet = _is_resnet(arrays)
  errors = []
  options: dict[str, Any] = {}
  if is_resnet:
    num_heads = 1  # there is no attention
    rows = bit_rows(
      _count_units(arrays, r"stages\.(\d)\.blocks\.(\d{1,3})\.", 0)
    )
    options |= RESNET | {"root_pad": "zero"}
  else:
    depth = count_blocks(arrays, r"blocks\.(\d{1,3})\.")
    units = _count_units(
      arrays, r"\w+\.backbone\.stages\.(\d)\.blocks\.(\d{1,3})\.", 0
    )
    has_stages = "patch_embed.backbone.stem.conv.weight" in arrays
    rows = vit_rows(depth) + stem_rows(units, has_stages)
    options |= {"gelu": GELUS.get(act_layer), "ln_eps": LN_EPS}
    if act_layer not in GELUS:
      errors.append(
        f"config.json: model_args.act_layer: got {shown(act_layer)}, expected"
        f" {' or '.join(GELUS)}: no other activation is here. Take other"
        " weights."
      )
    if any(n.startswith("patch_embed.backbone.") for n in arrays):
      options |= RESNET
    if num_heads is None:
      num_heads, error = _known_heads(arrays, depth)
      errors += [error] if error else []
  params, shape_errors = to_ours(rows, arrays, num_heads or 1)
  errors += shape_errors
  add_zero_biases(params)
  known = {row.theirs for row in rows}
  if unknown := [n for n in arrays if n not in known]:
    errors.append(
      unplaced(unknown, PARTS, "a plain ViT, of its hybrids, or of BiT")
    )
  if errors:
    raise ValueError("weights of timm: " + "\n".join(errors))
  if not is_resnet and POS_EMBEDDING not in params:
    options["posemb"] = "none"  # timm computes no positions
  return params, options


def _known_heads(arrays, depth: int) -> tuple[int | None, str | None]:
  """Returns the heads of the known size that these arrays have, or an error."""
  names = ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
  width, mlp_dim = (arrays[n].shape[0] if n in arrays else 0 for n in names)
  for size in SIZES.values():
    if (size.width, size.depth, size.mlp_dim) == (width, depth, mlp_dim):
      return size.num_heads, None
  return None, (
    f"got width {width}, depth {depth} and mlp_dim {mlp_dim}, which is none of"
    f" the sizes {', '.join(SIZES)}, so that the number of"
    " attention heads is unknown. State it: num_heads."
  )


def write(
  params: Mapping[str, Any],
  model: ModelConfig,
  *,
  grid: tuple[int, int] | None = None,
) -> dict[str, np.ndarray]:
  """Returns the arrays of timm's model, by its names.

  `create_call` returns the call that makes the model. A fixed position table is
  written as a learned one.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.
    grid: Rows and columns of patches; only sincos2d needs them.

  Raises:
    ValueError: timm's models lack a part of the model.
  """
  if model.name not in ("bit", "vit"):
    what = "such model"
    if model.name == "bit_v1":
      what = "ResNet with weight standardisation after activation on its own"
    raise ValueError(
      f"config.model.name: got {model.name!r}, expected 'bit' or 'vit': timm"
      f" has no {what}."
    )
  errors = []
  params = dict(params)
  stages = model.stages
  if model.name == "bit":
    rows = bit_rows(_count_units(params, r"block(\d+)/unit(\d+)/", 1))
  else:
    units = _count_units(params, r"block(\d+)/unit(\d+)/", 1)
    rows = vit_rows(count_blocks(params, r"Transformer/encoderblock_(\d+)/"))
    rows += stem_rows(units, bool(stages and stages.blocks))
    errors += _vit_errors(params, model)
    if model.posemb == "sincos2d" and grid is None:
      errors.append(
        "grid: got None, expected (rows, columns) of patches, which the fixed"
        " position table is written for."
      )
    elif model.posemb == "sincos2d":
      width = params["embedding/kernel"].shape[-1]
      params[POS_EMBEDDING] = sincos2d(*grid, width)[None]
  arrays, missing = to_theirs(rows, params)
  errors += missing
  known = {row.ours for row in rows} | {"pre_logits/kernel", "pre_logits/bias"}
  if unknown := [n for n in params if n not in known]:
    errors.append(
      f"got {shorten(unknown)}, which timm has no place for. Write the"
      " parameters of a ViT, of a hybrid or of BiT, blocks one by one."
    )
  if errors:
    raise ValueError("timm cannot hold this model:\n" + "\n".join(errors))
  return arrays


def _vit_errors(params, model: ModelConfig) -> list[str]:
  """Returns the parts that timm's ViT lacks."""
  errors = []
  if any(n.startswith("pre_logits/") for n in params):
    errors.append(
      "pre_logits: got a tanh layer before the head, expected none: timm has no"
      " place for it. Write the model without it and the head: --drop_head."
    )
  return errors + option_errors(model, OPTIONS)


def create_call(
  model: ModelConfig, num_classes: int, image_size: tuple[int, int]
) -> tuple[str | None, dict[str, Any]]:
  """Returns the arguments of `timm.create_model` for what `write` made.

  Args:
    model: A model that `write` takes.
    num_classes: Width of the head, 0 for none. It is always among the
      arguments, since timm's default depends on the name.
    image_size: Height and width in pixels.

  Returns:
    A name, and keyword arguments that JSON can represent; (None, {}) if timm
    has no name for the model.

  Example:
    >>> create_call(model_config(variant="B/16"), 10, (224, 224))
    ('vit_base_patch16_224', {'num_classes': 10, 'act_layer': 'gelu_tanh'})
  """
  stages = model.stages
  kwargs: dict[str, Any] = {"num_classes": num_classes}
  if model.name == "bit":
    name = BITS.get((tuple(stages.blocks), stages.width))
    return (name, kwargs) if name else (None, {})
  if model.name != "vit" or _vit_errors({}, model):
    return None, {}
  sizes, patch = model.size, model.patch
  if stages is not None:
    name, name_size, name_patch = _hybrid_name(stages, sizes)
    if name is None:
      return None, {}
  else:
    name_size = sizes if sizes in NAMES else Size(768, 12, 3072, 12)
    names = NAMES[name_size]
    name_patch = patch if patch in names else next(iter(names))
    name = names[name_patch]
  if tuple(image_size) != (224, 224):
    kwargs["img_size"] = list(image_size)
  if patch != name_patch:
    kwargs["patch_size"] = patch
  kwargs |= _size_kwargs(sizes, name_size)
  if model.pool != POOLS.get(name, "token"):
    kwargs["class_token"] = model.pool == "token"
    kwargs["global_pool"] = {"gap": "avg"}.get(model.pool, model.pool)
    if model.pool == "gap":
      kwargs["fc_norm"] = False
  if model.posemb == "none":
    kwargs["pos_embed"] = "none"
  elif model.pool == "token" and not (
    model.posemb == "learn" and model.cls_row
  ):
    kwargs["no_embed_class"] = True
  if model.channels != 3:
    kwargs["in_chans"] = model.channels
  if model.gelu == "tanh":
    kwargs["act_layer"] = "gelu_tanh"
  return name, kwargs


def _hybrid_name(stages, sizes: Size):
  rows = [row for row in HYBRIDS if row[0] == tuple(stages.blocks)]
  if not rows or stages.width != 1:
    return None, None, None
  row = next((r for r in rows if r[1] == sizes), rows[0])
  return row[3], row[1], row[2]


def _size_kwargs(sizes: Size, name_size: Size) -> dict[str, Any]:
  kwargs = {}
  for keyword, field in (
    ("embed_dim", "width"),
    ("depth", "depth"),
    ("num_heads", "num_heads"),
  ):
    if getattr(sizes, field) != getattr(name_size, field):
      kwargs[keyword] = getattr(sizes, field)
  ratio = sizes.mlp_dim / sizes.width
  if ratio != name_size.mlp_dim / name_size.width:
    # timm rounds width * ratio down.
    if int(sizes.width * ratio) < sizes.mlp_dim:
      ratio = math.nextafter(ratio, math.inf)
    kwargs["mlp_ratio"] = ratio
  return kwargs


def differences(model: ModelConfig) -> list[str]:
  """Returns a text for each difference to timm's model of `create_call`.

  Without any, both compute the same numbers, up to rounding.
  """
  texts = []
  if model.name == "vit" and model.ln_eps != LN_EPS:
    texts.append(
      f"LayerNorm adds {LN_EPS} to the variance, this model {model.ln_eps}; the"
      " argument norm_layer=functools.partial(timm.layers.LayerNorm,"
      f" eps={model.ln_eps}) makes it equal."
    )
  if model.stages is None:
    return texts
  if model.name == "bit" and model.root_pad != "zero":
    texts.append(
      "the maximum after the first convolution sees zeros beyond the border,"
      f" this model {model.root_pad}."
    )
  gn_eps, ws_eps, ws_eps_on = model.norms
  if gn_eps != RESNET["gn_eps"]:
    texts.append(
      f"GroupNorm adds {RESNET['gn_eps']} to the variance, this model {gn_eps}."
    )
  if (ws_eps, ws_eps_on) != (RESNET["ws_eps"], RESNET["ws_eps_on"]):
    to = {"std": "the standard deviation", "var": "the variance"}
    texts.append(
      f"weight standardisation adds {RESNET['ws_eps']} to the variance, this"
      f" model {ws_eps} to {to[ws_eps_on]}."
    )
  return texts
