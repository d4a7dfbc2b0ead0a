"""Key tables of timm's models, and of Meta's, which differ only in names.

A new series of models is a `Layout`, or rows in one of the tables.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vit_jax.weights.weights_file import POS_EMBEDDING, LazyArray
from vit_jax.zoo.files.torch_layout import Row, dense_rows, length, norm_rows


class Layout(NamedTuple):
  """How the blocks of a Transformer are stored; the defaults are the ViT's.

  qkv: "fused": one array for query, key and value, one for their biases;
    "no_key": the same with masked biases of the key (Meta's DINOv3); "own": one
    array, but separate biases of query and value (Eva, BEiT); "apart": separate
    arrays (EVA-02 B and L).
  mlp: "gelu"; or SwiGLU: "packed" in one array, whose first half is the gate,
    or "apart".
  scale: Name of LayerScale's factors, with a number from 1.
  registers: Name of the registers.
  swiglu: Names of gate, value and output of SwiGLU; the first two are the same
    if packed.
  """

  qkv: str = "fused"
  mlp: str = "gelu"
  scale: str = "ls{}.gamma"
  registers: str = "reg_token"
  swiglu: tuple[str, str, str] = ("fc1", "fc1", "fc2")


VIT = Layout()
BIASES = "relative_position_bias_table"  # BEiT's
TIMM_APART = ("fc1_g", "fc1_x", "fc2")
META_PACKED = ("w12", "w12", "w3")
META_APART = ("w1", "w2", "w3")


def layout_of(arrays: Mapping[str, LazyArray]) -> Layout:
  """Returns the layout of timm's or Meta's arrays."""
  first = "blocks.0."
  qkv = "fused"
  if first + "attn.q_proj.weight" in arrays:
    qkv = "apart"
  elif first + "attn.q_bias" in arrays:
    qkv = "own"
  elif "storage_tokens" in arrays:
    qkv = "no_key"  # whatever the array has: `qkv.bias_mask` is zero there
  scale = "gamma_{}" if first + "gamma_1" in arrays else "ls{}.gamma"
  names = ("reg_token", "register_tokens", "storage_tokens")
  registers = next((n for n in names if n in arrays), "reg_token")
  swiglu, mlp = ("fc1", "fc1", "fc2"), "gelu"
  for candidate in (TIMM_APART, META_APART, META_PACKED):
    if f"{first}mlp.{candidate[0]}.weight" in arrays:
      is_packed = candidate[0] == candidate[1]
      swiglu, mlp = candidate, "packed" if is_packed else "apart"
  hidden, out = (arrays.get(f"{first}mlp.fc{i}.weight") for i in (1, 2))
  if mlp == "gelu" and hidden is not None and out is not None:
    if hidden.shape and hidden.shape[0] == 2 * length(out):
      mlp = "packed"
  return Layout(qkv, mlp, scale, registers, swiglu)


def vit_rows(depth: int, layout: Layout = VIT) -> list[Row]:
  """Returns the key table of a Transformer; a hybrid also has `stem_rows`.

  A file has some of these arrays, never all.
  """
  rows = [
    Row("cls_token", "cls", "tokens"),
    Row("dist_token", "dist", "tokens"),
    Row(layout.registers, "registers", "tokens"),
    Row("pos_embed", POS_EMBEDDING, "tokens"),
    *dense_rows("patch_embed.proj", "embedding", "conv"),
    *norm_rows("norm_pre", "Transformer/pre_norm"),
  ]
  for i in range(depth):
    theirs, ours = f"blocks.{i}", f"Transformer/encoderblock_{i}"
    attention = f"{ours}/MultiHeadDotProductAttention_0"
    scales = [f"{theirs}.{layout.scale.format(n)}" for n in (1, 2)]
    rows += [
      *norm_rows(f"{theirs}.norm1", f"{ours}/LayerNorm_0"),
      *_qkv(f"{theirs}.attn", attention, layout.qkv),
      *dense_rows(f"{theirs}.attn.proj", f"{attention}/out", "from_heads"),
      Row(f"{theirs}.attn.{BIASES}", f"{attention}/relative_bias"),
      Row(scales[0], f"{ours}/LayerScale_0/scale"),
      *norm_rows(f"{theirs}.norm2", f"{ours}/LayerNorm_1"),
      *_mlp(f"{theirs}.mlp", f"{ours}/MlpBlock_0", layout),
      Row(scales[1], f"{ours}/LayerScale_1/scale"),
    ]
  attention = "MAPHead_0/MultiHeadDotProductAttention_0"
  return [
    *rows,
    *norm_rows("norm", "Transformer/encoder_norm"),
    *norm_rows("fc_norm", "pooled_norm"),
    Row("attn_pool.latent", "MAPHead_0/probe"),
    *_projections("attn_pool.q", attention, ("query",)),
    *_projections("attn_pool.kv", attention, ("key", "value")),
    *dense_rows("attn_pool.proj", f"{attention}/out", "from_heads"),
    *norm_rows("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
    *_mlp("attn_pool.mlp", "MAPHead_0/MlpBlock_0", VIT),
    *dense_rows("head", "head"),
    *dense_rows("head_dist", "head_dist"),
  ]


def _qkv(theirs: str, ours: str, form: str) -> list[Row]:
  """Returns the rows of query, key and value."""
  names = ("query", "key", "value")
  if form == "apart":
    return [
      row
      for name in names
      for row in dense_rows(
        f"{theirs}.{name[0]}_proj", f"{ours}/{name}", "to_heads", "heads_bias"
      )
    ]
  rows = _projections(f"{theirs}.qkv", ours, names)
  if form == "no_key":
    return [row for row in rows if row.ours != f"{ours}/key/bias"]
  if form == "own":
    rows = [row for row in rows if not row.ours.endswith("/bias")]
    rows += [
      Row(f"{theirs}.{name[0]}_bias", f"{ours}/{name}/bias", "heads_bias")
      for name in names
    ]
  return rows


def _mlp(theirs: str, ours: str, layout: Layout) -> list[Row]:
  gate, value, out = (f"{theirs}.{name}" for name in layout.swiglu)
  if layout.mlp == "packed":
    first = [
      *dense_rows(gate, f"{ours}/Gate", part=(0, 2)),
      *dense_rows(value, f"{ours}/Dense_0", part=(1, 2)),
    ]
  elif layout.mlp == "apart":
    first = [
      *dense_rows(gate, f"{ours}/Gate"),
      *dense_rows(value, f"{ours}/Dense_0"),
    ]
  else:
    first = dense_rows(f"{theirs}.fc1", f"{ours}/Dense_0")
  return [
    *first,
    *norm_rows(f"{theirs}.norm", f"{ours}/LayerNorm_0"),
    *dense_rows(out, f"{ours}/Dense_1"),
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


def count_units(names: Iterable[str], regex: str, first: int) -> list[int]:
  """Returns the number of units of each stage; `first` is the first number."""
  units: dict[int, list[int]] = {}
  for name in names:
    if m := re.match(regex, name):
      units.setdefault(int(m[1]) - first, []).append(int(m[2]) - first)
  num_stages = max(units, default=-1) + 1
  return [max(units.get(s, [-1])) + 1 for s in range(num_stages)]
