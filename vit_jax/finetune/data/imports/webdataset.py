"""WebDataset tars: consecutive members with the same name are a record.

The name of a record is a member's name up to the first dot after the last
slash. The rest is the ending: that of an image (.jpg, .seg.png, ...), or
`.cls`, the label, a number or the name of a class. Hidden members, such as
`._1.jpg` of macOS, are not records.

Python's tarfile reads them: the labels, which are needed before the images, are
found from a tar's headers. The library `datasets` would read a tar that is cut
off as a whole one, and refuses JPEG beside PNG.
"""

import os
import tarfile
from collections.abc import Iterator

from vit_jax.data import images as images_lib
from vit_jax.data.builders import tars
from vit_jax.data.builders.image_builder import Entry, Split
from vit_jax.finetune.data.imports import files
from vit_jax.finetune.data.imports.listing import (
  Classes,
  Listing,
  Options,
  check_unused,
)

LABEL = "cls"
SUFFIXES = (".tar", ".tar.gz", ".tgz")

# Ending -> member, or its contents if the tar is compressed.
_Members = dict[str, tarfile.TarInfo | bytes]


def scan(path: str, options: Options) -> Listing:
  """Lists tars; reads all headers and labels, but no image.

  Raises:
    ValueError: There are no tars, no labels in them, or an option is for other
      kinds.
  """
  where = f"webdataset:{path}"
  check_unused(options, ("label",), where)
  by_split = files.by_split(path, SUFFIXES, options, "webdataset:")
  labels, counts, errors = set(), dict.fromkeys(by_split, 0), []
  for split, paths in by_split.items():
    for tar_path in paths:
      for tar, name, members in _groups(tar_path):
        counts[split] += 1
        if members is None:
          errors.append(f" {tar_path} {name}.")
        elif LABEL in members:
          labels.add(_label(tar, members[LABEL]))
  if not labels:
    raise ValueError(
      f"{where}: got no label, expected a member NAME.{LABEL} beside each"
      f" image.{''.join(errors[:1])}"
    )
  classes = Classes(labels, options.classes, where)

  def split_of(split: str) -> Split:
    paths = by_split[split]
    return Split(counts[split], lambda: _entries(paths, classes, options.image))

  return Listing(classes.names, {split: split_of(split) for split in by_split})


def _entries(
  paths: list[str], classes: Classes, wanted: str | None
) -> Iterator[Entry]:
  root = os.path.commonpath(list(map(os.path.dirname, paths))) or "."
  seen = set()
  for path in paths:
    tar_name = os.path.relpath(path, root)
    for tar, name, members in _groups(path):
      if members is None:
        yield Entry(tar_name, error=name)
        continue
      key = f"{tar_name}/{name}"
      if key in seen:
        yield Entry(key, error="has the name of an earlier record")
        continue
      seen.add(key)
      try:
        yield _entry(key, tar, members, classes, wanted)
      except tars.BROKEN as e:
        yield Entry(key, error=f"cannot be read: {e}")


def _entry(
  key: str,
  tar: tarfile.TarFile,
  members: _Members,
  classes: Classes,
  wanted: str | None,
) -> Entry:
  images = [e for e in members if f".{e}".endswith(images_lib.SUFFIXES)]
  if wanted is not None:
    images = [e for e in images if e == wanted.lower().removeprefix(".")]
  if len(images) != 1:
    listed = ", ".join(members)
    return Entry(
      key,
      error=f"has {len(images)} images among {listed}; --image chooses one",
    )
  label = -1
  if LABEL in members:
    label = classes.index(_label(tar, members[LABEL]))
  if label < 0:
    return Entry(key, error=classes.missing)
  return Entry(key, _read(tar, members[images[0]]), label)


def _groups(
  path: str,
) -> Iterator[tuple[tarfile.TarFile, str, _Members | None]]:
  """Yields (tar, name, members) of the records of a tar.

  For a broken tar, the last one is (tar, error, None).
  """
  tar, count = None, 0
  try:
    with open(path, "rb") as file, tars.opened(file) as tar:
      for name, members in _records(tar):
        yield tar, name, members
        count += 1
  except tars.BROKEN as e:
    yield tar, f"is broken after {count} records: {e}", None


def _records(tar: tarfile.TarFile) -> Iterator[tuple[str, _Members]]:
  """Yields (name, members) of the records of a tar."""
  is_gzip = tars.is_gzip(tar)
  name, members = None, {}
  for member in tars.file_members(tar):
    # A name with bytes that are no text could not be written.
    member_name = member.name.encode("utf-8", "replace").decode()
    folder, base = os.path.split(member_name)
    if base.startswith("."):
      continue
    stem, _, ending = base.partition(".")
    stem = os.path.join(folder, stem)
    if stem != name and members:
      yield name, members
      members = {}
    name = stem
    members[ending.lower()] = tars.read(tar, member) if is_gzip else member
  if members:
    yield name, members


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | bytes) -> bytes:
  return member if isinstance(member, bytes) else tars.read(tar, member)


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo | bytes) -> bytes:
  """Returns the text of a label; b"" where it is broken."""
  try:
    return _read(tar, member)
  except tars.BROKEN:
    return b""
