"""Weights and configs of Hugging Face's transformers: ViT.

A family of transformers is a line in `MODEL_TYPES` with a key table, such as
`vit_rows`. What it computes otherwise than our ViT becomes an option in
`vit_jax/families/`, which `read_arrays` returns.

Names in the table are those of the files, without the prefix of a model with a
head (`vit.encoder.layer.0...`). transformers 5 has other names in memory
(`vit.layers.0.attention.q_proj`); both are read.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import ModelConfig, json_file
from vit_jax.config.from_dict import at_least
from vit_jax.losses import REGRESSION
from vit_jax.models.posemb import sincos2d
from vit_jax.options import shown
from vit_jax.paths import file_in
from vit_jax.weights import hf_preprocessing
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
from vit_jax.weights.weights_file import (
  POS_EMBEDDING,
  LazyArray,
  StateDict,
  Weights,
  height_and_width,
)

# hidden_act -> our form. gelu_fast writes sqrt(2 / pi) with ten digits, which
# is the same float32.
GELUS = {
  "gelu": "erf",
  "gelu_python": "erf",
  "gelu_new": "tanh",
  "gelu_accurate": "tanh",
  "gelu_fast": "tanh",
  "gelu_pytorch_tanh": "tanh",
  "gelu_python_tanh": "tanh",
}
MULTI_LABEL = "multi_label_classification"
# problem_type -> loss of the head's training.
LOSSES = {
  "single_label_classification": "softmax",
  MULTI_LABEL: "sigmoid",
  REGRESSION: REGRESSION,
}
# Options of a ViT -> values that transformers' ViT supports.
OPTIONS = {
  "pool": ("token",),
  "posemb": ("learn", "sincos2d", "none"),
  "posemb_at": ("stem",),
}
HIDDEN_ACTS = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}

# A name of transformers 5 in memory -> the name in its files.
_LAYER = r"^((?:vit\.)?)layers\.(\d+)\."
NAMES = (
  (_LAYER + r"attention\.q_proj\.", "attention.attention.query."),
  (_LAYER + r"attention\.k_proj\.", "attention.attention.key."),
  (_LAYER + r"attention\.v_proj\.", "attention.attention.value."),
  (_LAYER + r"attention\.o_proj\.", "attention.output.dense."),
  (_LAYER + r"mlp\.fc1\.", "intermediate.dense."),
  (_LAYER + r"mlp\.fc2\.", "output.dense."),
  (_LAYER, ""),
)


def vit_rows(depth: int) -> list[Row]:
  """Returns the key table of `model_type` "vit"."""
  rows = [
    Row("embeddings.cls_token", "cls"),
    Row("embeddings.position_embeddings", POS_EMBEDDING),
    *dense_rows("embeddings.patch_embeddings.projection", "embedding", "conv"),
  ]
  for i in range(depth):
    theirs, ours = f"encoder.layer.{i}", f"Transformer/encoderblock_{i}"
    attention = f"{ours}/MultiHeadDotProductAttention_0"
    rows += norm_rows(f"{theirs}.layernorm_before", f"{ours}/LayerNorm_0")
    for name in ("query", "key", "value"):
      rows += dense_rows(
        f"{theirs}.attention.attention.{name}",
        f"{attention}/{name}",
        "to_heads",
        "heads_bias",
      )
    output = f"{theirs}.attention.output.dense"
    rows += [
      *dense_rows(output, f"{attention}/out", "from_heads"),
      *norm_rows(f"{theirs}.layernorm_after", f"{ours}/LayerNorm_1"),
      *dense_rows(f"{theirs}.intermediate.dense", f"{ours}/MlpBlock_0/Dense_0"),
      *dense_rows(f"{theirs}.output.dense", f"{ours}/MlpBlock_0/Dense_1"),
    ]
  return [
    *rows,
    *norm_rows("layernorm", "Transformer/encoder_norm"),
    *dense_rows("pooler.dense", "pre_logits"),
    *dense_rows("classifier", "head"),
  ]


class ModelType(NamedTuple):
  """How transformers names the arrays of a family.

  prefix: Beginning of the names in files of a model with a head, except the
    head's own; files of the bare model lack it.
  block: Regular expression of the beginning of a block's names; the first group
    is its number, of few digits.
  rows: Number of blocks -> key table, without the prefix.
  """

  prefix: str
  block: str
  rows: Callable[[int], list[Row]]


# `model_type` of config.json -> the family.
MODEL_TYPES = {
  "vit": ModelType("vit.", r"encoder\.layer\.(\d{1,3})\.", vit_rows),
}

# Names of arrays that our models have no place for -> what they are part of.
PARTS = (
  (r"distillation_token|cls_classifier|distillation_class", "DeiT distilled"),
  (r"mask_token|^decoder\.", "masked image modelling"),
  (r"layer_scale|lambda_[12]", "LayerScale"),
  (r"register_tokens", "register tokens"),
  (r"weights_in|weights_out", "a gated MLP (SwiGLU)"),
  (r"relative_position", "relative positions in BEiT's form"),
)


@dataclasses.dataclass(frozen=True)
class HFConfig:
  """What is read of config.json, with the defaults of transformers' ViTConfig.

  Sizes are pixels, one number or (height, width).
  """

  model_type: str = "vit"
  hidden_act: str = "gelu"
  layer_norm_eps: float = 1e-12
  num_attention_heads: int = at_least(1, 12)
  num_hidden_layers: int | None = None
  image_size: tuple[int, ...] = at_least(1, (224,))
  patch_size: tuple[int, ...] = at_least(1, (16,))
  id2label: dict[str, str] = dataclasses.field(default_factory=dict)
  problem_type: str | None = None
  pooler_act: str = "tanh"


class Statements(NamedTuple):
  """What config.json states beside options of the model.

  image_size: (height, width), pixels.
  patch: Side of a patch, pixels.
  num_heads: Number of attention heads.
  class_names: Names in the order of the logits; None: LABEL_0, LABEL_1, ...
  loss: "softmax", "sigmoid" or "regression"; None: not stated. As in
    transformers, a single output is a regression unless config.json states
    otherwise.
  """

  image_size: tuple[int, int]
  patch: int
  num_heads: int
  class_names: tuple[str, ...] | None
  loss: str | None


def looks_like(names: Iterable[str]) -> bool:
  """Whether these are names of a ViTModel, with a head or without.

  A relative with parts that `read` refuses may have such names, too.
  """
  published = {_name_in_file(n).removeprefix("vit.") for n in names}
  return "embeddings.patch_embeddings.projection.weight" in published and any(
    n.startswith("encoder.layer.0.") for n in published
  )


def _name_in_file(name: str) -> str:
  for regex, end in NAMES:
    if re.match(regex, name):
      return re.sub(regex, rf"\g<1>encoder.layer.\g<2>.{end}", name)
  return name


def read(file: StateDict) -> Weights:
  """Returns the weights of a folder: arrays, config.json, preprocessor.

  Raises:
    ValueError: A file is damaged, or the arrays are of no model of ours.
  """
  path = file.path
  if not file.config:
    raise ValueError(
      f"got {str(path)!r} without a config.json beside it, which states the"
      " heads and the form of GELU; expected the folder of a Hugging Face"
      " model."
    )
  params, options, stated = read_arrays(file.arrays, file.config)
  size = stated.image_size
  folder = path if path.is_dir() else path.parent
  about = json_file.read(file_in(folder, hf_preprocessing.FILE))
  about = hf_preprocessing.complete(about)
  ops = hf_preprocessing.ops_of(about, size)
  notes = () if ops or not about else (hf_preprocessing.unlike(about, size),)
  if stated.loss == REGRESSION:
    notes += (
      "the head is a regression (config.json: problem_type, or a single"
      " output): its outputs are numbers, and no classes.",
    )
  return Weights(
    str(path),
    "hf",
    params,
    options,
    grid=(size[0] // stated.patch, size[1] // stated.patch),
    image_size=size,
    class_names=stated.class_names,
    loss=stated.loss,
    ops=ops,
    pixels=hf_preprocessing.pixels(about),
    notes=notes,
  )


def read_arrays(
  arrays: Mapping[str, LazyArray], config: Mapping[str, Any]
) -> tuple[dict[str, LazyArray], dict[str, Any], Statements]:
  """Returns parameters by our flat names, options, and other statements.

  No array is read before its use. Attention without biases gets biases of zero;
  the pooler becomes pre_logits.

  Args:
    arrays: Name in the file -> array.
    config: Contents of config.json.

  Returns:
    Parameters; the options gelu and ln_eps; and what else config.json states.

  Raises:
    ValueError: Arrays have no place in our models, or unexpected shapes; or the
      config asks for something that our models lack. All errors at once.
  """
  errors: list[str] = []
  where = "weights of Hugging Face: config.json"
  read = json_file.build(HFConfig, config, where)
  if read.model_type not in MODEL_TYPES:
    known = " or ".join(map(repr, MODEL_TYPES))
    errors.append(f"model_type: got {read.model_type!r}, expected {known}.")
  if read.hidden_act not in GELUS:
    errors.append(
      f"hidden_act: got {shown(read.hidden_act)}, expected one of"
      f" {', '.join(GELUS)}."
    )
  patch = height_and_width(read.patch_size, "config.json: patch_size")
  if patch[0] != patch[1]:
    errors.append(
      f"patch_size: got {list(patch)}, expected a square: our patches are."
    )
  options = {"gelu": GELUS.get(read.hidden_act), "ln_eps": read.layer_norm_eps}
  family = MODEL_TYPES.get(read.model_type, MODEL_TYPES["vit"])
  named = {
    _name_in_file(name).removeprefix(family.prefix): array
    for name, array in arrays.items()
  }
  depth = count_blocks(named, family.block)
  if read.num_hidden_layers not in (None, depth):
    errors.append(
      f"num_hidden_layers: got {read.num_hidden_layers}, expected the {depth}"
      " blocks that the file has: take a whole file."
    )
  rows = family.rows(depth)
  params, shape_errors = to_ours(rows, named, read.num_attention_heads)
  errors += shape_errors
  add_zero_biases(params)
  known = {row.theirs for row in rows}
  if unknown := [n for n in named if n not in known]:
    errors.append(
      unplaced(unknown, PARTS, "a ViTModel or a ViTForImageClassification")
    )
  if "pooler.dense.weight" in named and read.pooler_act != "tanh":
    errors.append(f"pooler_act: got {read.pooler_act!r}, expected 'tanh'.")
  if {"pooler.dense.weight", "classifier.weight"} <= named.keys():
    errors.append(
      "got both pooler and classifier, expected one of them: in transformers"
      " the classifier does not see the pooler's output. Remove pooler.dense."
    )
  if read.problem_type not in (None, *LOSSES):
    errors.append(
      f"problem_type: got {read.problem_type!r}, expected one of"
      f" {', '.join(LOSSES)}."
    )
  if len(errors) == 1 and read.model_type not in MODEL_TYPES:
    errors.append(
      "All its arrays have a place in a ViT. Where that class computes as a ViT"
      " does (vit_msn, ijepa, a vit_mae without its decoder), write model_type"
      " 'vit' into a copy of config.json."
    )
  if errors:
    raise ValueError("weights of Hugging Face: " + "\n".join(errors))
  outputs = params["head/kernel"].shape[1] if "head/kernel" in params else 0
  kind = read.problem_type or (REGRESSION if outputs == 1 else None)
  statements = Statements(
    height_and_width(read.image_size, "config.json: image_size"),
    patch[0],
    read.num_attention_heads,
    _class_names(read.id2label),
    LOSSES[kind] if kind and outputs else None,
  )
  return params, options, statements


def _class_names(id2label: Mapping[str, str]) -> tuple[str, ...] | None:
  """Returns the names in the order of their numbers.

  Raises:
    ValueError: The numbers are not 0 to the last.
  """
  by_number = {int(k): v for k, v in id2label.items() if k.isdecimal()}
  if set(by_number) != set(range(len(id2label))):
    raise ValueError(
      f"config.json: id2label: got {len(id2label)} numbers such as"
      f" {shown(list(id2label)[:4])}, expected 0 to {len(id2label) - 1}."
    )
  names = tuple(by_number[k] for k in sorted(by_number))
  is_named = any(name != f"LABEL_{i}" for i, name in enumerate(names))
  return names if is_named else None


def write(
  params: Mapping[str, Any],
  model: ModelConfig,
  *,
  num_classes: int,
  image_size: tuple[int, int],
  class_names: Sequence[str] | None = None,
  grid: tuple[int, int] | None = None,
  loss: str = "softmax",
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns arrays and config.json.

  `ViTForImageClassification.from_pretrained` loads a folder of the two and of
  what `hf_preprocessing.write` makes. Without a head
  `ViTModel.from_pretrained` does, whose pooler is then our pre_logits. A
  position table without a row for the class token gets one of zeros, which
  changes nothing; fixed positions, or none, become a learned table. The
  safetensors file needs the metadata {"format": "pt"}.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.
    num_classes: Width of the head, if `params` has one.
    image_size: Height and width in pixels.
    class_names: Names in the order of the logits; None: LABEL_0, LABEL_1 ...
    grid: Rows and columns of patches; None: those of `image_size`.
    loss: Loss that the head was trained with; transformers turns logits into
      probabilities accordingly.

  Raises:
    ValueError: The model has parts that transformers' ViT lacks. All errors at
      once.
  """
  params = dict(params)
  has_head = "head/kernel" in params
  errors = _errors(params, model)
  if class_names is not None and len(class_names) != num_classes:
    errors.append(
      f"class_names: got {len(class_names)}, expected {num_classes}."
    )
  if errors:
    raise ValueError(_cannot(errors))
  sizes, patch = model.size, model.patch
  grid = grid or model.grid(image_size)
  params[POS_EMBEDDING] = _table(params, model, grid, sizes.width)
  rows = vit_rows(sizes.depth)
  arrays, errors = to_theirs(rows, params)
  known = {row.ours for row in rows}
  if unknown := [n for n in params if n not in known]:
    errors.append(
      f"got {shorten(unknown)}, which transformers has no place for. Write the"
      " parameters of a ViT, blocks one by one."
    )
  if errors:
    raise ValueError(_cannot(errors))
  if has_head:
    arrays = {
      name if name.startswith("classifier.") else f"vit.{name}": array
      for name, array in arrays.items()
    }
  config = {
    "architectures": ["ViTForImageClassification" if has_head else "ViTModel"],
    "model_type": "vit",
    "hidden_size": sizes.width,
    "num_hidden_layers": sizes.depth,
    "num_attention_heads": sizes.num_heads,
    "intermediate_size": sizes.mlp_dim,
    "hidden_act": HIDDEN_ACTS[model.gelu],
    "layer_norm_eps": model.ln_eps,
    "image_size": _square(image_size),
    "patch_size": patch,
    "num_channels": int(params["embedding/kernel"].shape[2]),
    "encoder_stride": patch,
    "qkv_bias": True,
    "pooler_act": "tanh",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
  }
  if has_head:
    names = class_names or [f"LABEL_{i}" for i in range(num_classes)]
    config["id2label"] = {str(i): name for i, name in enumerate(names)}
    config["label2id"] = {name: i for i, name in enumerate(names)}
    if loss == REGRESSION:
      config["problem_type"] = loss
    elif loss != "softmax":
      config["problem_type"] = MULTI_LABEL
  return arrays, config


