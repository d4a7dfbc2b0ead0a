"""Images in folders, one per class, with the splits of `folder:/path`."""

import os
from collections.abc import Iterator

from vit_jax.data.builders.image_builder import Entry, Split
from vit_jax.data.splits import SPLIT_FOLDERS, SplitError
from vit_jax.finetune.data.imports.listing import (
  Listing,
  Options,
  check_names,
  check_unused,
  select_splits,
)

_NAMES = {"train": "train", "val": "validation", "test": "test"}


def scan(path: str, options: Options) -> Listing:
  """Lists a folder as `folder:/path` does; `val` becomes `validation`.

  Raises:
    ValueError: See `folder.open_folder`; a split does not exist; an option is
      for other kinds; or TFDS cannot store the name of a class.
  """
  from vit_jax.data import folder  # imports TensorFlow

  name = folder.PREFIX + path
  check_unused(options, ("image", "label", "classes"), name)
  sources = {}
  for split in SPLIT_FOLDERS:
    try:
      sources[_NAMES[split]] = folder.open_folder(name, split, None)
    except SplitError:
      continue
  names = select_splits(sources, options, name)
  root = os.path.commonpath([p for s in sources.values() for p in s.paths])

  def split_of(source: folder.FolderSource) -> Split:
    def entries() -> Iterator[Entry]:
      for file, label in zip(source.paths, source.path_labels, strict=True):
        key = os.path.relpath(file, root)
        try:
          with open(file, "rb") as stream:
            yield Entry(key, stream.read(), int(label))
        except OSError as e:
          yield Entry(key, error=f"cannot be read: {e.strerror}")

    return Split(source.num_examples, entries)

  class_names = sources["train"].class_names
  check_names(class_names, name)
  remark = sources["train"].remark
  return Listing(
    class_names,
    {k: split_of(sources[k]) for k in names},
    remarks=(remark,) if remark else (),
  )
