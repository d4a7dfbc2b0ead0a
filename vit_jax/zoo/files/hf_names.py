"""Model types of transformers: names of their arrays, defaults of configs.

A model type is a line in `MODEL_TYPES` and a key table, such as `VIT`. A
difference of its computation from our ViT is an option in `vit_jax/families/`.

A key table has the names in files. transformers 5 has other names in memory
(`vit.layers.0.attention.q_proj` for
`vit.encoder.layer.0.attention.attention.query`); both are read.

Source: transformers 5.24, models/*/modeling_*.py and configuration_*.py.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.weights.weights_file import POS_EMBEDDING
from vit_jax.zoo.files.torch_layout import (
  Row,
  dense_rows,
  in_proj_rows,
  norm_rows,
)

_OUR_BLOCK = "Transformer/encoderblock_{i}/"


class Names(NamedTuple):
  """A key table.

  start: Beginning of the names of block {i}.
  block: Our module or array in a block -> the rest of its name.
  other: Our module or array -> its name.
  rows: Further rows, one for each block if our name has {i}.
  in_memory: `start` in the memory of transformers 5; "" if it is the same.
  block_in_memory: As `block`, for names in memory that differ from the files'.
  """

  start: str
  block: Mapping[str, str]
  other: Mapping[str, str]
  rows: tuple[Row, ...] = ()
  in_memory: str = ""
  block_in_memory: Mapping[str, str] = {}

  def in_files(self, depth: int) -> list[Row]:
    """Returns the rows of a model with this number of blocks."""
    rows = [r for ours, name in self.other.items() for r in _rows(name, ours)]
    for i in range(depth):
      start, our_start = self.start.format(i=i), _OUR_BLOCK.format(i=i)
      for ours, name in self.block.items():
        rows += _rows(start + name, our_start + ours)
    for row in self.rows:
      numbers = range(depth if "{i}" in row.ours else 1)
      rows += [
        dataclasses.replace(
          row, theirs=row.theirs.format(i=i), ours=row.ours.format(i=i)
        )
        for i in numbers
      ]
    return rows

  def table(self, depth: int) -> list[Row]:
    """Returns the rows with names in files, and those with names in memory."""
    in_memory = Names(
      self.in_memory or self.start, self.block | self.block_in_memory, {}
    )
    return self.in_files(depth) + in_memory.in_files(depth)

  @property
  def number(self) -> str:
    """Regular expression that finds the number in a block's name."""
    starts = (self.start, self.in_memory or self.start)
    starts = (re.escape(start.partition("{i}")[0]) for start in starts)
    return rf"(?:{'|'.join(starts)})(\d{{1,3}})\."


# Our names of arrays of tokens, which are in no module of theirs.
_TOKENS = ("cls", "dist", "registers", "pos_embedding", "probe")


def _rows(theirs: str, ours: str) -> list[Row]:
  """Returns the key-table rows of one of our modules or arrays."""
  name = ours.rpartition("/")[2]
  if name in ("query", "key", "value"):
    return dense_rows(theirs, ours, "to_heads", "heads_bias")
  if re.search("(?i)norm", name):
    return norm_rows(theirs, ours)
  if name in _TOKENS:
    return [Row(theirs, ours, "tokens")]
  if name in ("relative_bias", "scale"):
    return [Row(theirs, ours)]
  kinds = {"out": "from_heads", "embedding": "conv"}
  return dense_rows(theirs, ours, kinds.get(name, "linear"))


_ATTENTION = "MultiHeadDotProductAttention_0"
_PROJECTIONS = {
  f"{_ATTENTION}/query": "attention.q_proj",
  f"{_ATTENTION}/key": "attention.k_proj",
  f"{_ATTENTION}/value": "attention.v_proj",
  f"{_ATTENTION}/out": "attention.o_proj",
}
_OLD_PROJECTIONS = {
  f"{_ATTENTION}/query": "attention.attention.query",
  f"{_ATTENTION}/key": "attention.attention.key",
  f"{_ATTENTION}/value": "attention.attention.value",
  f"{_ATTENTION}/out": "attention.output.dense",
}
_MLP = {"MlpBlock_0/Dense_0": "mlp.fc1", "MlpBlock_0/Dense_1": "mlp.fc2"}
_SCALES = {
  "LayerScale_0/scale": "layer_scale1.lambda1",
  "LayerScale_1/scale": "layer_scale2.lambda1",
}
_GATED = {
  "MlpBlock_0/Gate": "mlp.gate_proj",
  "MlpBlock_0/Dense_0": "mlp.up_proj",
  "MlpBlock_0/Dense_1": "mlp.down_proj",
}

