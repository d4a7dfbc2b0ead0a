"""Weights and configs of Hugging Face's transformers.

`hf_names.py` has the model types and their names, `hf_classes.py` writes them.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import json_file
from vit_jax.config.from_dict import at_least
from vit_jax.losses import REGRESSION
from vit_jax.options import shown, unexpected
from vit_jax.weights.weights_file import (
  POS_EMBEDDING,
  StateDict,
  Weights,
  height_and_width,
)
from vit_jax.zoo.files import hf_names, hf_preprocessing
from vit_jax.zoo.files.hf_names import LEFT_OUT, MODEL_TYPES, TWO_TOWERS
from vit_jax.zoo.files.series import Arrays, Params, Series, Stated
from vit_jax.zoo.files.torch_layout import Row, count_blocks

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
  "quick_gelu": "quick",
}


@dataclasses.dataclass(frozen=True)
class HFConfig:
  """Contents of config.json, with the defaults of transformers' ViTConfig.

  Sizes are pixels, one number or (height, width). SigLIP 2's images have any
  size; `num_patches` is the number of positions of its square table.
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
  rope_theta: float = 100.0


MULTI_LABEL = "multi_label_classification"
# problem_type -> loss of the head's training, also in files of timm's models.
LOSSES = {
  "single_label_classification": "softmax",
  MULTI_LABEL: "sigmoid",
  REGRESSION: REGRESSION,
}
IS_REGRESSION = "the head is a regression: its outputs are numbers, no classes."


class HFModel(NamedTuple):
  """config.json, and the entry of its model type."""

  about: HFConfig
  family: hf_names.ModelType


def config(file: StateDict | None) -> Stated:
  """Returns what config.json states, in a model of two towers that of images.

  Raises:
    ValueError: There is no config.json, its model type is not known, or its
      values have other types.
  """
  contents = file.config if file else {}
  where = "weights of Hugging Face: config.json"
  if not contents:
    raise ValueError(f"{where}: missing, expected beside the weights.")
  kind = {"model_type": contents.get("model_type")}
  model_type = json_file.build(HFConfig, kind, where).model_type
  family = hf_names.known(model_type)
  if family is None:
    known = ", ".join((*MODEL_TYPES, *TWO_TOWERS))
    raise ValueError(
      unexpected(f"{where}: model_type", repr(model_type), f"one of {known}")
    )
  vision = contents.get("vision_config")
  # vision_config repeats these keys; only the top level describes the head.
  top = ("model_type", "id2label", "problem_type")
  about = json_file.build(
    HFConfig,
    dict(family.defaults)
    | _stated(contents)
    | _stated(vision if isinstance(vision, dict) else {})
    | _stated({key: contents.get(key) for key in top}),
    where,
  )
  values = {
    "num_hidden_layers": about.num_hidden_layers,
    "hidden_act": about.hidden_act,
    "rope_theta": about.rope_theta if "rope" in family.options else None,
    "pooler_act": about.pooler_act,
    "problem_type": about.problem_type,
  }
  return Stated(
    config=HFModel(about, family),
    num_heads=about.num_attention_heads,
    values=_stated(values),
  )


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in config.items() if value is not None}


def own(arrays: Arrays, stated: Stated) -> tuple[Arrays, list[str]]:
  """Returns a model's arrays without prefixes, and what no classifier sees."""
  family = stated.config.family
  named = {
    hf_names.without_prefix(name, family.prefixes): array
    for name, array in arrays.items()
  }
  unseen = []
  if "classifier.weight" in named and family.unclassified:
    unseen = [n for n in named if re.match(family.unclassified, n)]
  return named, unseen


def rows(arrays: Arrays, stated: Stated) -> list[Row]:
  """Returns the key table of the model type that has most of the names."""
  tables = [
    names.table(count_blocks(arrays, names.number))
    for names in stated.config.family.names
  ]
  return max(
    tables, key=lambda table: len({row.theirs for row in table} & arrays.keys())
  )


def facts(
  arrays: Arrays, params: Params, stated: Stated
) -> tuple[dict[str, Any], list[str]]:
  """Returns options such as gelu and ln_eps, and errors.

  The second token of DeiT without a second head becomes a register.
  """
  about, family = stated.config
  options = dict(family.options) | {"ln_eps": about.layer_norm_eps}
  if "classifier.weight" in arrays:
    options |= family.options_of_classifier
  if not _is_gated(params):
    options["gelu"] = GELUS.get(about.hidden_act)
  if options.get("gelu") == "quick":
    options["name"] = "modern"
  errors, pooler = [], params.get("pre_logits/kernel")
  patch = height_and_width(about.patch_size, "config.json: patch_size")
  if patch[0] != patch[1]:
    errors.append(f"patch_size: got {list(patch)}, expected a square.")
  if pooler is not None and len({*pooler.shape}) > 1:
    errors.append(f"pooler: got shape {pooler.shape}, expected a square.")
  if {"pooler.dense.weight", "classifier.weight"} <= arrays.keys():
    errors.append("got both pooler and classifier, expected one of them.")
  _fold_second_token(params)
  return options, errors


