"""WebDataset tars: consecutive members of one name are a record.

Read with Python's own tarfile: the format is a few lines, and the labels are
needed once before the images, for which a tar's headers are enough. The library
`webdataset` is made for streams and would add its own shuffling.

A member's name up to the first dot after the last slash is the record's, the
rest says what it is: an image by its last ending (.jpg, .png, ...), `.cls` the
label, a number or the name of a class.
"""

import gzip
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
)

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
LABEL = "cls"
SUFFIXES = (".tar", ".tar.gz", ".tgz")

# Extension -> member; of a compressed tar its contents.
_Members = dict[str, tarfile.TarInfo | bytes]


def listed(path: str, options: Options) -> Listing:
  """Lists tars; reads all headers and labels, but no image.

  Raises:
    ValueError: No tars, or no labels in them.
  """
  by_split = files.by_split(path, SUFFIXES, options, "webdataset:")
  labels, counts = set(), {}
  for split, paths in by_split.items():
    counts[split] = 0
    for tar_path in paths:
      for tar, _, members in _groups(tar_path):
        counts[split] += 1
        if members and LABEL in members:
          labels.add(_read(tar, members[LABEL]))
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
        yield Entry(os.path.relpath(path, root or "."), fault=name)
        continue
      images = [m for e, m in members.items() if e.split(".")[-1] in IMAGES]
      fault = "" if len(images) == 1 else f"has {len(images)} images"
      label = -1
      if not fault and LABEL in members:
        label = classes.index(_read(tar, members[LABEL]))
      if key in seen:
        fault = "has the name of an earlier record"
      seen.add(key)
      if fault or label < 0:
        yield Entry(key, fault=fault or "has no label")
      else:
        yield Entry(key, _read(tar, images[0]), label)


def _groups(
  path: str,
) -> Iterator[tuple[tarfile.TarFile, str, _Members | None]]:
  """Yields (tar, name, members) of the records of a tar.

  Where the tar is broken, the last one is (tar, what is wrong, None).
  """
  tar, name, members, count = None, None, {}, 0
  try:
    with tarfile.open(path) as tar:
      # To go back to a member, gzip would begin at the start of the file again.
      is_gzip = isinstance(tar.fileobj, gzip.GzipFile)
      for member in tars.files(tar):
        folder, base = os.path.split(member.name)
        stem, _, extension = base.partition(".")
        stem = os.path.join(folder, stem)
        if stem != name and members:
          yield tar, name, members
          count += 1
          members = {}
        name = stem
        members[extension.lower()] = _read(tar, member) if is_gzip else member
      if members:
        yield tar, name, members
  except tars.BROKEN as e:
    yield tar, f"is broken after {count} records: {e}", None


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | bytes) -> bytes:
  return member if isinstance(member, bytes) else tar.extractfile(member).read()