VIT = Names(
  start="encoder.layer.{i}.",
  block={
    "LayerNorm_0": "layernorm_before",
    **_OLD_PROJECTIONS,
    "LayerNorm_1": "layernorm_after",
    "MlpBlock_0/Dense_0": "intermediate.dense",
    "MlpBlock_0/Dense_1": "output.dense",
  },
  other={
    "cls": "embeddings.cls_token",
    POS_EMBEDDING: "embeddings.position_embeddings",
    "embedding": "embeddings.patch_embeddings.projection",
    "Transformer/encoder_norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
  },
  in_memory="layers.{i}.",
  block_in_memory=_PROJECTIONS | _MLP,
)
DEIT = VIT._replace(other=VIT.other | {"dist": "embeddings.distillation_token"})
_HEADS = {"head": "cls_classifier", "head_dist": "distillation_classifier"}
DEIT_OF_TEACHER = DEIT._replace(other=DEIT.other | _HEADS)

DINOV2 = VIT._replace(
  block={
    "LayerNorm_0": "norm1",
    **_OLD_PROJECTIONS,
    "LayerNorm_1": "norm2",
    **_SCALES,
    **_MLP,
  },
  other=VIT.other | {"registers": "embeddings.register_tokens"},
  in_memory="",
  block_in_memory=_PROJECTIONS,
)


def _packed(theirs: str, *ours: str) -> Iterator[Row]:
  """Yields the rows of dense layers whose outputs are concatenated."""
  for i, name in enumerate(ours):
    yield from dense_rows(theirs, name, part=(i, len(ours)))


_OUR_MLP = _OUR_BLOCK + "MlpBlock_0"
DINOV2_GATED = DINOV2._replace(
  block={k: v for k, v in DINOV2.block.items() if k not in _MLP}
  | {"MlpBlock_0/Dense_1": "mlp.weights_out"},
  rows=tuple(
    _packed(
      "encoder.layer.{i}.mlp.weights_in",
      f"{_OUR_MLP}/Gate",
      f"{_OUR_MLP}/Dense_0",
    )
  ),
  block_in_memory=_PROJECTIONS | _GATED,
)

_TABLE_NAME = "relative_position_bias_table"
_TABLE = f"relative_position_bias.{_TABLE_NAME}"
BEIT = VIT._replace(
  block=VIT.block
  | {
    "LayerScale_0/scale": "lambda_1",
    "LayerScale_1/scale": "lambda_2",
    f"{_ATTENTION}/relative_bias": f"attention.attention.{_TABLE}",
  },
  other={k: v for k, v in VIT.other.items() if k != "pre_logits"}
  | {"pooled_norm": "pooler.layernorm"},
  block_in_memory=VIT.block_in_memory | {f"{_ATTENTION}/relative_bias": _TABLE},
)
# All blocks have the same biases, before they are fine-tuned.
BEIT_SHARED = BEIT._replace(
  rows=tuple(
    Row(name, f"{_OUR_BLOCK}{_ATTENTION}/relative_bias")
    for name in (f"encoder.{_TABLE}", f"shared_position_bias.{_TABLE_NAME}")
  )
)

DINOV3 = Names(
  start="layer.{i}.",
  block={
    "LayerNorm_0": "norm1",
    **_PROJECTIONS,
    "LayerNorm_1": "norm2",
    **_SCALES,
    **_GATED,
  },
  other={
    "cls": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    "embedding": "embeddings.patch_embeddings",
    "Transformer/encoder_norm": "norm",
  },
  in_memory="model.layer.{i}.",
)


_EMBEDDING = "embeddings.patch_embedding"
CLIP = Names(
  start="encoder.layers.{i}.",
  block={
    "LayerNorm_0": "layer_norm1",
    f"{_ATTENTION}/query": "self_attn.q_proj",
    f"{_ATTENTION}/key": "self_attn.k_proj",
    f"{_ATTENTION}/value": "self_attn.v_proj",
    f"{_ATTENTION}/out": "self_attn.out_proj",
    "LayerNorm_1": "layer_norm2",
    **_MLP,
  },
  other={
    "embedding": _EMBEDDING,
    "Transformer/pre_norm": "pre_layrnorm",
    "Transformer/encoder_norm": "post_layernorm",
    "projection": "visual_projection",
    "head": "classifier",
  },
  rows=(
    Row("embeddings.class_embedding", "cls", "token"),
    Row("embeddings.position_embedding.weight", POS_EMBEDDING, "table"),
  ),
)
_POOLING = f"MAPHead_0/{_ATTENTION}"
SIGLIP = CLIP._replace(
  other={
    "embedding": _EMBEDDING,
    "Transformer/encoder_norm": "post_layernorm",
    "MAPHead_0/probe": "head.probe",
    f"{_POOLING}/out": "head.attention.out_proj",
    "MAPHead_0/LayerNorm_0": "head.layernorm",
    "MAPHead_0/MlpBlock_0/Dense_0": "head.mlp.fc1",
    "MAPHead_0/MlpBlock_0/Dense_1": "head.mlp.fc2",
    "head": "classifier",
  },
  rows=(CLIP.rows[1], *in_proj_rows("head.attention.in_proj", _POOLING)),
)
# Patches come flat, row by row, so that their embedding is a linear map.
SIGLIP2 = SIGLIP._replace(
  other={k: v for k, v in SIGLIP.other.items() if k != "embedding"},
  rows=(*SIGLIP.rows, *dense_rows(_EMBEDDING, "embedding", "patches")),
)


