"""Images of a folder without classes: "images:/path".

All image files below the folder count, at any depth, as for `folder:/path`. No
image has a class: labels are -1. The only split is `train`. Files of the same
bytes are not looked for.
"""

import pathlib

import numpy as np

from vit_jax.data import splits
from vit_jax.data.folder import FolderSource, images_in
from vit_jax.data.images import SUFFIXES
from vit_jax.paths import printable

PREFIX = "images:"
NO_CLASS = -1


def open_images(dataset: str, split: str, data_dir: str | None) -> FolderSource:
  """Opens "images:/path"; the path may be relative to the working directory.

  Raises:
    ValueError: The folder does not exist or has no images; or the split is
      unknown.
  """
  del data_dir
  root = pathlib.Path(dataset.removeprefix(PREFIX)).expanduser().absolute()
  if not root.is_dir():
    raise ValueError(f"got data set {dataset!r}, but {root} is no folder.")
  names, others = images_in(root)
  if not names:
    raise ValueError(
      f"got data set {dataset!r} without images, expected files"
      f" {', '.join(SUFFIXES)}."
    )
  paths = []
  for span in splits.parse_split(split, {"train": len(names)}):
    paths += names[span.start : span.stop]
  remark = ""
  if others:
    remark = (
      f"{dataset!r} has {len(others):,} files that are not read, such as"
      f" {printable(others[0])}."
    )
  return FolderSource(
    name=dataset,
    split=split,
    num_examples=len(paths),
    num_classes=0,
    remark=remark,
    paths=tuple(str(root / name) for name in paths),
    path_labels=np.full(len(paths), NO_CLASS, np.int32),
    ranks=np.zeros(len(paths)),
  )
