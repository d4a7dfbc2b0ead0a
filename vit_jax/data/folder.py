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

The records of a split are in the order of such a hash, too, so that a slice
like train[:10%] has all classes, as in TFDS.
"""

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib

import numpy as np

from vit_jax.data import splits
from vit_jax.data.images import SUFFIXES
from vit_jax.data.source import (
  UNAVAILABLE,
  UNAVAILABLE_ERRNOS,
  Record,
  Source,
)
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.data.tf_cpu import as_bytes, tf
from vit_jax.options import nearest
from vit_jax.paths import is_by_program, printable, walk

PREFIX = "folder:"
_SPLIT_OF = {name: k for k, names in SPLIT_FOLDERS.items() for name in names}
VAL_SHARE = 0.1
_SALT = "vit_jax folder split 0"  # the seed of the split

_Files = dict[str, list[str]]  # class -> paths relative to the class's folder


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FolderSource(Source):
  """Files with their labels; only record numbers are shuffled."""

  paths: tuple[str, ...]
  path_labels: np.ndarray  # int32 [num_examples]

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
      unknown.
  """
  del data_dir
  root = pathlib.Path(dataset.removeprefix(PREFIX)).expanduser()
  root = root.absolute()
  class_names, by_split, left_out = _scan(root, dataset, _stamp(root))
  sizes = {k: len(r) for k, r in by_split.items()}
  spans = splits.parse_split(split, sizes, synonyms=_SPLIT_OF)
  records = []
  for span in spans:
    records += by_split[span.split][span.start : span.stop]
  label_of = {name: i for i, name in enumerate(class_names)}
  return FolderSource(
    name=dataset,
    split=split,
    num_examples=len(records),
    num_classes=len(class_names),
    class_names=tuple(map(printable, class_names)),
    remark=_remark(dataset, left_out),
    paths=tuple(path for path, _ in records),
    path_labels=np.array([label_of[c] for _, c in records], np.int32),
  )


