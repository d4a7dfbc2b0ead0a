"""Classes of images, batch by batch, while threads read the next batches."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from vit_jax import class_names
from vit_jax.batch import normalise
from vit_jax.inference import streaming
from vit_jax.losses import PROBABILITIES

if TYPE_CHECKING:
  from vit_jax.inference.pretrained import Pretrained

BATCH = 16  # images in a forward pass


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A class and its probability by the model, 0 to 1.

  A class of ImageNet has its word and its wnid: "tench (n01440764)". `index` is
  its column of the head, since two classes may have one name.
  """

  name: str
  probability: float
  index: int


@dataclasses.dataclass(frozen=True)
class Answer:
  """A model's answer for an image.

  Attributes:
    name: Path of the image, or a name.
    classes: The most probable first; empty where the image cannot be read.
    pixels: uint8 [h, w, 3] as the model got them; None: it cannot be read.
    attention: Its `Pretrained.attention_map`, [rows, columns]; None: it was not
      asked for.
    error: Why the image cannot be read; None: it can.
  """

  name: str
  classes: list[Prediction]
  pixels: np.ndarray | None = None
  attention: np.ndarray | None = None
  error: Exception | None = None


def answers(
  vit: "Pretrained",
  images: Iterable[streaming.Named],
  top: int,
  *,
  batch_size: int,
  attention: bool,
) -> Iterator[Answer]:
  """Yields the answers of `Pretrained.predictions`, which see."""
  rows = streaming.read_all(images, vit.ops, ahead=2 * batch_size)
  names = vit.class_names or tuple(map(str, range(vit.num_classes)))
  names = tuple(map(class_names.in_words, names))
  before: tuple[list[streaming.Row], Any] | None = None
  for batch in _batches(rows, batch_size):
    good = [row.pixels for row in batch if row.error is None]
    if before is None and len(good) < batch_size:  # the only batch
      batch_size = 1 << max(len(good) - 1, 0).bit_length()
    now = batch, _forward(vit, good, batch_size, attention)
    if before is not None:
      yield from _of_batch(*before, names, top)
    before = now
  if before is not None:
    yield from _of_batch(*before, names, top)


def probabilities_fn(vit: "Pretrained") -> Callable[..., jax.Array]:
  """Returns (params, images uint8 [b h w c]) -> probabilities, jitted."""

  def probabilities(params, images):
    logits, _ = vit.model.apply({"params": params}, normalise(images))
    return PROBABILITIES[vit.loss](logits)

  return jax.jit(probabilities)


def _batches(
  rows: Iterable[streaming.Row], size: int
) -> Iterator[list[streaming.Row]]:
  """Yields lists with `size` readable images each; the last may have fewer."""
  batch, count = [], 0
  for row in rows:
    batch.append(row)
    count += row.error is None
    if count == size:
      yield batch
      batch, count = [], 0
  if batch:
    yield batch


def _forward(
  vit: "Pretrained", rows: list[np.ndarray], size: int, attention: bool
) -> tuple[Any, Any]:
  """Starts a forward pass; returns probabilities and attention maps."""
  if not rows:
    return (), ()
  images = np.zeros((size, *vit.image_size, 3), np.uint8)
  images[: len(rows)] = rows
  probabilities = vit.probabilities(vit.params, images)
  maps = vit.attention_map(normalise(images)) if attention else ()
  return probabilities, maps


def _of_batch(
  batch: list[streaming.Row], results, names: tuple[str, ...], top: int
) -> Iterator[Answer]:
  probabilities, maps = map(np.asarray, results)
  numbers = itertools.count()
  for row in batch:
    if row.error is not None:
      yield Answer(row.name, [], error=row.error)
      continue
    i = next(numbers)
    best = np.argsort(-probabilities[i], kind="stable")[:top].tolist()
    yield Answer(
      row.name,
      [Prediction(names[k], float(probabilities[i, k]), k) for k in best],
      row.pixels,
      maps[i] if len(maps) else None,
    )
