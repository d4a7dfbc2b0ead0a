"""Records of one's own, by import path: "my_lab.shards:Shards(/data/path)".

The name is that of a class, or of a function, which gets the name of a split,
and the text in brackets if there is any: `Shards("train", "/data/path")`. It
returns `Records`, or raises KeyError for a split that does not exist. Slices,
sums and subsets of splits work as for all data: "train[:90%]@1000".
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vit_jax import names
from vit_jax.data import splits
from vit_jax.data.dataset_info import DATASETS, Info, prefix_of
from vit_jax.data.splits import SplitError
from vit_jax.data.vtab import PREFIX as VTAB

# Name of a split -> its records.
Splits = Callable[[str], Any]


# Name of a data set -> its splits, by name or by a function.
Given = Mapping[str, Splits | Mapping[str, Any]]


@runtime_checkable
class Records(Protocol):
  """A split of a data set, by number, as PyGrain's data sources.

  `records[i]` may be called by several threads at once. It returns a dict:

    image: bytes of an image file, or uint8 [h, w], [h, w, 1] or [h, w, 3]; the
      same kind in all records.
    label: the class, an int from 0 to num_classes - 1, or -1 for none; or a
      vector [num_classes] of floats: 1 for each class that the image has, or
      the numbers to predict.

  A record that raises, or has another form, counts as one that cannot be
  decoded: it is logged and left out.

  Further attributes may be there:

    class_names: Names by label, or of the numbers to predict.
    is_regression: Whether vectors are numbers to predict (False).
    labels(): All labels, [n] or [n, num_classes]. Without it, all records are
      read where all labels are needed.

  Attributes:
    num_classes: Number of classes, or of numbers to predict.
  """

  num_classes: int

  def __len__(self) -> int:
    """Returns the number of records."""
    ...

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    """Returns the record of a number, from 0 to len - 1."""
    ...

  def identity(self) -> str:
    """Returns a text that changes if the records or their order change.

    It is the same on all machines with the same records. A run stores it, and
    refuses to resume with another. "" compares only the number of records.
    """
    ...


def is_own(dataset: str) -> bool:
  """Whether a data set is named by an import path.

  Example:
    >>> names = "my_lab.shards:Shards(/data)", "folder:photos", "mnist:3.0.1"
    >>> [is_own(name) for name in names]
    [True, False, False]
  """
  prefix = prefix_of(dataset)
  is_known = prefix in ("", VTAB) or prefix in DATASETS
  return not is_known and names.is_path(dataset)


def splits_of(dataset: str) -> Splits:
  """Returns the function that an import path names.

  Raises:
    ValueError: It cannot be imported.
  """
  path, text = names.split(dataset)
  make = names.resolve(path, {}, "data set")
  return lambda split: make(split, *(() if text is None else (text,)))


def opened(dataset: str, make: Splits, split: str) -> Any:
  """Returns the records of a split, without slices.

  Args:
    dataset: Name of the data set, for messages.
    make: The splits.
    split: Name of the split.

  Raises:
    SplitError: `make` raises KeyError.
    ValueError: It raises something else, or returns no `Records`.
  """
  got = f"got data set {dataset!r}, split {split!r}"
  try:
    records = make(split)
  except KeyError as e:
    raise SplitError(f"{got}, which does not exist (KeyError: {e}).") from e
  except Exception as e:  # a class of one's own may raise anything
    raise ValueError(f"{got}, which raises {type(e).__name__}: {e}") from e
  lacks = [
    name
    for name in ("__len__", "__getitem__", "num_classes", "identity")
    if not hasattr(records, name)
  ]
  if lacks:
    raise ValueError(
      f"{got}, a {type(records).__name__} without {', '.join(lacks)}, expected"
      f" {Records.__module__}.Records."
    )
  class_names = getattr(records, "class_names", None)
  if class_names is not None and len(class_names) != records.num_classes:
    expected = f"num_classes={records.num_classes} names, or None"
    raise ValueError(f"{got}, {len(class_names)} names, expected {expected}.")
  return records


def spans(
  dataset: str, make: Splits, split: str
) -> list[tuple[Any, splits.Span]]:
  """Returns the records of each part of a split, and which of them it has.

  Args:
    dataset: Name of the data set, for messages.
    make: The splits.
    split: A split with slices and sums, without a subset.

  Raises:
    ValueError: See `opened` and `splits.parse_split`.
  """
  found = {}
  for part in split.split("+"):
    name = part.partition("[")[0].strip()
    if name not in found:
      found[name] = opened(dataset, make, name)
  sizes = {name: len(records) for name, records in found.items()}
  return [
    (found[span.split], span) for span in splits.parse_split(split, sizes)
  ]


def info(dataset: str, split: str) -> Info | None:
  """Returns number of classes and size of splits, for a plan without data.

  None if the data set is not named by an import path, or cannot be opened here.

  Args:
    dataset: Name of the data set.
    split: The split that is to be known.

  Raises:
    ValueError: The import path cannot be imported.
  """
  if not is_own(dataset):
    return None
  make = splits_of(dataset)
  base, _ = splits.parse_draw(split)
  try:
    parts = spans(dataset, make, base)
    records, span = parts[0]
    label = image_and_label(records[span.start], records.num_classes)[1]
  except Exception:  # on a machine without the data, anything
    return None
  is_regression = bool(getattr(records, "is_regression", False))
  return Info(
    records.num_classes,
    {span.split: len(part) for part, span in parts},
    is_multilabel=label.ndim > 0 and not is_regression,
    is_regression=is_regression,
  )


def image_and_label(
  record: Mapping[str, Any], num_classes: int
) -> tuple[bytes | np.ndarray, np.ndarray]:
  """Returns the image, bytes or uint8 [h, w, 3]; the label, int32 or float32.

  Raises:
    ValueError: The record is not as `Records` says.
  """
  image, label = record["image"], np.asarray(record["label"])
  if not isinstance(image, bytes):
    got = type(image).__name__
    if isinstance(image, np.ndarray):
      got = f"{image.dtype} {list(image.shape)}"
      image = image[..., None] if image.ndim == 2 else image
    is_good = getattr(image, "dtype", None) == np.uint8 and image.ndim == 3
    if not is_good or image.shape[-1] not in (1, 3):
      expected = "bytes of an image file, or an array uint8 [h, w, 1 or 3]"
      raise ValueError(f"has an image {got}, expected {expected}.")
    image = np.repeat(image, 3, -1) if image.shape[-1] == 1 else image
  is_class = label.ndim == 0 and np.issubdtype(label.dtype, np.integer)
  is_vector = label.shape == (num_classes,) and label.dtype.kind in "fiub"
  if not is_class and not is_vector:
    expected = f"an int, or {num_classes} floats"
    got = f"{label.dtype} {list(label.shape)}"
    raise ValueError(f"has a label {got}, expected {expected}.")
  return image, label.astype(np.int32 if is_class else np.float32)
