"""Images in folders, one per class: "folder:/path".

Two layouts:

  /path/cat/1.jpg, /path/dog/2.png, ...    a `train` and a `val` split are made
  /path/train/cat/1.jpg, /path/val/...     the folders are the splits

Images are the files that end in one of `images.SUFFIXES`, in any case and of
any format. Hidden files, and folders that programs make (`__MACOSX`, `@eaDir`),
are left out. Splits are `train`, `val` and `test`. Folders and configs may use
any of the names in `SPLIT_FOLDERS`, in any case.

To make splits, the files of every class are ordered by a hash of their names,
and the first 10 % (at least one, if there are two) become `val`. The hash
depends only on the name and a constant. So every machine and every run makes
the same splits, and a change in one class moves no file of another.

Files of the same bytes count as one: all are in the split of the first of them.
They are not looked for in folders of more than `MAX_FILES` files.

In a split, the images of a class are spread evenly over the records, in the
order of such a hash; copies follow each other. So a slice like train[:10%] has
all classes. `FolderSource.cut` says where to hold out the last records, with at
least one of each class.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
from typing import NamedTuple

import numpy as np

from vit_jax.data import copies, splits
from vit_jax.data.images import SUFFIXES
from vit_jax.data.source import (
  UNAVAILABLE,
  UNAVAILABLE_ERRNOS,
  Record,
  Source,
)
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.data.tf_cpu import as_bytes, tf
from vit_jax.paths import is_by_program, printable, walk

PREFIX = "folder:"
_SPLIT_OF = {name: k for k, names in SPLIT_FOLDERS.items() for name in names}
VAL_SHARE = 0.1
MAX_FILES = 100_000  # larger folders are not searched for copies
_SALT = "vit_jax folder split 0"  # the seed of the split

_Files = dict[str, list[str]]  # class -> paths
# Path -> the first path of the same bytes, for files that have copies.
_Copies = dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FolderSource(Source):
  """Files with their labels; only record numbers are shuffled.

  Attributes:
    paths: The files.
    path_labels: Their classes, int32 [num_examples].
    ranks: float64 [num_examples], falling. An image is held out if this share
      of its class is; see `cut`.
  """

  paths: tuple[str, ...]
  path_labels: np.ndarray
  ranks: np.ndarray

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

  def labels(self) -> np.ndarray:
    """See `Source`."""
    return self.path_labels

  def cut(self, share: str) -> str:
    """Returns where to cut the split, so that all classes are on both sides.

    Each class is rounded by itself: at least one image is on each side, if it
    has two or more that differ. Copies are on one side.

    Args:
      share: The part before the cut, such as "80%".

    Returns:
      A bound of a slice, such as "80.6%".
    """
    held_out = (100 - float(share.removesuffix("%"))) / 100
    first, num = int(np.sum(self.ranks > held_out)), self.num_examples
    for digits in range(12):
      percent = f"{100 * first / num:.{digits}f}"
      if round(float(percent) * num / 100.0) == first:  # as `parse_split`
        break
    return f"{percent}%"

  def record_name(self, index: int) -> str:
    """See `Source`."""
    return printable(self.paths[index])

  def identity(self) -> str:
    """See `Source`: a hash of the paths below the folder and the labels."""
    return self._identity

  @functools.cached_property
  def _identity(self) -> str:  # a second for a million paths
    root = os.path.commonprefix([min(self.paths), max(self.paths)])
    digest = hashlib.sha256(self.path_labels.tobytes())
    for path in self.paths:
      digest.update(os.fsencode(path[len(root) :]) + b"\0")
    return f"files {digest.hexdigest()[:16]}"

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
  root = pathlib.Path(dataset.removeprefix(PREFIX)).expanduser()
  root = root.absolute()
  scan = _scan(root, dataset, _stamp(root))
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


class _File(NamedTuple):
  """A record; for `rank`, see `FolderSource`."""

  path: str
  class_name: str
  rank: float


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
  records: dict[str, list[_File]]
  errors: dict[str, str]
  remarks: tuple[str, ...]


@functools.lru_cache(maxsize=2)
def _scan(root: pathlib.Path, dataset: str, stamp: tuple[int, ...]) -> _Scan:
  """Reads the names of all files, and finds those of the same bytes."""
  del stamp
  if not root.is_dir():
    raise ValueError(f"got data set {dataset!r}, but {root} is no folder.")
  names, left_out = _subfolders(root), _subfolders(root, by_programs=True)
  errors = {}
  if folders := _split_folders(root, names, dataset):
    by_split = _given_splits(folders, dataset, left_out, errors)
    same, remarks = _copies(dataset, by_split)
    files = by_split["train"]
  else:
    folders = {"train": root}
    files = _class_files(root, names, dataset, left_out)
    same, remarks = _copies(dataset, {"": files})
    by_split = _divide(files, root, same)
  remarks = [
    *_depth_remarks(folders["train"], files, dataset),
    *remarks,
    *_shared_remarks(by_split, same),
    *_left_out_remarks(dataset, left_out),
  ]
  records = {k: _ordered(files, same) for k, files in by_split.items()}
  return _Scan(tuple(files), records, errors, tuple(remarks))


def _copies(
  dataset: str, by_split: dict[str, _Files]
) -> tuple[_Copies, list[str]]:
  """Returns the files of the same bytes, and sentences on them."""
  num = sum(len(p) for files in by_split.values() for p in files.values())
  if num > MAX_FILES:
    return {}, [
      f"{dataset!r} has {num:,} files, too many to look for files of the same"
      " bytes, which may be on both sides of a split."
    ]
  class_of = {
    path: name
    for files in by_split.values()
    for name, paths in files.items()
    for path in paths
  }
  same = copies.find(list(class_of))
  found = [path for path, first in same.items() if path != first]
  if not found:
    return {}, []
  others = sum(class_of[p] != class_of[same[p]] for p in found)
  in_other = f" ({others:,} of them in another class)" * bool(others)
  return same, [
    f"{dataset!r} has {len(found):,} files with the bytes of another"
    f" file{in_other}, such as {printable(found[0])} and"
    f" {printable(same[found[0]])}. Where a folder is split automatically, the"
    " copies of an image stay together."
  ]


def _shared_remarks(by_split: dict[str, _Files], same: _Copies) -> list[str]:
  """Returns a sentence for each two splits with files of the same bytes."""
  remarks = []
  paths = {k: [*itertools.chain(*v.values())] for k, v in by_split.items()}
  for b, a in itertools.combinations(paths, 2):
    firsts = {same[path] for path in paths[b] if path in same}
    if shared := [path for path in paths[a] if same.get(path) in firsts]:
      remarks.append(
        f"{len(shared):,} of {len(paths[a]):,} images of {a!r} are also in"
        f" {b!r}, byte for byte, such as {printable(shared[0])}."
      )
  return remarks


def _depth_remarks(
  root: pathlib.Path, files: _Files, dataset: str
) -> list[str]:
  """Returns a sentence if the images of classes are at different places."""
  below = {
    f"{name}/{relative.rpartition(os.sep)[0].split(os.sep)[0]}"
    for name, paths in files.items()
    for relative in _relative(root / name, paths)
  }
  if len({path.partition("/")[2] for path in below}) == 1:
    return []
  below = sorted(path for path in below if not path.endswith("/"))
  return [
    f"{dataset!r} has images in sub-folders of its class folders, which count"
    f" as images of the class: {', '.join(map(printable, below[:3]))}"
    f"{', ...' * (len(below) > 3)}."
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
) -> dict[str, _Files]:
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
) -> _Files:
  """Returns the images of each class folder; appends others to `left_out`."""
  files = {}  # paths relative to the folder of the class
  for name in names:
    files[name], others = images_in(root / name)
    left_out += [os.path.join(name, path) for path in others]
  if len(names) < 2:
    got = f"the class folders {names}" if names else "no class folders"
    expected = "one folder of images for each of two or more classes"
    raise _error(dataset, f"with {got} in {root}", expected)
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


def _hash(path: str) -> bytes:
  # Without the folder of the data set, which may be moved.
  return hashlib.blake2b(os.fsencode(f"{_SALT}/{path}")).digest()[:16]


def _joined(folder: pathlib.Path, names: list[str]) -> list[str]:
  return [os.path.join(folder, name) for name in names]


def _relative(folder: pathlib.Path, paths: list[str]) -> list[str]:
  """Returns the paths below a folder relative to it."""
  start = len(os.path.join(folder, ""))
  return [path[start:] for path in paths]


def _units(files: _Files, same: _Copies) -> _Copies:
  """Returns, for files that are copies, the file with which they are divided.

  None if no class has two different images: nothing could be held out.
  """
  first, units = {}, {}
  for paths in files.values() if same else ():
    for path in paths:
      if path in same and (unit := first.setdefault(same[path], path)) != path:
        units[path] = unit
  counts = [sum(p not in units for p in paths) for paths in files.values()]
  return units if max(counts) > 1 else {}


def _divide(
  files: _Files, root: pathlib.Path, same: _Copies
) -> dict[str, _Files]:
  """Makes `train` and `val` from the files of each class."""
  units, held_out = _units(files, same), set()
  for name, paths in files.items():
    own = [path for path in paths if path not in units]
    hashes = [_hash(path) for path in _relative(root / name, own)]
    num_val = max(1, int(len(own) * VAL_SHARE + 0.5)) if len(own) > 1 else 0
    in_order = sorted(zip(hashes, own, strict=True))
    held_out.update(path for _, path in in_order[:num_val])
  return {
    split: {
      name: [p for p in paths if (units.get(p, p) in held_out) == is_val]
      for name, paths in files.items()
    }
    for split, is_val in (("train", False), ("val", True))
  }


def _ordered(files: _Files, same: _Copies) -> list[_File]:
  """Returns all files, those that are held out first at the end."""
  units, keys, records = _units(files, same), {}, []
  for name, paths in files.items():
    hashes = [_hash(f"{name}/{os.path.basename(path)}") for path in paths]
    in_order = sorted(zip(hashes, paths, strict=True))
    own = [(key, path) for key, path in in_order if path not in units]
    for i, (key, path) in enumerate(own):
      keys[path] = (-_rank(i, len(own)), key)
    records += [(key, path, name) for key, path in in_order]
  of_unit = lambda path: keys[units.get(path, path)]
  records.sort(key=lambda record: (of_unit(record[1]), record[0]))
  return [_File(path, name, -of_unit(path)[0]) for _, path, name in records]


def _rank(i: int, num: int) -> float:
  """Returns the share from which on image i of a class of `num` is held out.

  `share * num` images are held out, rounded, but at least the first one and at
  most all but the last one.
  """
  if i == num - 1:
    return 1.0
  return (i + 0.5) / num if i else 0.0