def _is_gated(params: Collection[str]) -> bool:
  return any("/Gate/" in name for name in params)


def values(
  params: Params, options: Mapping[str, Any], stated: Stated
) -> dict[str, tuple]:
  """Returns the values of config.json that our model computes."""
  acts: tuple = tuple(GELUS)
  if _is_gated(params):
    # DINOv2's gate is SiLU, whatever its config says.
    is_silu = "rope" in stated.config.family.options
    acts = ("silu",) if is_silu else (stated.values["hidden_act"],)
  acts_of_pooler = {"pooler_act": ("tanh",)}
  return {
    "num_hidden_layers": (
      count_blocks(params, r"Transformer/encoderblock_(\d+)/"),
    ),
    "hidden_act": acts,
    "rope_theta": (100, 100.0),
    "problem_type": tuple(LOSSES),
    **(acts_of_pooler if "pre_logits/kernel" in params else {}),
  }


def _fold_second_token(params: Params) -> None:
  """Turns a distillation token without a head into a register, in place.

  DeiT's classes with one head have this token but do not read it. A register
  with the token's position added computes the same. DINOv3's empty array, for
  no registers, is removed.
  """
  is_alone = "dist" in params and "head_dist/kernel" not in params
  if is_alone and POS_EMBEDDING in params:
    token, table = params.pop("dist"), params[POS_EMBEDDING]
    params["registers"] = token.then(
      token.shape, lambda a: a + np.asarray(table)[:, 1:2]
    )
    num_rows, width = table.shape[1:]
    params[POS_EMBEDDING] = table.then(
      (1, num_rows - 1, width), lambda a: np.delete(a, 1, axis=1)
    )
  if "registers" in params and not params["registers"].size:
    del params["registers"]


def complete(weights: Weights, stated: Stated, file: StateDict) -> Weights:
  """Returns weights with images, class names and loss."""
  (about, family), notes = stated.config, weights.notes
  patch = about.patch_size[0]
  table, size_notes = _image_size(about, patch)
  folder = file.path if file.path.is_dir() else file.path.parent
  images, name = hf_preprocessing.read(folder)
  images = hf_preprocessing.complete(images, name)
  size = table
  if family.takes_any_size:  # its images may have another size than its table
    made = hf_preprocessing.image_size(images, name) or size
    size = made if not any(side % patch for side in made) else size
  ops = hf_preprocessing.ops_of(images, size, name)
  head = weights.params.get("head/kernel")
  # As in transformers, a single output is a regression unless config.json
  # states otherwise.
  is_single = head is not None and head.shape[1] == 1
  kind = about.problem_type or (REGRESSION if is_single else None)
  loss = LOSSES[kind] if kind and head is not None else None
  notes += size_notes
  if images and not ops:
    notes += (hf_preprocessing.unlike(images, size, name),)
  if loss == REGRESSION:
    notes += (IS_REGRESSION,)
  return dataclasses.replace(
    weights,
    grid=tuple(side // patch for side in table),
    image_size=size,
    class_names=_class_names(about.id2label),
    loss=loss,
    ops=ops,
    pixels=hf_preprocessing.pixels(images, name),
    published_pixels=family.pixels,
    posemb_filter=family.posemb_filter,
    notes=notes,
  )


def _image_size(
  read: HFConfig, patch: int
) -> tuple[tuple[int, int], tuple[str, ...]]:
  """Returns (height, width), multiples of the patch, and notes."""
  if read.num_patches:
    side = math.isqrt(read.num_patches) * patch
    return (side, side), (
      "its images have any size in transformers, with up to"
      f" {read.num_patches} patches; here they are {side} x {side}, the size of"
      " the position table.",
    )
  size = height_and_width(read.image_size, "config.json: image_size")
  whole = tuple(side // patch * patch for side in size)
  if whole == size or not all(whole):
    return size, ()
  note = f"images of {list(size)} are {list(whole)} here, whole patches."
  return whole, (note,)


def named(names: tuple[str, ...]) -> tuple[str, ...] | None:
  """Returns class names; None for LABEL_0, LABEL_1, ..., which say nothing."""
  is_named = any(name != f"LABEL_{i}" for i, name in enumerate(names))
  return names if is_named else None


def _class_names(id2label: Mapping[str, str]) -> tuple[str, ...] | None:
  """Returns the names in the order of their numbers.

  Raises:
    ValueError: The numbers are not 0, 1, 2, ...
  """
  by_number = {int(k): v for k, v in id2label.items() if k.isdecimal()}
  if set(by_number) != set(range(len(id2label))):
    some = shown(list(id2label)[:4])
    raise ValueError(f"config.json: id2label: got {some}, expected 0, 1, ...")
  return named(tuple(by_number[k] for k in sorted(by_number)))


SERIES = Series(
  "hf",
  "Hugging Face",
  hf_names.looks_like,
  config,
  rows,
  facts,
  values,
  complete,
  lambda _: (None, None),  # config.json states them
  own,
  left_out=LEFT_OUT,
)
