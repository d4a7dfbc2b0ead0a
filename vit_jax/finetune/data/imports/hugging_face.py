"""Data sets of Hugging Face, read by their own library `datasets`."""

import os
from collections.abc import Iterable, Iterator

from vit_jax.finetune.data.imports.listing import (
  SPLIT_OF,
  Classes,
  Entry,
  Listing,
  Options,
  Split,
  check_lists,
  common_names,
  pick_column,
  select_splits,
)

_LABELS = ("int", "uint", "string", "large_string")  # prefixes of types


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
  features = splits[names[0]].features
  kinds = {k: repr(v) for k, v in features.items()}
  images = {
    k: v for k, v in kinds.items() if isinstance(features[k], datasets.Image)
  }
  # A list has the type of its elements, which are the classes of an image.
  elements = {k: getattr(v, "feature", v) for k, v in features.items()}
  labels = {
    k: v
    for k, v in kinds.items()
    if isinstance(elements[k], datasets.ClassLabel)
    or str(getattr(elements[k], "dtype", "")).startswith(_LABELS)
  }
  image, *remarks = pick_column("image", images, kinds, options.image, where)
  label, remark = pick_column("label", labels, kinds, options.label, where)
  is_multilabel = elements[label] is not features[label]
  class_names = common_names(
    {k: _names(splits[k], label) for k in names}, where
  )
  if is_multilabel:
    check_lists(_values(splits, names, label), label, where)
    lists = _values(splits, names, label)
    values = {v for row in lists for v in row or ()}
  else:
    values = {v for split in names for v in splits[split].unique(label)}
  class_names = options.classes or class_names
  classes = Classes(values, class_names, where, is_multilabel)

  # A data set may name files instead of holding their bytes. Only files of its
  # folder, or that the library has downloaded, are read.
  roots = [os.path.expanduser(name), str(datasets.config.HF_CACHE_HOME)]
  roots += [str(datasets.config.HF_DATASETS_CACHE)]

  def split_of(split: str) -> Split:
    data = splits[split].select_columns([image, label])
    # Encoded bytes, which are stored as they are.
    data = data.cast_column(image, datasets.Image(decode=False))

    def entries() -> Iterator[Entry]:
      for row, record in enumerate(data):
        yield _entry(
          f"{split}:{row}", record[image], record[label], classes, roots
        )

    return Split(len(data), entries)

  remarks = tuple(filter(None, (*remarks, remark)))
  by_name = {split: split_of(split) for split in names}
  return Listing(classes.names, by_name, is_multilabel, remarks)


def _values(splits, names: list[str], label: str) -> Iterator:
  for name in names:
    for row in splits[name].select_columns([label]):
      yield row[label]


def _names(split, label: str) -> tuple[str, ...]:
  feature = split.features.get(label)
  return tuple(getattr(getattr(feature, "feature", feature), "names", ()))


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


def _entry(
  key: str, image: dict | None, label, classes: Classes, roots: list[str]
) -> Entry:
  known = classes.label(label)
  if known is None:
    return Entry(key, error="has no label")
  image = image or {}
  if image.get("bytes"):
    return Entry(key, image["bytes"], known)
  if not image.get("path"):
    return Entry(key, error="has no image")
  path = os.path.realpath(image["path"])
  if not any(path.startswith(f"{os.path.realpath(r)}{os.sep}") for r in roots):
    return Entry(key, error=f"names a file outside of the data set: {path}")
  try:
    with open(path, "rb") as stream:
      return Entry(key, stream.read(), known)
  except OSError:
    return Entry(key, error="has no image")
