"""Families of transformers: names of their arrays, and what configs leave out.

A family is a line in `MODEL_TYPES` and a key table, such as `VIT`. What it
computes otherwise than our ViT becomes an option in `vit_jax/families/`.

A key table has the names in files. transformers 5 has other names in memory
(`vit.layers.0.attention.q_proj` for `vit.encoder.layer.0.attention.attention.
query`); they stand behind those of files, and both are read.

Source: transformers 5.24, models/*/modeling_*.py and configuration_*.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.weights.torch_layout import Row, dense_rows, norm_rows
from vit_jax.weights.weights_file import POS_EMBEDDING


class Names(NamedTuple):
  """The key table of a family.

  blocks: Beginnings of the names of block {i}.
  block: Our module in a block -> its names behind the beginning.
  other: Our module or array -> its names.
  rows: Rows that no name of ours tells the layout of.
  """

  blocks: tuple[str, ...]
  block: Mapping[str, tuple[str, ...]]
  other: Mapping[str, tuple[str, ...]]
  rows: tuple[Row, ...] = ()

  def table(self, depth: int) -> list[Row]:
    """Returns the rows of a model, those with names in memory included."""
    rows = [
      row
      for ours, names in self.other.items()
      for name in names
      for row in _rows(name, ours)
    ]
    for i in range(depth):
      for start in self.blocks:
        for ours, names in self.block.items():
          for name in names:
            rows += _rows(
              start.format(i=i) + name, f"Transformer/encoderblock_{i}/{ours}"
            )
    return [*rows, *self.rows]

  def in_files(self, depth: int) -> list[Row]:
    """Returns the rows of a model with the names in files alone."""
    first = {k: v[:1] for k, v in self.block.items()}
    other = {k: v[:1] for k, v in self.other.items()}
    return Names(self.blocks[:1], first, other, self.rows).table(depth)

  @property
  def number(self) -> str:
    """Regular expression of the beginning of a block's name, for its number."""
    starts = (re.escape(start.partition("{i}")[0]) for start in self.blocks)
    return rf"(?:{'|'.join(starts)})(\d{{1,3}})\."


