"""TFDS builder `imagenet21k`: all of ImageNet from its class tars."""

import contextlib
import os
import pathlib
import re
import tarfile
from collections.abc import Iterator

import tensorflow_datasets as tfds

from vit_jax.data.builders.image_builder import Entry, ImageBuilder, Split
from vit_jax.data.builders.tars import (
  BROKEN,
  file_members,
  members,
  opened,
  read,
)

_CLASS_TAR = re.compile(r"(n\d{8})\.tar")

# wnid -> (file, its member that is the class's tar; None: the whole file).
_Tars = dict[str, tuple[pathlib.Path, tarfile.TarInfo | None]]


class Imagenet21k(ImageBuilder):
  """ImageNet with all its classes: one split, `full`.

  The folder of manual downloads has one tar of JPEGs for each class,
  n01440764.tar and so on, at any depth; or one uncompressed tar of these tars.
  image-net.org gives its releases fall11 and winter21 in this form.

  Classes are the tars' names (WordNet's ids) in sorted order: 21,843 for the
  published checkpoints, fewer for winter21. Records are in the order of a hash
  of class and file name, the same on every machine. The files that Google's
  models were trained on are not published and have another order, so their
  full[:51200] are other images.
  """

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    "the class tars n01440764.tar, ... of a release from image-net.org, or one"
    " uncompressed tar of them"
  )

  def _info(self) -> tfds.core.DatasetInfo:
    # The names become known with the tars.
    return self._info_of(self.__doc__, tfds.features.ClassLabel())

  def _split_generators(self, dl_manager) -> dict[str, object]:
    tars = class_tars(pathlib.Path(dl_manager.manual_dir))
    self.info.features["label"].names = list(tars)
    split = Split(None, lambda: _entries(tars))
    return {"full": self._generate_examples("full", split)}


def class_tars(folder: pathlib.Path) -> _Tars:
  """Returns the classes in sorted order, and where their tars are.

  Raises:
    ValueError: There are none, or two of the same class.
  """
  files = sorted(folder.rglob("*.tar"))
  tar_files = [(file.name, file, None) for file in files]
  if len(files) == 1 and not _CLASS_TAR.fullmatch(files[0].name):
    try:
      with open(files[0], "rb") as file, opened(file) as outer:
        inner = [m for m in members(outer) if m.isfile()]
        tar_files = [(os.path.basename(m.name), files[0], m) for m in inner]
    except BROKEN as e:
      raise ValueError(f"got {files[0]}, a broken tar: {e}.") from None
  tars: _Tars = {}
  for name, file, member in tar_files:
    if match := _CLASS_TAR.fullmatch(name):
      if match[1] in tars:
        both = f"{tars[match[1]][0]} and {file}"
        raise ValueError(f"got {both}, expected one tar of {match[1]}.")
      tars[match[1]] = file, member
  if not tars:
    expected = "n01440764.tar, ..., or one uncompressed tar of these"
    got = f"{folder} with {len(files)} tars"
    raise ValueError(f"got {got}, expected {expected}.")
  return dict(sorted(tars.items()))


def _entries(tars: _Tars) -> Iterator[Entry]:
  for label, (wnid, (path, member)) in enumerate(tars.items()):
    seen = set()
    try:
      with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        if member:
          outer = stack.enter_context(opened(file))
          file = stack.enter_context(outer.extractfile(member))
        tar = stack.enter_context(opened(file))
        yield from _images(tar, wnid, label, seen)
    except BROKEN as e:
      yield Entry(
        f"{wnid}.tar", error=f"is broken after {len(seen)} images: {e}"
      )


def _images(
  tar: tarfile.TarFile, wnid: str, label: int, seen: set[str]
) -> Iterator[Entry]:
  for member in file_members(tar):
    key = f"{wnid}/{os.path.basename(member.name)}"
    if key in seen:
      yield Entry(key, error="is in the tar twice")
      continue
    seen.add(key)
    yield Entry(key, read(tar, member), label)
