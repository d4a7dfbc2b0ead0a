"""Images in folders, one per class: "folder:/path".

Two layouts:

  /path/cat/1.jpg, /path/dog/2.png, ...    a `train` and a `val` split are made
  /path/train/cat/1.jpg, /path/val/...     the folders are the splits

Images are the files that end in one of `images.SUFFIXES`, in any case and of
any format. Hidden files, and folders that programs make (`__MACOSX`, `@eaDir`),
are left out. Splits are `train`, `val` and `test`. Folders and configs may use
any of the names in `SPLIT_FOLDERS`, in any case.

`vit_jax.data.listed` makes splits, and says how copies are divided. With
"folder:/path?group=PATTERN", files in whose names the regular expression
PATTERN finds the same text are on one side of every split, too: a patient, a
video. The names are those below the class folders; if PATTERN has a group in
brackets, that part of the text counts.
"""

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
from typing import NamedTuple

import numpy as np

from vit_jax.data import listed, splits
from vit_jax.data.images import SUFFIXES
from vit_jax.data.listed import Files, Listed
from vit_jax.data.source import (
  UNAVAILABLE,
  UNAVAILABLE_ERRNOS,
  Record,
)
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.data.tf_cpu import as_bytes, tf
from vit_jax.paths import (
  is_by_program,
  printable,
  walk,
  with_options,
)

PREFIX = "folder:"
_TABLES = (".csv", ".tsv", ".parquet")
_SPLIT_OF = {name: k for k, names in SPLIT_FOLDERS.items() for name in names}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FolderSource(Listed):
  """Files with their labels; `paths` are the files."""

  @functools.cached_property
  def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.init_scope():  # the first use may be inside a traced function
      paths = [os.fsencode(path) for path in self.paths]
      return tf.constant(paths), tf.constant(self.path_labels)

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    path, label = self._file(raw)
    image = tf.io.read_file(path)
    return {"image": image, "label": label, "index": raw["index"]}

  def rescue(self, raw: Record) -> Record:
    """See `Source`."""
    path, label = self._file(raw)
    image, error = tf.numpy_function(
      lambda path: _read(as_bytes(path)),
      [path],
      [tf.string, tf.string],
      stateful=False,
    )
    record = {"image": image, "error": error}
    record = {k: tf.ensure_shape(v, []) for k, v in record.items()}
    return {**record, "label": label, "index": raw["index"]}

  def stamp(self) -> str:
    """See `Source`: a hash of paths, sizes, times of change and labels."""
    digest = hashlib.sha256(self.path_labels.tobytes())
    for path in self.paths:
      try:
        stat = os.stat(path)
        state = f"{stat.st_size} {stat.st_mtime_ns}"
      except OSError as e:
        state = str(e.errno)
      digest.update(os.fsencode(path) + f"\0{state}\0".encode())
    return digest.hexdigest()

  def _file(self, raw: Record) -> tuple[tf.Tensor, tf.Tensor]:
    paths, labels = self._tensors
    return tf.gather(paths, raw["index"]), tf.gather(labels, raw["index"])


def _read(path: bytes) -> tuple[bytes, bytes]:
  """Returns the bytes of a file, and b"" or why there are none."""
  try:
    with open(path, "rb") as file:
      return file.read(), b""
  except OSError as e:
    reason, number = e.strerror or str(e), e.errno
  if number in UNAVAILABLE_ERRNOS:
    return b"", UNAVAILABLE + f": {printable(path)}: {reason}".encode()
  if os.path.islink(path) and not os.path.exists(path):
    target = printable(os.readlink(path))
    return b"", f"is a link to {target}, which does not exist.".encode()
  return b"", f"cannot be read: {reason}.".encode()


def open_folder(dataset: str, split: str, data_dir: str | None) -> FolderSource:
  """Opens "folder:/path"; the path may be relative to the working directory.

  Raises:
    ValueError: The folder does not exist, has no class folders or only one, a
      class without images, a class with folders but no images, classes that
      differ between splits, or two folders for one split; or the split is
      unknown. Errors in the folder of another split are not raised.
  """
  del data_dir
  name, options = with_options(dataset, ("group",))
  root = pathlib.Path(name.removeprefix(PREFIX)).expanduser().absolute()
  scan = _scan(root, dataset, options.get("group"), _stamp(root))
  for part in split.split("+"):
    name = part.partition("[")[0].strip()
    if error := scan.errors.get(_SPLIT_OF.get(name.lower(), name)):
      raise ValueError(error)
  sizes = {k: len(r) for k, r in scan.records.items()}
  spans = splits.parse_split(split, sizes, synonyms=_SPLIT_OF)
  records = []
  for span in spans:
    records += scan.records[span.split][span.start : span.stop]
  label_of = {name: i for i, name in enumerate(scan.class_names)}
  return FolderSource(
    name=dataset,
    split=split,
    num_examples=len(records),
    num_classes=len(scan.class_names),
    class_names=tuple(map(printable, scan.class_names)),
    remark=" ".join(scan.remarks),
    paths=tuple(r.path for r in records),
    path_labels=np.array([label_of[r.class_name] for r in records], np.int32),
    ranks=np.array([r.rank for r in records]),
  )