def _cannot(errors: list[str]) -> str:
  lines = "\n".join(f"  - {error}" for error in errors)
  return f"transformers' ViT cannot hold this model:\n{lines}"


def _errors(params, model: ModelConfig) -> list[str]:
  """Returns the parts that transformers' ViT lacks."""
  if model.name != "vit":
    return [f"config.model.name: got {model.name!r}, expected 'vit'."]
  errors = []
  if model.stages is not None:
    errors.append(
      f"config.model.variant: got the hybrid {model.variant!r}, expected a ViT"
      " on pixels such as 'B/16'."
    )
  errors += option_errors(model, OPTIONS)
  if any(n.startswith("pre_logits/") for n in params) and (
    "head/kernel" in params
  ):
    errors.append(
      "pre_logits: got a tanh layer before the head, expected none, since the"
      " classifier does not see the pooler's output. Leave out the head, and"
      " the tanh layer becomes the pooler of a ViTModel: --drop_head."
    )
  return errors


def _table(params, model: ModelConfig, grid, width: int) -> np.ndarray:
  """Returns the position table, with a row for the class token."""
  if model.posemb == "learn" and model.cls_row:
    return np.asarray(params[POS_EMBEDDING])
  if model.posemb == "learn":
    table = np.asarray(params[POS_EMBEDDING])
  elif model.posemb == "sincos2d":
    table = sincos2d(*grid, width)[None]
  else:
    table = np.zeros((1, math.prod(grid), width), np.float32)
  return np.pad(table, ((0, 0), (1, 0), (0, 0)))


def _square(image_size: tuple[int, int]) -> int | list[int]:
  height, width = image_size
  return height if height == width else [height, width]
