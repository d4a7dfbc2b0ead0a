"""timm's names of arrays, and ours."""

import re
from collections.abc import Iterable

from vit_jax.weights.torch_layout import Row

POS_EMBEDDING = "Transformer/posembed_input/pos_embedding"


def count_units(names: Iterable[str], regex: str, first: int) -> list[int]:
  """Returns the number of units of each stage; `first` is the first number."""
  units: dict[int, list[int]] = {}
  for name in names:
    if m := re.match(regex, name):
      units.setdefault(int(m[1]) - first, []).append(int(m[2]) - first)
  num_stages = max(units, default=-1) + 1
  return [max(units.get(s, [-1])) + 1 for s in range(num_stages)]


def _norm(theirs: str, ours: str) -> list[Row]:
  return [
    Row(f"{theirs}.weight", f"{ours}/scale"),
    Row(f"{theirs}.bias", f"{ours}/bias"),
  ]


def _dense(theirs: str, ours: str, kind: str = "linear") -> list[Row]:
  return [
    Row(f"{theirs}.weight", f"{ours}/kernel", kind),
    Row(f"{theirs}.bias", f"{ours}/bias"),
  ]


def _projections(theirs: str, ours: str, names: tuple[str, ...]) -> list[Row]:
  """Returns rows of projections that are stacked in one array."""
  rows = []
  for i, name in enumerate(names):
    part = (i, len(names))
    rows += [
      Row(f"{theirs}.weight", f"{ours}/{name}/kernel", "to_heads", part),
      Row(f"{theirs}.bias", f"{ours}/{name}/bias", "heads_bias", part),
    ]
  return rows


def _mlp(theirs: str, ours: str) -> list[Row]:
  return [
    *_dense(f"{theirs}.fc1", f"{ours}/Dense_0"),
    *_dense(f"{theirs}.fc2", f"{ours}/Dense_1"),
  ]


def vit_rows(depth: int) -> list[Row]:
  rows = [
    Row("cls_token", "cls"),
    Row("pos_embed", POS_EMBEDDING),
    *_dense("patch_embed.proj", "embedding", "conv"),
  ]
  for i in range(depth):
    theirs, ours = f"blocks.{i}", f"Transformer/encoderblock_{i}"
    attention = f"{ours}/MultiHeadDotProductAttention_0"
    rows += [
      *_norm(f"{theirs}.norm1", f"{ours}/LayerNorm_0"),
      *_projections(f"{theirs}.attn.qkv", attention, ("query", "key", "value")),
      *_dense(f"{theirs}.attn.proj", f"{attention}/out", "from_heads"),
      *_norm(f"{theirs}.norm2", f"{ours}/LayerNorm_1"),
      *_mlp(f"{theirs}.mlp", f"{ours}/MlpBlock_0"),
    ]
  attention = "MAPHead_0/MultiHeadDotProductAttention_0"
  return [
    *rows,
    *_norm("norm", "Transformer/encoder_norm"),
    Row("attn_pool.latent", "MAPHead_0/probe"),
    *_projections("attn_pool.q", attention, ("query",)),
    *_projections("attn_pool.kv", attention, ("key", "value")),
    *_dense("attn_pool.proj", f"{attention}/out", "from_heads"),
    *_norm("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
    *_mlp("attn_pool.mlp", "MAPHead_0/MlpBlock_0"),
    *_dense("head", "head"),
  ]


def stem_rows(units: list[int], has_stages: bool) -> list[Row]:
  """Returns rows of a hybrid's ResNet; activations come after the norms."""
  prefix = "patch_embed.backbone."
  stem = prefix + "stem." * has_stages
  rows = [
    Row(f"{stem}conv.weight", "conv_root/kernel", "conv"),
    *_norm(f"{stem}norm", "gn_root"),
  ]
  for theirs, ours in _each_unit(units):
    rows += _unit_rows(prefix + theirs, ours)
    rows += _norm(f"{prefix}{theirs}.downsample.norm", f"{ours}/gn_proj")
  return rows


def bit_rows(units: list[int]) -> list[Row]:
  """Returns rows of a ResNet V2; norms, activations, then convolutions."""
  rows = [Row("stem.conv.weight", "conv_root/kernel", "conv")]
  for theirs, ours in _each_unit(units):
    rows += _unit_rows(theirs, ours)
  return [
    *rows,
    *_norm("norm", "norm-pre-head"),
    *_dense("head.fc", "head", "conv1x1"),
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
      *_norm(f"{theirs}.norm{i}", f"{ours}/gn{i}"),
    ]
  kernel = f"{ours}/conv_proj/kernel"
  return [*rows, Row(f"{theirs}.downsample.conv.weight", kernel, "conv")]