def _stamp(root: pathlib.Path) -> tuple[int, ...]:
  """Returns the times of change of the folders; a scan is valid until then."""
  if not root.is_dir():
    return ()
  folders = [root, *(root / name for name in _subfolders(root))]
  for folder in folders[1:]:
    if folder.name.lower() in _SPLIT_OF:
      folders += [folder / name for name in _subfolders(folder)]
  return tuple(folder.stat().st_mtime_ns for folder in folders)


def _error(dataset: str, got: str, expected: str) -> ValueError:
  return ValueError(f"got data set {dataset!r} {got}, expected {expected}.")


class _Scan(NamedTuple):
  """The contents of a folder.

  class_names: The names of the classes.
  records: Split -> its records.
  errors: Split -> why its folder cannot be used.
  remarks: Sentences for the user.
  """

  class_names: tuple[str, ...]
  records: dict[str, list[listed.Item]]
  errors: dict[str, str]
  remarks: tuple[str, ...]


@functools.lru_cache(maxsize=2)
def _scan(
  root: pathlib.Path, dataset: str, group: str | None, stamp: tuple[int, ...]
) -> _Scan:
  """Reads the names of all files, and finds those of the same bytes."""
  del stamp
  if not root.is_dir():
    raise ValueError(f"got data set {dataset!r}, but {root} is no folder.")
  names, left_out = _subfolders(root), _subfolders(root, by_programs=True)
  errors = {}
  if folders := _split_folders(root, names, dataset):
    by_split = _given_splits(folders, dataset, left_out, errors)
    files = by_split["train"]
  else:
    folders = {listed.WHOLE: root}
    files = _class_files(root, names, dataset, left_out)
    by_split = {listed.WHOLE: files}
  groups = _groups(folders, by_split, group) if group else {}
  division = listed.arranged(
    dataset, by_split, lambda name, path: _below(root / name, path), groups
  )
  remarks = [
    *_table_remarks(root, dataset),
    *_depth_remarks(next(iter(folders.values())), files, dataset),
    *listed.missing_remarks(files, dataset),
    *division.remarks,
    *_left_out_remarks(dataset, left_out),
  ]
  return _Scan(tuple(files), division.items, errors, tuple(remarks))


def _groups(
  folders: dict[str, pathlib.Path], by_split: dict[str, Files], pattern: str
) -> dict[str, str]:
  """Returns the group of each file, see the top of this module.

  Raises:
    ValueError: The pattern is no regular expression, or finds nothing in a
      file's name.
  """
  try:
    find = re.compile(pattern).search
  except re.error as e:
    raise ValueError(
      f"group: got {pattern!r}, expected a regular expression: {e}."
    ) from None
  groups = {}
  for split, files in by_split.items():
    for name, paths in files.items():
      for path in paths:
        below = _below(folders[split] / name, path)
        if (match := find(below)) is None:
          raise ValueError(
            f"group: got {pattern!r}, which is not in {printable(below)!r},"
            " expected a pattern that is in the name of every file."
          )
        groups[path] = match[match.lastindex or 0]
  return groups


def _depth_remarks(root: pathlib.Path, files: Files, dataset: str) -> list[str]:
  """Returns a sentence if the images of classes are at different places."""
  below = {
    f"{name}/{_below(root / name, path).rpartition(os.sep)[0].split(os.sep)[0]}"
    for name, paths in files.items()
    for path in paths
  }
  if len({path.partition("/")[2] for path in below}) == 1:
    return []
  below = sorted(path for path in below if not path.endswith("/"))
  return [
    f"{dataset!r} has images in sub-folders of its class folders, which count"
    f" as images of the class: {', '.join(map(printable, below[:3]))}"
    f"{', ...' * (len(below) > 3)}."
  ]


def _table_remarks(root: pathlib.Path, dataset: str) -> list[str]:
  """Returns a sentence if the classes may be in a table instead."""
  names = sorted(os.listdir(root))
  tables = [name for name in names if name.lower().endswith(_TABLES)]
  if not tables:
    return []
  return [
    f"{dataset!r} has {', '.join(map(printable, tables))}, which is not read:"
    " the names of the folders are the classes. To read the classes of a table,"
    " give its path."
  ]


def _left_out_remarks(dataset: str, left_out: list[str]) -> list[str]:
  """Returns a sentence about files of the folder that are not read, if any."""
  if not left_out:
    return []
  first = ", ".join(map(printable, left_out[:3]))
  return [
    f"{dataset!r} has {len(left_out):,} files or folders that are not read,"
    " since they are hidden, made by programs, or end in none of"
    f" {', '.join(SUFFIXES)}: {first}"
    f"{', ...' * (len(left_out) > 3)}"
  ]


