"""WebDataset tars: consecutive members of one name are a record.

Python's tarfile reads them: the format is a few lines, and the labels, needed
before the images, take only a tar's headers. The library `webdataset` is
made for streams and would add its own shuffling.

A member's name up to the first dot after the last slash is the record's name;
the rest is the extension: that of an image (.jpg, .png, ...), or `.cls`, the
label, a number or the name of a class. Hidden members, such as `._1.jpg` of
macOS, are no records.
"""

import os
import tarfile
from collections.abc import Iterator

from vit_jax.data.imports import files, tars
from vit_jax.data.imports.listing import (
  Classes,
  Entry,
  Listing,
  Options,
  Split,
  check_unused,
)

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
LABEL = "cls"
SUFFIXES = (".tar", ".tar.gz", ".tgz")

# Extension -> member, or its contents if the tar is compressed.
_Members = dict[str, tarfile.TarInfo | bytes]


def scan(path: str, options: Options) -> Listing:
  """Lists tars; reads all headers and labels, but no image.

  Raises:
    ValueError: No tars, no labels in them, or an option for other kinds.
  """
  why = f"webdataset:{path}, whose images and labels have fixed endings"
  check_unused(options, ("image", "label"), why)
  by_split = files.by_split(path, SUFFIXES, options, "webdataset:")
  labels, counts = set(), {}
  for split, paths in by_split.items():
    counts[split] = 0
    for tar_path in paths:
      for tar, _, members in _groups(tar_path):
        counts[split] += 1
        if members and LABEL in members:
          labels.add(_label(tar, members[LABEL]))
  if not labels:
    raise ValueError(
      f"got tars without labels in {path}, expected a member NAME.{LABEL}"
      " beside each image, with the number or the name of its class."
    )
  classes = Classes(labels, options.classes, f"webdataset:{path}")

  def split_of(split: str) -> Split:
    return Split(counts[split], lambda: _entries(by_split[split], classes))

  return Listing(classes.names, {split: split_of(split) for split in by_split})


def _entries(paths: list[str], classes: Classes) -> Iterator[Entry]:
  root = os.path.commonpath(list(map(os.path.dirname, paths)))
  seen = set()
  for path in paths:
    for tar, name, members in _groups(path):
      key = f"{os.path.relpath(path, root or '.')}/{name}"
      if members is None:
        yield Entry(os.path.relpath(path, root or "."), error=name)
        continue
      images = [m for e, m in members.items() if e.split(".")[-1] in IMAGES]
      error = "" if len(images) == 1 else f"has {len(images)} images"
      error = "has the name of an earlier record" if key in seen else error
      seen.add(key)
      try:
        label = -1
        if not error and LABEL in members:
          label = classes.index(_label(tar, members[LABEL]))
        if label < 0:
          yield Entry(key, error=error or "has no label")
        else:
          yield Entry(key, _read(tar, images[0]), label)
      except tars.BROKEN as e:
        yield Entry(key, error=f"cannot be read: {e}")


def _groups(
  path: str,
) -> Iterator[tuple[tarfile.TarFile, str, _Members | None]]:
  """Yields (tar, name, members) of the records of a tar.

  The last one of a broken tar is (tar, error, None).
  """
  tar, name, members, count = None, None, {}, 0
  try:
    with open(path, "rb") as file, tars.opened(file) as tar:
      is_gzip = tars.is_gzip(tar)
      for member in tars.file_members(tar):
        # A name with bytes that are no text could not be written.
        member_name = member.name.encode("utf-8", "replace").decode()
        folder, base = os.path.split(member_name)
        if base.startswith("."):
          continue
        stem, _, extension = base.partition(".")
        stem = os.path.join(folder, stem)
        if stem != name and members:
          yield tar, name, members
          count += 1
          members = {}
        name = stem
        data = tars.read(tar, member) if is_gzip else member
        members[extension.lower()] = data
      if members:
        yield tar, name, members
  except tars.BROKEN as e:
    yield tar, f"is broken after {count} records: {e}", None


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | bytes) -> bytes:
  return member if isinstance(member, bytes) else tars.read(tar, member)


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo | bytes) -> bytes:
  """Returns the text of a label; b"" where it is broken."""
  try:
    return _read(tar, member)
  except tars.BROKEN:
    return b""
