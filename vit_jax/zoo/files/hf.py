"""Weights and configs of Hugging Face's transformers.

`hf_names.py` has the model types and their names, `hf_classes.py` writes them.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import json_file
from vit_jax.config.from_dict import at_least
from vit_jax.losses import REGRESSION
from vit_jax.options import shown
from vit_jax.weights import assumptions
from vit_jax.weights.weights_file import (
  POS_EMBEDDING,
  LazyArray,
  StateDict,
  Weights,
  height_and_width,
)
from vit_jax.zoo.files import hf_head, hf_names, hf_preprocessing
from vit_jax.zoo.files.hf_names import LEFT_OUT, MODEL_TYPES, PARTS, TWO_TOWERS
from vit_jax.zoo.files.torch_layout import (
  add_zero_biases,
  count_blocks,
  shorten,
  to_ours,
  unplaced,
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


class Statements(NamedTuple):
  """What config.json states in addition to options of the model.

  image_size: (height, width), pixels.
  patch: Side of a patch, pixels.
  num_heads: Number of attention heads.
  class_names: Names in the order of the logits; None for LABEL_0, LABEL_1, ...
  loss: "softmax", "sigmoid" or "regression"; None if not stated. As in
    transformers, a single output is a regression unless config.json states
    otherwise.
  notes: Facts for the user.
  """

  image_size: tuple[int, int]
  patch: int
  num_heads: int
  class_names: tuple[str, ...] | None
  loss: str | None
  notes: tuple[str, ...] = ()


def read(file: StateDict) -> Weights:
  """Returns the weights of a folder: arrays, config.json, preprocessor.

  Raises:
    ValueError: A file is damaged, or the arrays fit no model of vit_jax.
  """
  path = file.path
  if not file.config:
    raise ValueError(
      f"got {str(path)!r} without a config.json beside it, which states the"
      " heads and the form of GELU; expected the folder of a Hugging Face"
      " model."
    )
  params, options, stated = read_arrays(file.arrays, file.config)
  kind = _config(file.config).model_type
  if assumptions.lost_positions(params, {**options, **file.options}):
    raise ValueError(
      f"a model of the type {kind!r} without positions:"
      f" {assumptions.LOST_POSITIONS}"
    )
  if "posemb" in file.options:
    options.setdefault("rope", None)  # arrays alone would be DINOv3's
  family = hf_names.known(kind)
  folder = path if path.is_dir() else path.parent
  about, name = hf_preprocessing.read(folder)
  about = hf_preprocessing.complete(about, name)
  grid = tuple(side // stated.patch for side in stated.image_size)
  size = stated.image_size
  if family.takes_any_size:  # its images may have another size than its table
    made = hf_preprocessing.image_size(about, name) or size
    size = made if not any(side % stated.patch for side in made) else size
  ops = hf_preprocessing.ops_of(about, size, name)
  notes = stated.notes
  if about and not ops:
    notes += (hf_preprocessing.unlike(about, size, name),)
  if stated.loss == REGRESSION:
    notes += (hf_head.IS_REGRESSION,)
  return Weights(
    str(path),
    "hf",
    params,
    options,
    grid=grid,
    image_size=size,
    class_names=stated.class_names,
    loss=stated.loss,
    ops=ops,
    pixels=hf_preprocessing.pixels(about, name),
    published_pixels=family.pixels,
    posemb_filter=family.posemb_filter,
    notes=notes,
  )


def read_arrays(
  arrays: Mapping[str, LazyArray], config: Mapping[str, Any]
) -> tuple[dict[str, LazyArray], dict[str, Any], Statements]:
  """Returns parameters by our flat names, options, and other statements.

  Arrays are lazy. Attention without biases gets biases of zero; the pooler
  becomes pre_logits.

  Args:
    arrays: Name in the file -> array.
    config: Contents of config.json.

  Returns:
    Parameters; options that no array shows, such as gelu and ln_eps; other
    statements of config.json.

  Raises:
    ValueError: Arrays have no place in our models, or unexpected shapes; or the
      config asks for something that our models lack. All errors at once.
  """
  errors: list[str] = []
  read = _config(config)
  family = hf_names.known(read.model_type)
  if family is None:
    nearest = _nearest(arrays)
    family = MODEL_TYPES[nearest]
    errors.append(
      f"model_type: got {read.model_type!r}, expected one of"
      f" {', '.join((*MODEL_TYPES, *TWO_TOWERS))}. Its arrays are nearest to"
      f" those of {nearest!r}: if that class computes the same, write this"
      " model_type into a copy of config.json."
    )
  patch = height_and_width(read.patch_size, "config.json: patch_size")
  if patch[0] != patch[1]:
    errors.append(
      f"patch_size: got {list(patch)}, expected a square: vit_jax has only"
      " square patches."
    )
  named, notes = _of_the_model(arrays, family)
  names = max(family.names, key=lambda n: _num_placed(n, named))
  depth = count_blocks(named, names.number)
  if read.num_hidden_layers not in (None, depth):
    errors.append(
      f"num_hidden_layers: got {read.num_hidden_layers}, expected the {depth}"
      " blocks that the file has. Use a complete file."
    )
  rows = names.table(depth)
  params, shape_errors = to_ours(rows, named, read.num_attention_heads)
  errors += shape_errors
  if "name" not in family.options:  # keys of BEiT and DINOv3 have none
    add_zero_biases(params)
  known = {row.theirs for row in rows}
  if unknown := [n for n in named if n not in known]:
    takes = f"a model of the type {read.model_type!r}"
    nearest = _nearest(arrays)
    most = _num_named(arrays, MODEL_TYPES[nearest])
    if most > _num_named(arrays, family):
      takes += (
        ", or correct model_type in config.json: they are nearest to those of"
        f" {nearest!r}"
      )
    errors.append(unplaced(unknown, PARTS, takes))
  options = dict(family.options) | {"ln_eps": read.layer_norm_eps}
  if "classifier.weight" in named:
    options |= family.options_of_classifier
  is_gated = any("/Gate/" in name for name in params)
  if not is_gated:
    options["gelu"] = GELUS.get(read.hidden_act)
  if options.get("gelu") == "quick":
    options["name"] = "modern"
  # DINOv2's gate is SiLU, whatever its config says.
  acts = ("silu",) if is_gated and "rope" in family.options else tuple(GELUS)
  if read.hidden_act not in acts and (acts == ("silu",) or not is_gated):
    errors.append(
      f"hidden_act: got {shown(read.hidden_act)}, expected one of"
      f" {', '.join(acts)}."
    )
  if read.rope_theta != 100 and "rope" in family.options:
    errors.append(f"rope_theta: got {read.rope_theta:g}, expected 100.")
  if "pooler.dense.weight" in named and read.pooler_act != "tanh":
    errors.append(f"pooler_act: got {read.pooler_act!r}, expected 'tanh'.")
  pooler = params.get("pre_logits/kernel")
  if pooler is not None and len({*pooler.shape}) > 1:
    errors.append(
      f"pooler_output_size: got a pooler of {pooler.shape[-1]} outputs,"
      f" expected the width of the model, {pooler.shape[0]}. Leave it out:"
      " ViTModel.from_pretrained(SRC, add_pooling_layer=False)"
      ".save_pretrained(DST)."
    )
  if {"pooler.dense.weight", "classifier.weight"} <= named.keys():
    errors.append(
      "got both pooler and classifier, expected one of them: in transformers"
      " the classifier does not see the pooler's output. Remove pooler.dense."
    )
  errors += hf_head.problem_errors(read.problem_type)
  if errors:
    raise ValueError("weights of Hugging Face: " + "\n".join(errors))
  _fold_second_token(params)
  outputs = params["head/kernel"].shape[1] if "head/kernel" in params else 0
  kind = read.problem_type or (REGRESSION if outputs == 1 else None)
  size, size_notes = _image_size(read, patch[0])
  statements = Statements(
    size,
    patch[0],
    read.num_attention_heads,
    _class_names(read.id2label),
    hf_head.LOSSES[kind] if kind and outputs else None,
    notes + size_notes,
  )
  return params, options, statements


def _nearest(arrays: Mapping[str, Any]) -> str:
  """Returns the `model_type` to which most names belong."""
  return max(MODEL_TYPES, key=lambda t: _num_named(arrays, MODEL_TYPES[t]))


def _num_named(arrays: Mapping[str, Any], family: hf_names.ModelType) -> int:
  """Returns the number of arrays that have names of a model type."""
  named = {hf_names.without_prefix(n, family.prefixes): 0 for n in arrays}
  return max(_num_placed(names, named) for names in family.names)


def _num_placed(names: hf_names.Names, arrays: Mapping[str, Any]) -> int:
  """Returns the number of arrays that a key table contains."""
  rows = names.table(count_blocks(arrays, names.number))
  return len({row.theirs for row in rows} & arrays.keys())


def _fold_second_token(params: dict[str, LazyArray]) -> None:
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


def _config(config: Mapping[str, Any]) -> HFConfig:
  """Returns config.json with its types, and with its model type's defaults.

  A model of texts and images states its image tower in `vision_config`.

  Raises:
    ValueError: Values have other types.
  """
  where = "weights of Hugging Face: config.json"
  kind = {"model_type": config.get("model_type")}
  family = hf_names.known(json_file.build(HFConfig, kind, where).model_type)
  defaults = dict(family.defaults) if family else {}
  vision = config.get("vision_config")
  # The tower repeats these, where they are not those of the head.
  top = ("model_type", "id2label", "problem_type")
  return json_file.build(
    HFConfig,
    defaults
    | _stated(config)
    | _stated(vision if isinstance(vision, dict) else {})
    | _stated({key: config.get(key) for key in top}),
    where,
  )


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in config.items() if value is not None}


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
      "its images have any size in transformers, with up to"
      f" {read.num_patches} patches; here they are {side} x {side}, the size of"
      " the position table.",
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
    ValueError: The numbers are not 0, 1, 2, ...
  """
  by_number = {int(k): v for k, v in id2label.items() if k.isdecimal()}
  if set(by_number) != set(range(len(id2label))):
    raise ValueError(
      f"config.json: id2label: got {len(id2label)} keys such as"
      f" {shown(list(id2label)[:4])}, expected 0 to {len(id2label) - 1}."
    )
  return hf_head.named(tuple(by_number[k] for k in sorted(by_number)))
