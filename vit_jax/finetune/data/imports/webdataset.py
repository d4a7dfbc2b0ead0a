"""WebDataset tars: consecutive members with the same name are a record.

Python's tarfile reads them: the format is a few lines, and the labels, which
are needed before the images, are found from a tar's headers. The library
`webdataset` is made for streams and would add its own shuffling.

The name of a record is a member's name up to the first dot after the last
slash. The rest is the ending: that of an image (.jpg, .seg.png, ...), or
`.cls`, the label, a number or the name of a class. If names of records have
dots themselves, that of the label decides: 1.5_a.cls and 1.5_a.png are the
record 1.5_a. Hidden members, such as `._1.jpg` of macOS, are not records.
"""

import collections
import os
import tarfile
from collections.abc import Collection, Iterator

from vit_jax.data import images as images_lib
from vit_jax.finetune.data.imports import files, tars
from vit_jax.finetune.data.imports.listing import (
  Classes,
  Entry,
  Listing,
  Options,
  Split,
  check_unused,
)

IMAGES = tuple(suffix.removeprefix(".") for suffix in images_lib.SUFFIXES)
LABEL = "cls"
SUFFIXES = (".tar", ".tar.gz", ".tgz")

# Ending -> member, or its contents if the tar is compressed.
_Members = dict[str, tarfile.TarInfo | bytes]


def scan(path: str, options: Options) -> Listing:
  """Lists tars; reads all headers and labels, but no image.

  Raises:
    ValueError: There are no tars, no labels in them, no single image in any
      record, or an option is for other kinds.
  """
  why = f"webdataset:{path}, whose labels have a fixed ending"
  check_unused(options, ("label",), why)
  by_split = files.by_split(path, SUFFIXES, options, "webdataset:")
  labels, counts, broken = set(), {}, ""
  endings, chosen = collections.Counter(), collections.Counter()
  for split, paths in by_split.items():
    counts[split] = 0
    for tar_path in paths:
      for tar, name, members in _groups(tar_path):
        counts[split] += 1
        if members is None:
          broken = broken or f" {tar_path} {name}."
        if members and LABEL in members:
          labels.add(_label(tar, members[LABEL]))
        endings.update(_images(members or ()))
        chosen.update(_chosen(members or (), options.image))
  if not labels:
    raise ValueError(
      f"got tars without labels in {path}, expected a member NAME.{LABEL}"
      f" beside each image, with the number or the name of its class.{broken}"
    )
  listed = ", ".join(endings)
  if endings and not chosen:
    got = f"{options.image!r}, which is none" if options.image else "none"
    raise ValueError(
      f"--image: got {got} for webdataset:{path}, expected one ending of the"
      f" images of a record: {listed}."
    )
  classes = Classes(labels, options.classes, f"webdataset:{path}")
  rest = [f"--image={ending}" for ending in endings if ending not in chosen]
  remark = (
    f"the images are the members that end in {', '.join(chosen)}; for others:"
    f" {', '.join(rest)}"
  )

  def split_of(split: str) -> Split:
    return Split(
      counts[split], lambda: _entries(by_split[split], classes, options.image)
    )

  return Listing(
    classes.names,
    {split: split_of(split) for split in by_split},
    remarks=(remark,) if rest and not options.image else (),
  )


def _entries(
  paths: list[str], classes: Classes, wanted: str | None
) -> Iterator[Entry]:
  root = os.path.commonpath(list(map(os.path.dirname, paths)))
  seen = set()
  for path in paths:
    for tar, name, members in _groups(path):
      key = f"{os.path.relpath(path, root or '.')}/{name}"
      if members is None:
        yield Entry(os.path.relpath(path, root or "."), error=name)
        continue
      images, error = _chosen(members, wanted), ""
      if len(images) != 1:
        present = _images(members)
        error = f"has {len(present)} images"
        if len(present) > 1:
          error += f", {', '.join(present)}: --image=ENDING chooses"
      error = "has the name of an earlier record" if key in seen else error
      seen.add(key)
      try:
        label = -1
        if not error and LABEL in members:
          label = classes.index(_label(tar, members[LABEL]))
        if label < 0:
          yield Entry(key, error=error or "has no label")
        else:
          yield Entry(key, _read(tar, members[images[0]]), label)
      except tars.BROKEN as e:
        yield Entry(key, error=f"cannot be read: {e}")


def _images(endings: Collection[str]) -> list[str]:
  return [e for e in endings if e.split(".")[-1].lower() in IMAGES]


def _chosen(endings: Collection[str], wanted: str | None) -> list[str]:
  """Returns the endings that fit; only a single one is no error.

  Args:
    endings: Endings of all members of a record.
    wanted: "left.png", or "left" for any format. None for the only image, or
      the only one with a plain ending, such as .jpg beside .seg.png.

  Example:
    >>> _chosen(["jpg", "seg.png", "cls"], None)
    ['jpg']
    >>> _chosen(["left.png", "right.png", "cls"], "right")
    ['right.png']
  """
  images = _images(endings)
  if wanted is not None:
    wanted = wanted.lower().removeprefix(".")
    return [e for e in images if wanted in (e, e.rpartition(".")[0])]
  plain = [e for e in images if "." not in e]
  one = plain if len(plain) == 1 else images
  return one if len(one) == 1 else []


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
        yield tar, name, {k.lower(): v for k, v in members.items()}
        count += 1
  except tars.BROKEN as e:
    yield tar, f"is broken after {count} records: {e}", None


def _records(tar: tarfile.TarFile) -> Iterator[tuple[str, _Members]]:
  """Yields (name, members) of the records of a tar."""
  is_gzip = tars.is_gzip(tar)
  # Members with one name up to the first dot; and what the endings of a record
  # begin with if its name, which its label has shown, has more dots.
  name, members, more = None, {}, ""
  for member in tars.file_members(tar):
    # A name with bytes that are no text could not be written.
    member_name = member.name.encode("utf-8", "replace").decode()
    folder, base = os.path.split(member_name)
    if base.startswith("."):
      continue
    stem, _, ending = base.partition(".")
    stem = os.path.join(folder, stem)
    if stem != name or (more and not ending.startswith(more)):
      record, members = _divided(members, more)
      if record:
        yield f"{name}.{more[:-1]}", record
      more = ""
    if stem != name and members:
      yield name, members
      members = {}
    name = stem
    members[ending] = tars.read(tar, member) if is_gzip else member
    before, dot, last = ending.rpartition(".")
    if dot and last.lower() == LABEL:
      more = before + dot
  record, members = _divided(members, more)
  if record:
    yield f"{name}.{more[:-1]}", record
  if members:
    yield name, members


def _divided(members: _Members, more: str) -> tuple[_Members, _Members]:
  """Returns the members whose endings begin with `more`, and the others.

  The first part is a record only if it contains an image.
  """
  record = {k[len(more) :]: v for k, v in members.items() if k.startswith(more)}
  if not more or not _images(record):
    return {}, members
  return record, {k: v for k, v in members.items() if not k.startswith(more)}


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | bytes) -> bytes:
  return member if isinstance(member, bytes) else tars.read(tar, member)


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo | bytes) -> bytes:
  """Returns the text of a label; b"" where it is broken."""
  try:
    return _read(tar, member)
  except tars.BROKEN:
    return b""
