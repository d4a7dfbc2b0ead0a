"""The types of batches and of data: the contract between the input and a run.

Dimension letters, the same everywhere: b images, h height and w width in
pixels, c colour channels, n tokens, d width of a token.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
  Any,
  NamedTuple,
  NotRequired,
  Protocol,
  TypedDict,
  TypeVar,
  runtime_checkable,
)

import numpy as np

from vit_jax.options import unexpected

Images = TypeVar("Images")  # an array of numpy or jax


class DataError(ValueError):
  """Records, or the features that a model computes of them, cannot be used.

  The message says which ones, and what to do.
  """


class View(NamedTuple):
  """What a batch has of each record: one image, or several crops.

  ops: Preprocessing, in the language of config.data.ops.
  count: Crops of a record, uint8 [b, count, h, w, c] in the batch. None: one
    crop, without this dimension, [b, h, w, c].
  like: Name of a view of the same count whose random numbers this one has, crop
    by crop: the same boxes and flips at another size, for example. Its random
    operations stand at the same positions, with the same arguments except
    `size`; those at the end may be left out.

  Example:
    >>> views = {"global": View("decode_inception_crop(224, 25)|flip_lr", 2)}
  """

  ops: str
  count: int | None = None
  like: str | None = None


# Keys of a batch that no view can have; the step adds the last three.
RESERVED = ("label", "mask", "index", "targets", "shared", "partner")


class Batch(TypedDict):
  """One batch of this process, as numpy arrays.

  An objective with views of its own has an array for each of them, under its
  name, in place of `image`; see `View`.

  image: uint8 [b, h, w, c], values 0 to 255 from the decoder; c is
    config.model.channels (default 3).
  label: int32 [b], the class; or float32 [b, classes]: a number for each class
    of multi-label data, or the numbers that a regression predicts.
  mask: bool [b]; False marks a row that does not count: padding at the end of
    an evaluation, or an image that cannot be decoded. Training data may omit
    the mask; then all rows count.
  index: int64 [b], number of the record in its split; -1 for padding. The
    random numbers of a record depend on it, so copies of a record in a batch
    have different ones, see `TrainingData.row_numbers`. Training data may omit
    the index; then the position in the stream is used.
  """

  image: NotRequired[np.ndarray]
  label: np.ndarray
  mask: NotRequired[np.ndarray]
  index: NotRequired[np.ndarray]


class Standardisation(NamedTuple):
  """Mean and standard deviation of each number that a regression predicts."""

  mean: tuple[float, ...]
  deviation: tuple[float, ...]

  @classmethod
  def of(
    cls, labels: np.ndarray, names: Sequence[str], where: str
  ) -> "Standardisation":
    """Returns the standardisation of labels, float [n, outputs].

    Rows with NaN are left out.

    Raises:
      DataError: A target has the same value in all rows.
    """
    labels = labels[np.isfinite(labels).all(-1)].astype(np.float64)
    if constant := [
      name
      for name, column in zip(names, labels.T, strict=True)
      if not len(column) or column.min() == column.max()
    ]:
      got = f"the same value of {', '.join(constant)} in {len(labels):,} images"
      raise DataError(unexpected(where, got, "values that differ"))
    return cls(tuple(labels.mean(0).tolist()), tuple(labels.std(0).tolist()))


class LabelStatistics(NamedTuple):
  """What the labels of the training split show.

  class_counts: Images of each class; None if not counted.
  standardisation: Mean and deviation of regression targets; None for other
    data.
  """

  class_counts: tuple[int, ...] | None = None
  standardisation: Standardisation | None = None


@dataclasses.dataclass(frozen=True)
class RunShape:
  """Sizes that config and data decide together; all that a step knows of data.

  num_classes: Width of the head, at least the number of the data's classes.
  image_size: (height, width) after preprocessing, pixels.
  total_steps: Length of the run in updates; None without training.
  class_names: Names of the data's classes; None if they are unknown.
  labels: Returns the statistics of the training labels. Those of a run are read
    when they are first used, so call it only while the step is traced.
  """

  num_classes: int
  image_size: tuple[int, int]
  total_steps: int | None = None
  class_names: tuple[str, ...] | None = None
  labels: Callable[[], LabelStatistics] = LabelStatistics


def normalise(images: Images) -> Images:
  """Maps 0..255 to -1..1, the range that the published checkpoints expect.

  Args:
    images: uint8 [b, h, w, c], an array of numpy or jax.

  Returns:
    float32 [b, h, w, c].
  """
  return images.astype(np.float32) / 127.5 - 1.0


@runtime_checkable
class DataInfo(Protocol):
  """What is known before an image is read, of `Data` and of splits.

  Attributes:
    num_examples: Number of records in one epoch.
    num_classes: Number of classes, or of outputs of a regression. Labels are 0
      to num_classes - 1.
    class_names: Names by label; None if they are unknown.
    is_multilabel: Whether an image can have several classes. Labels are then
      float32 [b, num_classes]. Data may omit it (False).
    is_regression: Whether labels are numbers to predict, float32 [b,
      num_classes], with their names in class_names. Data may omit it (False).
      Data for a regression also have a method `labels()`, which returns float32
      [num_examples, num_classes].
  """

  num_examples: int
  num_classes: int
  class_names: tuple[str, ...] | None


@runtime_checkable
class Data(DataInfo, Protocol):
  """Training data; `train_and_evaluate` takes any object of this form."""

  def batches(
    self, start_step: int, process_index: int, process_count: int
  ) -> Iterator[Batch]:
    """Returns an endless iterator over the batches of one process.

    If batch n depends on n alone, a resumed run ends in the same bits as an
    uninterrupted one.

    Args:
      start_step: Number of the first batch, from 0. A resumed run has already
        seen this many batches of config.data.batch_size images.
      process_index: Number p of this process. It gets the p-th of process_count
        equal parts of every batch.
      process_count: Number of processes. A part has config.data.batch_size /
        process_count rows.
    """
    ...


def has_vectors(data: object) -> bool:
  """Whether a label of `Data` is a vector, a number per class or output."""
  kinds = "is_multilabel", "is_regression"
  return any(getattr(data, kind, False) for kind in kinds)


MOST_PLACES = 2**31  # index is an int32 on the devices


def checked(
  batches: Iterator[Any],
  *,
  rows: int,
  shapes: Mapping[str, tuple[int, ...]],
  num_classes: int,
  is_regression: bool = False,
  start_step: int = 0,
  process_index: int = 0,
  process_count: int = 1,
) -> Iterator[Batch]:
  """Checks the first batch, and adds the keys that batches omit.

  Later batches of another shape or type cannot pass the compiled step; only
  their classes are checked, because a wrong class would not be noticed.

  Args:
    batches: The result of `Data.batches`.
    rows: Rows of one batch of this process.
    shapes: Shape of what each view has of a record, such as {"image": (224,
      224, 3)}.
    num_classes: Width of the head; labels must be below it.
    is_regression: Whether labels can be negative.
    start_step: Number of the first batch.
    process_index: Number of this process.
    process_count: Number of processes.

  Raises:
    DataError: A batch does not fit the run, or the batches end. The message
      lists all errors of the batch.
  """
  step = start_step
  for batch in batches:
    if step == start_step:
      errors = _errors(batch, rows, shapes, num_classes, is_regression)
    else:
      errors = _class_errors(batch["label"], num_classes)
    if errors:
      lines = "\n".join(f"  - {error}" for error in errors)
      raise DataError(f"batch {step} of the data does not fit:\n{lines}")
    first = (step * process_count + process_index) * rows
    yield Batch(
      **{name: batch[name] for name in shapes},
      label=batch["label"]
      if batch["label"].ndim == 2
      else batch["label"].astype(np.int32, copy=False),
      mask=batch["mask"] if "mask" in batch else np.ones(rows, bool),
      index=batch["index"]
      if "index" in batch
      else np.arange(first, first + rows, dtype=np.int64) % MOST_PLACES,
    )
    step += 1
  raise DataError(
    f"the data ended after {step - start_step} batches, at batch {step},"
    " expected batches without end."
  )


def _errors(
  batch: Any,
  rows: int,
  shapes: Mapping[str, tuple[int, ...]],
  num_classes: int,
  is_regression: bool,
) -> list[str]:
  if not isinstance(batch, dict):
    return [unexpected("batch", type(batch), "a dict of numpy arrays")]
  expected = {
    **{name: f"uint8 {(rows, *shape)}" for name, shape in shapes.items()},
    "label": f"int32 ({rows},), or float32 ({rows}, {num_classes})",
    "mask": f"bool ({rows},)",
    "index": f"int64 ({rows},)",
  }
  errors = [
    unexpected(f"key {key!r}", type(value), f"only {', '.join(expected)}")
    for key, value in batch.items()
    if key not in expected
  ]
  for key, text in expected.items():
    if key not in batch and key in ("mask", "index"):
      continue
    value = batch.get(key)
    if not isinstance(value, np.ndarray):
      got = "nothing" if key not in batch else type(value)
      errors.append(unexpected(key, got, f"a numpy array, {text}"))
    elif not _fits(key, value, rows, shapes, num_classes):
      got = f"{value.dtype} {value.shape}"
      hint = "Rows are config.data.batch_size / processes."
      errors.append(unexpected(key, got, text, hint))
  if not errors:
    errors += _class_errors(batch["label"], num_classes)
    errors += _vector_errors(batch["label"], is_regression)
  return errors


def _fits(
  key: str,
  value: np.ndarray,
  rows: int,
  shapes: Mapping[str, tuple[int, ...]],
  num_classes: int,
) -> bool:
  if key in shapes:
    return value.dtype == np.uint8 and value.shape == (rows, *shapes[key])
  if key == "mask":
    return value.dtype == bool and value.shape == (rows,)
  if key == "label" and value.dtype == np.float32:
    return value.shape == (rows, num_classes)
  return np.issubdtype(value.dtype, np.integer) and value.shape == (rows,)


def _class_errors(label: np.ndarray, num_classes: int) -> list[str]:
  wrong = label[(label < -1) | (label >= num_classes)] if label.ndim < 2 else ()
  expected = f"-1 (no class) to {num_classes - 1}"
  return [unexpected("label", number, expected) for number in wrong[:1]]


def _vector_errors(label: np.ndarray, is_regression: bool) -> list[str]:
  if label.ndim < 2:
    return []
  least = -math.inf if is_regression else 0.0
  if np.isfinite(label).all() and label.min() >= least:
    return []
  expected = "finite numbers" + ", 0 or more" * (not is_regression)
  return [unexpected("label", f"{label.min()} to {label.max()}", expected)]


def batches_seen(
  metadata: Mapping[str, Any], step: int, batch_size: int
) -> int:
  """Returns how many batches of this size the run has already read.

  This is `step`, unless the run had another batch size before. It is rounded
  down: the images of a part of a batch are seen twice, and none is left out.

  Args:
    metadata: Metadata of the checkpoint of the step; {} if unknown.
    step: Batches of any size that the run has read.
    batch_size: Images of a batch from here on.
  """
  account = metadata.get("accounting") or {}
  images = account.get("images_seen", step * batch_size)
  # In older checkpoints, `position` is not in `accounting`.
  position = account.get("position", metadata.get("position", images))
  return int(position) // batch_size