def _split_folders(
  root: pathlib.Path, names: list[str], dataset: str
) -> dict[str, pathlib.Path]:
  """Returns the folder of each split; {} if the folders are classes.

  The folders are splits if one of them has a name of `train`. The exception is
  a class of that name: a folder without folders, beside others without names of
  splits.
  """
  by_split = collections.defaultdict(list)
  for name in names:
    if split := _SPLIT_OF.get(name.lower()):
      by_split[split].append(root / name)
  if "train" not in by_split:
    return {}
  others = len(names) - sum(map(len, by_split.values()))
  if others and not _subfolders(by_split["train"][0]):
    return {}
  for split, folders in by_split.items():
    if len(folders) > 1:
      got = f"with {' and '.join(map(str, folders))}"
      raise _error(dataset, got, f"one folder for {split!r}")
  return {k: by_split[k][0] for k in SPLIT_FOLDERS if k in by_split}


def _given_splits(
  folders: dict[str, pathlib.Path],
  dataset: str,
  left_out: list[str],
  errors: dict[str, str],
) -> dict[str, Files]:
  """Returns the files of each split; adds errors of others than `train`."""
  train = folders["train"]
  to_split = f"To split it automatically, use {PREFIX}{train}"
  if len(folders) == 1:
    beside = f"{train.parent / 'val'} beside it. {to_split}"
    raise _error(dataset, f"with {train} alone", beside)
  by_split = {}
  for split, folder in folders.items():
    hidden = _subfolders(folder, by_programs=True)
    left_out += [f"{folder.name}/{name}" for name in hidden]
    try:
      files = _class_files(folder, _subfolders(folder), dataset, left_out)
    except ValueError as e:
      if split == "train":
        raise
      errors[split] = f"{e} {to_split}."
      continue
    classes = by_split.get("train", files)
    if extra := sorted(files.keys() - classes.keys()):
      got = f"with {folder / extra[0]}"
      errors[split] = str(_error(dataset, got, f"a class of {train}"))
      continue
    by_split[split] = files
  return by_split


def _class_files(
  root: pathlib.Path, names: list[str], dataset: str, left_out: list[str]
) -> Files:
  """Returns the images of each class folder; appends others to `left_out`."""
  files = {}  # paths relative to the folder of the class
  for name in names:
    files[name], others = images_in(root / name)
    left_out += [os.path.join(name, path) for path in others]
  if len(names) < 2:
    got = f"the class folders {names}" if names else "no class folders"
    expected = "one folder of images for each of two or more classes"
    got += f" in {root}"
    names = sorted(e.name for e in os.scandir(root) if e.is_file())
    if loose := sum(name.lower().endswith(SUFFIXES) for name in names):
      got += f", but {loose:,} loose images"
    if tables := [name for name in names if name.lower().endswith(_TABLES)]:
      table = min(tables, key=lambda name: "train" not in name.lower())
      expected += f", or the file of the labels: path={root / table}"
    raise _error(dataset, f"with {got}", expected)
  empty = [name for name in names if not files[name]]
  levels = {path.split(os.sep)[0] for paths in files.values() for path in paths}
  # In Tiny ImageNet, the images of each class are in its folder `images`.
  is_deep = not any(map(_has_own_images, files.values())) and len(levels) > 1
  if len(empty) < len(names) and is_deep:
    got = f"with only folders in {root / names[0]} and the others"
    raise _error(dataset, got, "the images of a class in each")
  if empty:
    got = f"without images in {len(empty)} folders, such as {root / empty[0]}"
    raise _error(dataset, got, f"files {', '.join(SUFFIXES)}")
  return {name: _joined(root / name, files[name]) for name in names}


def _has_own_images(images: list[str]) -> bool:
  """Whether some of the files are not in a sub-folder."""
  return any(os.sep not in path for path in images)


def _subfolders(root: pathlib.Path, by_programs: bool = False) -> list[str]:
  """Returns the folders that users made in a folder, or those of programs."""
  with os.scandir(root) as entries:
    names = [e.name for e in entries if e.is_dir()]
  return sorted(name for name in names if is_by_program(name) == by_programs)


def images_in(root: pathlib.Path) -> tuple[list[str], list[str]]:
  """Returns the images in a folder, at any depth, and the other files.

  A broken link is among the images, so that it is named and counted. Hidden
  files, and folders that programs make, are among the others.
  """
  images, others = [], []
  for folder, below, names in walk(root):
    hidden = [name for name in below if is_by_program(name)]
    below[:] = [name for name in below if name not in hidden]
    relative = os.path.relpath(folder, root)
    for name in (*hidden, *names):
      is_image = not name.startswith(".") and name.lower().endswith(SUFFIXES)
      path = os.path.normpath(os.path.join(relative, name))
      (images if is_image else others).append(path)
  return sorted(images), sorted(others)


def _joined(folder: pathlib.Path, names: list[str]) -> list[str]:
  return [os.path.join(folder, name) for name in names]


def _below(folder: pathlib.Path, path: str) -> str:
  """Returns a path below a folder relative to it."""
  return path[len(os.path.join(folder, "")) :]