class ModelType(NamedTuple):
  """A model type of transformers.

  names: Its key tables, without prefixes; a file has the names of one.
  prefixes: Beginnings of the names in files of a model with a head; files of
    the bare model may lack them.
  defaults: Values of config.json that files may leave out, if they are not
    those of ViT.
  pixels: Name in `normalisation.NAMED` of its publishers' normalisation, for a
    folder without preprocessor_config.json; None if publishers differ.
  options: Options of our model that no array shows.
  unclassified: Regular expression of arrays that a classifier does not use.
  options_of_classifier: As `options`, for a model with a classifier.
  posemb_filter: How the authors resize positions, a name of
    `models.resample.METHODS`; None if the arrays tell, see
    `publishers.posemb_filter`.
  takes_any_size: Whether transformers resizes positions without being asked.
  """

  names: tuple[Names, ...]
  prefixes: tuple[str, ...]
  defaults: Mapping[str, Any] = {}
  pixels: str | None = None
  options: Mapping[str, Any] = {}
  unclassified: str | None = None
  options_of_classifier: Mapping[str, Any] = {}
  posemb_filter: str | None = None
  takes_any_size: bool = False


_EPS = {"layer_norm_eps": 1e-6}
_OF_META = {"pixels": "imagenet", "posemb_filter": "hf"}
_OF_SIGLIP = (
  ("vision_model.",),
  {"hidden_act": "gelu_pytorch_tanh", **_EPS},
  "half",
  {},
  r"head\.",
)
_OF_CLIP = {
  "hidden_act": "quick_gelu",
  "layer_norm_eps": 1e-5,
  "patch_size": 32,
}
_OF_DINOV3 = {"layer_norm_eps": 1e-5, "num_attention_heads": 6}
_ROTATED = {"name": "modern", "posemb": "none", "rope": "dinov3"}
# `model_type` of config.json -> the family.
MODEL_TYPES = {
  "vit": ModelType((VIT,), ("vit.",)),
  "vit_mae": ModelType((VIT,), ("vit.",), **_OF_META),
  "vit_msn": ModelType((VIT,), ("vit.",), _EPS, **_OF_META),
  "ijepa": ModelType((VIT,), ("ijepa.",), **_OF_META),
  "deit": ModelType((DEIT, DEIT_OF_TEACHER), ("deit.",), **_OF_META),
  "dinov2": ModelType(
    (DINOV2, DINOV2_GATED),
    ("dinov2.",),
    _EPS | {"patch_size": 14},
    "imagenet",
    takes_any_size=True,
  ),
  "dinov2_with_registers": ModelType(
    (DINOV2, DINOV2_GATED),
    ("dinov2_with_registers.",),
    _EPS,
    "imagenet",
    takes_any_size=True,
  ),
  "dinov3_vit": ModelType((DINOV3,), (), _OF_DINOV3, "imagenet", _ROTATED),
  "beit": ModelType(
    (BEIT, BEIT_SHARED),
    ("beit.",),
    pixels="half",
    options={"name": "modern"},
  ),
  "clip_vision_model": ModelType(
    (CLIP,),
    ("vision_model.",),
    _OF_CLIP,
    "clip",
    unclassified="post_layernorm",
    options_of_classifier={
      "name": "modern",
      "pool": "gap",
      "final_norm": "none",
    },
  ),
  "siglip_vision_model": ModelType((SIGLIP,), *_OF_SIGLIP),
  "siglip2_vision_model": ModelType(
    (SIGLIP2,), *_OF_SIGLIP, posemb_filter="bilinear"
  ),
}
# model_type of an image-text model -> model_type of its vision tower.
TWO_TOWERS = {
  "clip": "clip_vision_model",
  "siglip": "siglip_vision_model",
  "siglip2": "siglip2_vision_model",
}

# Names of arrays that only pre-training or texts need: they are left out.
LEFT_OUT = re.compile(
  r"(embeddings\.(mask_token|position_ids)|mask_token|logit_(scale|bias))$"
  r"|decoder\.|lm_head\.|text_model\.|text_projection\."
  r"|.*relative_position_index$"
)


def known(model_type: str) -> ModelType | None:
  """Returns the entry of a `model_type`, or None."""
  return MODEL_TYPES.get(TWO_TOWERS.get(model_type, model_type))


def without_prefix(name: str, prefixes: tuple[str, ...]) -> str:
  """Returns a name without the first of the prefixes that it has."""
  return name.removeprefix(next(filter(name.startswith, prefixes), ""))


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a model type, with a head or without.

  A related model with parts that `hf.read` does not support may also have such
  names.
  """
  names = list(names)
  return any(_has_names(names, family) for family in MODEL_TYPES.values())


def _has_names(names: list[str], family: ModelType) -> bool:
  """Whether a patch embedding and a first block have a model type's names."""
  published = {without_prefix(name, family.prefixes) for name in names}
  rows = [row for table in family.names for row in table.table(1)]
  ours = {row.ours for row in rows if row.theirs in published}
  return "embedding/kernel" in ours and any("block_0/" in name for name in ours)
