"""A model as a `.npz` of a published format; what such a file cannot say."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax import class_names
from vit_jax.data.preprocessing import decoding
from vit_jax.families import ModelConfig
from vit_jax.weights import bit, eval_preprocessing, google
from vit_jax.weights.assumptions import has_positions
from vit_jax.weights.fitting import NUMERICS, trained_at
from vit_jax.weights.identification import NEEDED, identify
from vit_jax.weights.weights_file import POS_EMBEDDING, LazyArray, Weights

RESNETS = ("bit", "bit_v1")


def write(
  params: Mapping[str, np.ndarray], model: ModelConfig
) -> tuple[dict[str, np.ndarray], str]:
  """Returns the arrays by published names, and the code that reads these names.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.

  Raises:
    ValueError: No published format has names for all parts of the model.
  """
  at, is_resnet = getattr(model, "posemb_at", "stem"), model.name in RESNETS
  has_names = is_resnet or NEEDED.keys() <= params.keys()
  if at != "stem" or model.name == "modern" or not has_names:
    raise ValueError(
      f"--to=npz: got config.model.name={model.name!r}, {model.variant!r},"
      f" posemb_at={at!r}, expected a model of Google's codes; --to=orbax"
      " writes any model."
    )
  if model.name == "bit":
    return bit.write(params), "BiT's own code, big_vision and timm"
  if model.name == "bit_v1":
    return google.write(params, is_big_vision=True), "big_vision"
  is_big_vision = google.is_big_vision(model, params)
  reader = "big_vision" if is_big_vision else "vision_transformer and timm"
  if (
    model.posemb not in ("learn", "sincos2d") or is_big_vision and model.stages
  ):
    reader = "vit_jax alone"
  return google.write(params, is_big_vision=is_big_vision), reader


def missing_arguments(
  params: Mapping[str, Any],
  model: ModelConfig,
  *,
  image_size: tuple[int, int],
  num_classes: int,
  loss: str,
  posemb_filter: str,
) -> dict[str, Any]:
  """Returns the arguments that `vit_jax.load` needs, because no array has them.

  Args:
    params: Our flat names -> anything with a shape; blocks not stacked.
    model: Model of the parameters.
    image_size: (height, width) of the images, pixels.
    num_classes: Width of the head, 0 for none.
    loss: Training loss of the head.
    posemb_filter: How positions are resized.
  """
  by_names = identify(params, {})
  keys = [k for k in (*NUMERICS, "posemb") if hasattr(model, k)]
  arguments = {
    k: getattr(model, k)
    for k in keys
    if getattr(model, k) != getattr(by_names, k)
    # Beside a class token, a table that is missing may be lost.
    or (k == "posemb" and "cls" in params and not has_positions(params))
  }
  grid = model.grid(image_size)
  if POS_EMBEDDING in params and grid[0] != grid[1]:
    arguments["grid"] = tuple(grid)
  weights = Weights(
    "",
    "npz",
    {k: _shape(v) for k, v in params.items()},
    options=dataclasses.asdict(model),
    grid=arguments.get("grid"),
    has_cls_row=model.has_cls_row,
  )
  if trained_at(weights) != tuple(image_size):
    arguments["image_size"] = tuple(image_size)
  if has_positions(params) and posemb_filter != "zoom":
    arguments["posemb_filter"] = posemb_filter
  is_vit = "embedding/kernel" in params
  guess = class_names.published_loss(num_classes, is_vit) or "softmax"
  if num_classes and loss != guess:
    arguments["loss"] = loss
  return arguments


def _shape(array: Any) -> LazyArray:
  """Returns a lazy array of the same shape."""
  shape = tuple(array.shape)
  return LazyArray(shape, np.dtype(np.float32), lambda: array)


def notes(
  arguments: Mapping[str, Any],
  num_classes: int,
  names: Sequence[str] | None,
  ops: str,
  image_size: tuple[int, int],
) -> list[str]:
  """Returns notes for the user on what the file cannot say.

  Args:
    arguments: The result of `missing_arguments`.
    num_classes: Width of the head, 0 for none.
    names: Names of the classes in the order of the logits, or None.
    ops: Preprocessing of the model, as `config.data.ops`.
    image_size: (height, width) of its images, pixels.
  """
  texts, known = [], class_names.known(num_classes)
  if names and names != known:
    note = "without class names: .npz has no place for them"
    if known:
      note += f", and this width is taken for ImageNet's: {known[0]} ..."
    texts.append(note)
  if background := decoding(ops)["background"]:
    arguments = {**arguments, "background": background}
  if arguments:
    text = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    note = f"load it with {text}: .npz has no place for it"
    if arguments.keys() - {"image_size", "background", "posemb_filter"}:
      note += "; Google's code computes something else"
    texts.append(note)
  whole = eval_preprocessing.google(tuple(image_size))
  if eval_preprocessing.taken_apart(ops) != whole:
    texts.append(
      f"preprocessing there: {whole.ops}, because .npz has no place for {ops}"
    )
  return texts