def _rows(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of a module, or of a single array, by our name of it."""
  name = ours.rpartition("/")[2]
  if name in ("query", "key", "value"):
    return dense_rows(theirs, ours, "to_heads", "heads_bias")
  if re.search("(?i)norm", name):
    return norm_rows(theirs, ours)
  if name in ("cls", "pos_embedding", "probe"):
    return [Row(theirs, ours)]
  kinds = {"out": "from_heads", "embedding": "conv"}
  return dense_rows(theirs, ours, kinds.get(name, "linear"))


_ATTENTION = "MultiHeadDotProductAttention_0"
VIT = Names(
  blocks=("encoder.layer.{i}.", "layers.{i}."),
  block={
    "LayerNorm_0": ("layernorm_before",),
    f"{_ATTENTION}/query": ("attention.attention.query", "attention.q_proj"),
    f"{_ATTENTION}/key": ("attention.attention.key", "attention.k_proj"),
    f"{_ATTENTION}/value": ("attention.attention.value", "attention.v_proj"),
    f"{_ATTENTION}/out": ("attention.output.dense", "attention.o_proj"),
    "LayerNorm_1": ("layernorm_after",),
    "MlpBlock_0/Dense_0": ("intermediate.dense", "mlp.fc1"),
    "MlpBlock_0/Dense_1": ("output.dense", "mlp.fc2"),
  },
  other={
    "cls": ("embeddings.cls_token",),
    POS_EMBEDDING: ("embeddings.position_embeddings",),
    "embedding": ("embeddings.patch_embeddings.projection",),
    "Transformer/encoder_norm": ("layernorm",),
    "pre_logits": ("pooler.dense",),
    "head": ("classifier",),
  },
)


def _in_proj(theirs: str, ours: str) -> Iterator[Row]:
  """Yields the rows of torch.nn.MultiheadAttention's three projections."""
  for i, name in enumerate(("query", "key", "value")):
    for leaf, kind in (("weight", "to_heads"), ("bias", "heads_bias")):
      our_leaf = {"weight": "kernel"}.get(leaf, leaf)
      yield Row(f"{theirs}_{leaf}", f"{ours}/{name}/{our_leaf}", kind, (i, 3))


_POOLING = f"MAPHead_0/{_ATTENTION}"
SIGLIP = Names(
  blocks=("encoder.layers.{i}.",),
  block={
    "LayerNorm_0": ("layer_norm1",),
    f"{_ATTENTION}/query": ("self_attn.q_proj",),
    f"{_ATTENTION}/key": ("self_attn.k_proj",),
    f"{_ATTENTION}/value": ("self_attn.v_proj",),
    f"{_ATTENTION}/out": ("self_attn.out_proj",),
    "LayerNorm_1": ("layer_norm2",),
    "MlpBlock_0/Dense_0": ("mlp.fc1",),
    "MlpBlock_0/Dense_1": ("mlp.fc2",),
  },
  other={
    "embedding": ("embeddings.patch_embedding",),
    "Transformer/encoder_norm": ("post_layernorm",),
    "MAPHead_0/probe": ("head.probe",),
    f"{_POOLING}/out": ("head.attention.out_proj",),
    "MAPHead_0/LayerNorm_0": ("head.layernorm",),
    "MAPHead_0/MlpBlock_0/Dense_0": ("head.mlp.fc1",),
    "MAPHead_0/MlpBlock_0/Dense_1": ("head.mlp.fc2",),
    "head": ("classifier",),
  },
  rows=(
    Row("embeddings.position_embedding.weight", POS_EMBEDDING, "table"),
    *_in_proj("head.attention.in_proj", _POOLING),
  ),
)
_EMBEDDING = "embeddings.patch_embedding"
# Patches come flat, row by row, so that their embedding is a linear map.
SIGLIP2 = SIGLIP._replace(
  other={k: v for k, v in SIGLIP.other.items() if k != "embedding"},
  rows=(*SIGLIP.rows, *dense_rows(_EMBEDDING, "embedding", "patches")),
)


class ModelType(NamedTuple):
  """A family of transformers.

  names: Its key table, without prefixes.
  prefixes: Beginnings of the names in files of a model with a head, which files
    of the bare model may lack.
  defaults: Values of config.json that files need not state, where they are not
    those of ViT.
  pixels: Name in `normalisation.NAMED` of what its publishers' images are
    normalised with, for a folder without preprocessor_config.json; None:
    publishers differ.
  unclassified: Regular expression of arrays that a classifier does not see.
  """

  names: Names
  prefixes: tuple[str, ...]
  defaults: Mapping[str, Any] = {}
  pixels: str | None = None
  unclassified: str | None = None


_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_VISION = ("vision_model.",)
# `model_type` of config.json -> the family.
MODEL_TYPES = {
  "vit": ModelType(VIT, ("vit.",)),
  "vit_mae": ModelType(VIT, ("vit.",), pixels="imagenet"),
  "vit_msn": ModelType(VIT, ("vit.",), {"layer_norm_eps": 1e-6}, "imagenet"),
  "ijepa": ModelType(VIT, ("ijepa.",), pixels="imagenet"),
  "siglip_vision_model": ModelType(SIGLIP, _VISION, _SIGLIP, "half", r"head\."),
  "siglip2_vision_model": ModelType(
    SIGLIP2, _VISION, _SIGLIP, "half", r"head\."
  ),
}
# `model_type` of two towers, or of their images' -> that of the images' tower.
TWO_TOWERS = {
  "siglip": "siglip_vision_model",
  "siglip2": "siglip2_vision_model",
}

# Names of arrays that only pre-training or texts need: they are left out.
LEFT_OUT = re.compile(
  r"(embeddings\.(mask_token|position_ids)|mask_token|logit_(scale|bias))$"
  r"|decoder\.|text_model\.|text_projection\."
)
# Names of arrays that our models have no place for -> what they are part of.
PARTS = (
  (r"distillation_token|cls_classifier|distillation_class", "DeiT distilled"),
  (r"layer_scale|lambda_[12]", "LayerScale"),
  (r"register_tokens", "register tokens"),
  (r"weights_in|weights_out", "a gated MLP (SwiGLU)"),
  (r"relative_position", "relative positions in BEiT's form"),
  (r"pre_layrnorm|class_embedding", "CLIP"),
)


def known(model_type: str) -> ModelType | None:
  """Returns the family of a `model_type`; None: it is none of ours."""
  return MODEL_TYPES.get(TWO_TOWERS.get(model_type, model_type))


def without_prefix(name: str, prefixes: tuple[str, ...]) -> str:
  """Returns a name without the first of the prefixes that it has."""
  return name.removeprefix(next(filter(name.startswith, prefixes), ""))


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of one of the families, with a head or without.

  A relative with parts that `hf.read` refuses may have such names, too.
  """
  names = list(names)
  return any(_has_names(names, family) for family in MODEL_TYPES.values())


def _has_names(names: list[str], family: ModelType) -> bool:
  """Whether a patch embedding and a first block have a family's names."""
  published = {without_prefix(name, family.prefixes) for name in names}
  ours = {r.ours for r in family.names.table(1) if r.theirs in published}
  return "embedding/kernel" in ours and any("block_0/" in name for name in ours)