def _remark(dataset: str, left_out: tuple[str, ...]) -> str:
  """Returns a text about files of the folder that are not read, or ""."""
  if not left_out:
    return ""
  first = ", ".join(map(printable, left_out[:3]))
  return (
    f"{dataset!r} has {len(left_out):,} files or folders that are not read,"
    " since they are hidden, made by programs, or end in none of"
    f" {', '.join(SUFFIXES)}: {first}"
    f"{', ...' * (len(left_out) > 3)}"
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


@functools.lru_cache(maxsize=2)
def _scan(root: pathlib.Path, dataset: str, stamp: tuple[int, ...]):
  """Reads the names of all files.

  Returns:
    The names of the classes; for each split (path, class) of its records; the
    files that are no records, and folders that are skipped.
  """
  del stamp
  if not root.is_dir():
    raise ValueError(
      f"got data set {dataset!r}, but {root} is no folder; expected"
      " one folder of images per class in it."
    )
  names, left_out = _subfolders(root), _subfolders(root, by_programs=True)
  if folders := _split_folders(root, names, dataset):
    class_names, by_split = _given_splits(folders, dataset, left_out)
  else:
    files = _class_files(root, names, dataset, left_out)
    class_names, by_split = tuple(files), _divide(root, files)
  records = {k: _ordered(files) for k, files in by_split.items()}
  return class_names, records, tuple(left_out)


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
      raise ValueError(
        f"got data set {dataset!r} with the folders"
        f" {' and '.join(map(str, folders))}, which mean the same split,"
        f" {split!r}; expected one of them. Join them, or move others away."
      )
  return {k: by_split[k][0] for k in SPLIT_FOLDERS if k in by_split}


def _given_splits(
  folders: dict[str, pathlib.Path], dataset: str, left_out: list[str]
) -> tuple[tuple[str, ...], dict[str, _Files]]:
  """Returns the names of the classes, and the files of each split."""
  train = folders["train"]
  if len(folders) == 1:
    others = ", ".join((*SPLIT_FOLDERS["val"][1:], *SPLIT_FOLDERS["test"]))
    raise ValueError(
      f"got data set {dataset!r} with {train} but no split to score; expected"
      f" {train.parent / 'val'} beside it (or {others}, in any case). To split"
      f" {train.name} automatically, use {PREFIX}{train}."
    )
  for folder in folders.values():
    hidden = _subfolders(folder, by_programs=True)
    left_out += [f"{folder.name}/{name}" for name in hidden]
  by_split = {
    split: _class_files(folder, _subfolders(folder), dataset, left_out)
    for split, folder in folders.items()
  }
  class_names = tuple(by_split["train"])
  for split, files in by_split.items():
    for extra in sorted(set(files) - set(class_names)):
      raise ValueError(
        f"got data set {dataset!r} with the class folder"
        f" {folders[split] / extra}, expected a class of"
        f" {train}.{nearest(extra, class_names)}"
      )
  return class_names, {
    split: {c: _joined(folders[split] / c, names) for c, names in files.items()}
    for split, files in by_split.items()
  }


def _class_files(
  root: pathlib.Path, names: list[str], dataset: str, left_out: list[str]
) -> _Files:
  """Returns the images of each class folder; appends others to `left_out`."""
  files = {}
  for name in names:
    files[name], others = _images_in(root / name)
    left_out += [os.path.join(name, path) for path in others]
  if len(names) < 2:
    loose = any(p.suffix.lower() in SUFFIXES for p in root.iterdir())
    got = (
      f"only one class folder, {names[0]!r}" if names else "no class folders"
    )
    raise ValueError(
      f"got data set {dataset!r} with {got}"
      f"{', but with loose images' * loose} in {root}; expected one folder of"
      f" images per class, and at least two classes.{_hint(root, files)}"
    )
  empty = [name for name in names if not files[name]]
  if len(empty) < len(names) and not any(map(_has_own_images, files.values())):
    raise ValueError(
      f"got data set {dataset!r} whose class folders in {root}"
      f" ({', '.join(names[:4])}{', ...' * (len(names) > 4)}) have no images of"
      " their own, only folders; expected the images of a class in its"
      f" folder.{_hint(root, files)}"
    )
  if empty:
    more = f" and {len(empty) - 1} more" * (len(empty) > 1)
    raise ValueError(
      f"got data set {dataset!r} whose class folder {root / empty[0]}{more}"
      f" has no images; expected files named {', '.join(SUFFIXES)} (in any"
      " case). Add images or remove the folder."
    )
  return files


def _has_own_images(images: list[str]) -> bool:
  """Whether some of the files are not in a sub-folder."""
  return any(os.sep not in path for path in images)


def _hint(root: pathlib.Path, files: _Files) -> str:
  """Returns a hint to the folder that probably has the class folders.

  Args:
    root: The folder from the user.
    files: Its folders, and the images in each.
  """
  for suffix, prefix in ((".tar", "webdataset:"), (".parquet", "parquet:")):
    if not files and any(root.glob(f"*{suffix}")):
      return (
        f" It has {suffix} files: to import them, run"
        f" vit-jax prepare {prefix}{root} --name=NAME."
      )
  while files and not any(map(_has_own_images, files.values())):
    root = root / max(files, key=lambda name: len(files[name]))
    files = {name: _images_in(root / name)[0] for name in _subfolders(root)}
    is_split = any(name.lower() in SPLIT_FOLDERS["train"] for name in files)
    if is_split or (
      len(files) > 1 and any(map(_has_own_images, files.values()))
    ):
      return f" Did you mean {PREFIX}{root}?"
  return ""


def _subfolders(root: pathlib.Path, by_programs: bool = False) -> list[str]:
  """Returns the folders that users made in a folder, or those of programs."""
  with os.scandir(root) as entries:
    names = [e.name for e in entries if e.is_dir()]
  return sorted(name for name in names if is_by_program(name) == by_programs)


def _images_in(root: pathlib.Path) -> tuple[list[str], list[str]]:
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
  return hashlib.blake2b(os.fsencode(f"{_SALT}/{path}")).digest()


def _joined(folder: pathlib.Path, names: list[str]) -> list[str]:
  return [os.path.join(folder, name) for name in names]


def _divide(root: pathlib.Path, files: _Files) -> dict[str, _Files]:
  """Makes `train` and `val` from the files of each class."""
  by_split = collections.defaultdict(dict)
  for name, relative in files.items():
    paths = sorted(relative, key=_hash)
    num_val = 0
    if len(paths) > 1:
      num_val = max(1, int(len(paths) * VAL_SHARE + 0.5))
    by_split["train"][name] = _joined(root / name, paths[num_val:])
    by_split["val"][name] = _joined(root / name, paths[:num_val])
  return dict(by_split)


def _ordered(files: _Files) -> list[tuple[str, str]]:
  """Returns (path, class) of all files, in the order of a hash."""
  records = [(path, name) for name, paths in files.items() for path in paths]
  return sorted(
    records, key=lambda r: _hash("/".join([r[1], os.path.basename(r[0])]))
  )
