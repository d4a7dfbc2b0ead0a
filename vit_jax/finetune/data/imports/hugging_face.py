"""Data sets of Hugging Face, read by their own library `datasets`."""

import functools
import os
from collections.abc import Iterable, Iterator, Sequence

from vit_jax.finetune.data.imports import tables
from vit_jax.finetune.data.imports.listing import (
  SPLIT_OF,
  Listing,
  Options,
  select_splits,
)

_ROWS = 64  # images in memory at a time


def scan(name: str, options: Options) -> Listing:
  """Lists a data set, which the library downloads on first use.

  Args:
    name: A name of the hub, with ":CONFIG" if it has several; or the folder of
      a data set that `save_to_disk` wrote, or that `load_dataset` accepts.
    options: See `Options`.

  Raises:
    ValueError: The library is not installed; it cannot load the data set; or
      there are no such columns.
  """
  try:
    import datasets
  except ImportError:
    raise ValueError(
      f"got hf:{name}, which needs Hugging Face's library: pip install datasets"
    ) from None

  where = f"hf:{name}"
  loaded = _loaded(datasets, name)
  splits = dict(zip(split_names(loaded), loaded.values(), strict=True))
  names = select_splits(splits, options, where)
  by_split = {k: [_table(datasets, k, splits[k])] for k in names}
  # A data set may name files instead of holding their bytes. Only files of its
  # folder, or that the library has downloaded, are read.
  roots = [os.path.expanduser(name), str(datasets.config.HF_CACHE_HOME)]
  roots += [str(datasets.config.HF_DATASETS_CACHE)]
  read = functools.partial(_image, roots=[*map(os.path.realpath, roots)])
  return tables.scan(by_split, options, where, read)


def split_names(splits: Iterable[str]) -> list[str]:
  """Returns TFDS's names of splits, or the given ones if two would be equal.

  Example:
    >>> split_names(["train", "dev"]), split_names(["val", "dev"])
    (['train', 'validation'], ['val', 'dev'])
  """
  renamed = {split: SPLIT_OF.get(split.lower(), split) for split in splits}
  every = [*renamed.values()]
  return [v if every.count(v) == 1 else k for k, v in renamed.items()]


def _loaded(datasets, name: str):
  """Returns split -> data set."""
  path = os.path.expanduser(name)
  try:
    if os.path.isdir(path):
      saved = ("dataset_dict.json", "state.json")
      if any(os.path.exists(os.path.join(path, file)) for file in saved):
        data = datasets.load_from_disk(path)
      else:
        data = datasets.load_dataset(path)
    else:
      name, _, config = name.partition(":")
      data = datasets.load_dataset(name, config or None)
  except Exception as e:  # many types; the library's own text explains best
    raise ValueError(f"got hf:{name}: {type(e).__name__}: {e}") from None
  if isinstance(data, dict):
    return data
  # A part of a split has its slice in its name, "train[:10%]".
  return {str(data.split or "train").partition("[")[0]: data}


def _table(datasets, split: str, data) -> tables.Table:
  # Images as encoded bytes, which are stored unchanged.
  for name, feature in data.features.items():
    if isinstance(feature, datasets.Image):
      data = data.cast_column(name, datasets.Image(decode=False))

  def class_names(column: str) -> Sequence[str]:
    feature = data.features[column]
    return getattr(getattr(feature, "feature", feature), "names", ())

  def rows(columns: Sequence[str]) -> Iterator[tuple]:
    for batch in data.select_columns(list(columns)).iter(_ROWS):
      yield from zip(*(batch[column] for column in columns), strict=True)

  return tables.Table(split, data.column_names, class_names, rows)


def _image(value: object, roots: list[str]) -> bytes:
  """Returns the bytes of an image, or of a file below one of the folders."""
  if isinstance(value, bytes):
    return value
  image = value if isinstance(value, dict) else {}
  if image.get("bytes"):
    return image["bytes"]
  if not image.get("path"):
    raise ValueError("has no image")
  path = os.path.realpath(image["path"])
  if not any(path.startswith(root + os.sep) for root in roots):
    raise ValueError(f"names a file outside of the data set: {path}")
  try:
    with open(path, "rb") as stream:
      return stream.read()
  except OSError:
    raise ValueError("has no image") from None
