"""Weights and configs of Hugging Face's transformers.

`hf_names.py` has the families and their names.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import ModelConfig, json_file
from vit_jax.config.from_dict import at_least
from vit_jax.losses import REGRESSION
from vit_jax.models.posemb import sincos2d
from vit_jax.options import shown
from vit_jax.paths import file_in
from vit_jax.weights import hf_names, hf_preprocessing
from vit_jax.weights.hf_names import (
  LEFT_OUT,
  MODEL_TYPES,
  PARTS,
  TWO_TOWERS,
)
from vit_jax.weights.torch_layout import (
  add_zero_biases,
  count_blocks,
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
HIDDEN_ACTS = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}

_POSITIONS = {"posemb": ("learn", "sincos2d", "none"), "posemb_at": ("stem",)}


class Written(NamedTuple):
  """How a model becomes one of a `model_type`.

  classes: Class of the bare model, and of the one with a head; None: there is
    none that computes as ours.
  options: Options of our model -> values that the classes compute.
  config: What config.json has beside `_written_config`.
  """

  classes: tuple[str, str | None]
  options: Mapping[str, tuple]
  config: Mapping[str, Any]


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_OF_VIT = {"qkv_bias": True, "pooler_act": "tanh", **_NO_DROPOUT}
WRITTEN = {
  "vit": Written(
    ("ViTModel", "ViTForImageClassification"),
    {"pool": ("token",), **_POSITIONS},
    _OF_VIT,
  ),
  "ijepa": Written(
    ("IJepaModel", "IJepaForImageClassification"),
    {"pool": ("gap",), "pre_logits": (False,), **_POSITIONS},
    _OF_VIT,
  ),
  "siglip_vision_model": Written(
    ("SiglipVisionModel", None),
    {"pool": ("map",), "pre_logits": (False,), **_POSITIONS},
    {"attention_dropout": 0.0, "vision_use_head": True},
  ),
}


@dataclasses.dataclass(frozen=True)
class HFConfig:
  """What is read of config.json, with the defaults of transformers' ViTConfig.

  Sizes are pixels, one number or (height, width). `num_patches` is SigLIP 2's:
  its images have any size, and a square table has so many positions.
  """

  model_type: str = "vit"
  hidden_act: str = "gelu"
  layer_norm_eps: float = 1e-12
  num_attention_heads: int = at_least(1, 12)
  num_hidden_layers: int | None = None
  image_size: tuple[int, ...] = at_least(1, (224,))
  patch_size: tuple[int, ...] = at_least(1, (16,))
  num_patches: int | None = at_least(1)
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
  pixels: How publishers of the family normalise images, a name in
    `normalisation.NAMED`; None: in several ways.
  notes: Facts that a user should know.
  """

  image_size: tuple[int, int]
  patch: int
  num_heads: int
  class_names: tuple[str, ...] | None
  loss: str | None
  pixels: str | None = None
  notes: tuple[str, ...] = ()


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
  notes = stated.notes
  if about and not ops:
    notes += (hf_preprocessing.unlike(about, size),)
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
    published_pixels=stated.pixels,
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
  read = _config(config)
  family = hf_names.known(read.model_type)
  if family is None:
    family = MODEL_TYPES["vit"]
    errors.append(
      f"model_type: got {read.model_type!r}, expected one of"
      f" {', '.join((*MODEL_TYPES, *TWO_TOWERS))}."
    )
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
  named, notes = _of_the_model(arrays, family)
  depth = count_blocks(named, family.names.number)
  if read.num_hidden_layers not in (None, depth):
    errors.append(
      f"num_hidden_layers: got {read.num_hidden_layers}, expected the {depth}"
      " blocks that the file has: take a whole file."
    )
  rows = family.names.table(depth)
  params, shape_errors = to_ours(rows, named, read.num_attention_heads)
  errors += shape_errors
  add_zero_biases(params)
  known = {row.theirs for row in rows}
  if unknown := [n for n in named if n not in known]:
    errors.append(
      unplaced(unknown, PARTS, f"a model of the type {read.model_type!r}")
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
  if errors:
    raise ValueError("weights of Hugging Face: " + "\n".join(errors))
  outputs = params["head/kernel"].shape[1] if "head/kernel" in params else 0
  kind = read.problem_type or (REGRESSION if outputs == 1 else None)
  size, size_notes = _image_size(read, patch[0])
  statements = Statements(
    size,
    patch[0],
    read.num_attention_heads,
    _class_names(read.id2label),
    LOSSES[kind] if kind and outputs else None,
    family.pixels,
    notes + size_notes,
  )
  return params, options, statements


def _config(config: Mapping[str, Any]) -> HFConfig:
  """Returns config.json with its types, and with its family's defaults.

  A model of texts and images states its images' tower in `vision_config`.

  Raises:
    ValueError: Values are of other types.
  """
  family = hf_names.known(config.get("model_type", "vit"))
  defaults = dict(family.defaults) if family else {}
  vision = config.get("vision_config")
  # The tower repeats these, where they are not those of the head.
  top = ("model_type", "id2label", "problem_type")
  return json_file.build(
    HFConfig,
    defaults
    | config
    | (vision if isinstance(vision, dict) else {})
    | {key: config[key] for key in top if key in config},
    "weights of Hugging Face: config.json",
  )


def _of_the_model(
  arrays: Mapping[str, LazyArray], family: hf_names.ModelType
) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
  """Returns a model's arrays without prefixes, and notes on the others."""
  named = {
    hf_names.without_prefix(name, family.prefixes): array
    for name, array in arrays.items()
  }
  left_out = [name for name in named if LEFT_OUT.match(name)]
  notes: tuple[str, ...] = ()
  if left_out:
    notes += (
      f"left out: {shorten(left_out)}, which only pre-training or texts need.",
    )
  if "classifier.weight" in named and family.unclassified:
    unseen = [n for n in named if re.match(family.unclassified, n)]
    left_out += unseen
    notes += (
      f"left out: {shorten(unseen)}, which the classifier does not see: it gets"
      " the mean of the patches.",
    )
  return {n: a for n, a in named.items() if n not in set(left_out)}, notes


def _image_size(
  read: HFConfig, patch: int
) -> tuple[tuple[int, int], tuple[str, ...]]:
  """Returns (height, width), multiples of the patch, and notes."""
  if read.num_patches:
    side = math.isqrt(read.num_patches) * patch
    return (side, side), (
      f"its images have any size there, with up to {read.num_patches} patches;"
      f" here they are {side} x {side}, the size of the position table.",
    )
  size = height_and_width(read.image_size, "config.json: image_size")
  whole = tuple(side // patch * patch for side in size)
  if whole == size or not all(whole):
    return size, ()
  return whole, (
    f"config.json: image_size: got {list(read.image_size)}, whose last pixels"
    f" no patch of {patch} covers; here images are {whole[0]} x {whole[1]}.",
  )


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

  The class that config.json names loads a folder of the two and of what
  `hf_preprocessing.write` makes with `from_pretrained`. A ViT without a head is
  a `ViTModel`, whose pooler is our pre_logits. A position table without a row
  for the class token gets one of zeros, which changes nothing; fixed positions,
  or none, become a learned table. The safetensors file needs the metadata
  {"format": "pt"}.

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
    ValueError: The model has parts that transformers' models lack. All errors
      at once.
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
  model_type = _model_type(model)
  family, written = MODEL_TYPES[model_type], WRITTEN[model_type]
  grid = grid or model.grid(image_size)
  params[POS_EMBEDDING] = _table(params, model, grid)
  rows = family.names.in_files(model.size.depth)
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
      name
      if name.startswith("classifier.")
      else f"{family.prefixes[0]}{name}": array
      for name, array in arrays.items()
    }
  config = {
    "architectures": [written.classes[has_head]],
    "model_type": model_type,
    **_sizes(params, model),
    "image_size": _square(image_size),
    **written.config,
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


def _sizes(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
  """Returns the part of config.json that all families have."""
  sizes = model.size
  return {
    "hidden_size": sizes.width,
    "num_hidden_layers": sizes.depth,
    "num_attention_heads": sizes.num_heads,
    "intermediate_size": sizes.mlp_dim,
    "hidden_act": HIDDEN_ACTS[model.gelu],
    "layer_norm_eps": model.ln_eps,
    "patch_size": model.patch,
    "num_channels": int(params["embedding/kernel"].shape[2]),
    "encoder_stride": model.patch,
  }


def _model_type(model: ModelConfig) -> str:
  """Returns the family of transformers that a ViT is nearest to."""
  by_pool = {"gap": "ijepa", "map": "siglip_vision_model"}
  return by_pool.get(model.pool, "vit")


def _cannot(errors: list[str]) -> str:
  lines = "\n".join(f"  - {error}" for error in errors)
  return f"transformers' models cannot hold this model:\n{lines}"


def _errors(params, model: ModelConfig) -> list[str]:
  """Returns the parts that transformers' models lack."""
  if model.name != "vit":
    return [f"config.model.name: got {model.name!r}, expected 'vit'."]
  errors = []
  if model.stages is not None:
    errors.append(
      f"config.model.variant: got the hybrid {model.variant!r}, expected a ViT"
      " on pixels such as 'B/16'."
    )
  has_head = "head/kernel" in params
  written = WRITTEN[_model_type(model)]
  errors += option_errors(model, written.options)
  if any(n.startswith("pre_logits/") for n in params) and has_head:
    errors.append(
      "pre_logits: got a tanh layer before the head, expected none, since the"
      " classifier does not see the pooler's output. Leave out the head, and"
      " the tanh layer becomes the pooler of a ViTModel: --drop_head."
    )
  if has_head and written.classes[1] is None:
    errors.append(
      f"head: got one, expected none: {written.classes[0]} has none, and the"
      " classifier of its family does not see the pooling by attention. Leave"
      " out the head: --drop_head."
    )
  return errors


def _table(params, model: ModelConfig, grid) -> np.ndarray:
  """Returns the position table; beside a class token it has a row for it."""
  width = model.size.width
  if model.posemb == "learn":
    table = np.asarray(params[POS_EMBEDDING])
  elif model.posemb == "sincos2d":
    table = sincos2d(*grid, width)[None]
  else:
    table = np.zeros((1, math.prod(grid), width), np.float32)
  lacks_row = "cls" in params and not model.has_cls_row
  return np.pad(table, ((0, 0), (int(lacks_row), 0), (0, 0)))


def _square(image_size: tuple[int, int]) -> int | list[int]:
  height, width = image_size
  return height if height == width else [height, width]
