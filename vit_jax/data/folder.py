"""Images in folders, one per class: "folder:/path".

Two layouts:

  /path/cat/1.jpg, /path/dog/2.png, ...    a `train` and a `val` split are made
  /path/train/cat/1.jpg, /path/val/...     the folders are the splits

Images are the files that end in one of `images.SUFFIXES`, in any case, whatever
their format is; hidden files are left out. Splits are `train`, `val` and
`test`. Folders, and the splits in a config, may have any of the names in
`SPLIT_FOLDERS` instead, in any case.

Where splits are made, the files of every class are ordered by a hash of their
names, and the first 10 % (at least one, if there are two) become `val`. The
hash depends on nothing but the name and a constant, so every machine and every
run makes the same splits, and a change in one class moves no file of another.

Within a split the records are in the order of such a hash as well: a slice like
train[:10%] then has all classes, as it does in TFDS.
"""

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib

import numpy as np

from vit_jax.data import encoded, file_bytes, splits
from vit_jax.data.file_bytes import path_bytes, printable
from vit_jax.data.images import SUFFIXES
from vit_jax.data.source import Record, Source
from vit_jax.data.splits import SPLIT_FOLDERS
from vit_jax.data.tf_cpu import tf
from vit_jax.options import nearest

PREFIX = "folder:"
_SPLIT_OF = {name: k for k, names in SPLIT_FOLDERS.items() for name in names}
VAL_SHARE = 0.1
_SALT = "vit_jax folder split 0"  # The seed of the split.

_Files = dict[str, list[str]]  # Class -> paths relative to the class's folder.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FolderSource(Source):
  """Files with their labels; only record numbers are shuffled."""

  paths: tuple[str, ...]
  path_labels: np.ndarray  # int32 [num_examples]
  left_out: tuple[str, ...] = ()  # files of the folder that are no records

  @functools.cached_property
  def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.init_scope():  # The first use may be inside a traced function.
      paths = [path_bytes(path) for path in self.paths]
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
      lambda path: file_bytes.read(encoded.as_bytes(path)),
      [path],
      [tf.string, tf.string],
      stateful=False,
    )
    record = {"image": image, "fault": error}
    record = {k: tf.ensure_shape(v, []) for k, v in record.items()}
    return {**record, "label": label, "index": raw["index"]}

  def labels(self) -> np.ndarray:
    """See `Source`."""
    return self.path_labels

  def record_name(self, index: int) -> str:
    """See `Source`."""
    return printable(self.paths[index])

  def identity(self) -> str:
    """See `Source`: of the paths below the folder, and the labels."""
    return self._identity

  @functools.cached_property
  def _identity(self) -> str:  # a second for a million paths
    root = os.path.commonprefix([min(self.paths), max(self.paths)])
    found = hashlib.sha256(self.path_labels.tobytes())
    for path in self.paths:
      found.update(path_bytes(path[len(root) :]) + b"\0")
    return f"files {found.hexdigest()[:16]}"

  def note(self) -> str:
    """See `Source`: says which files of the folder are not read."""
    if not self.left_out:
      return ""
    first = ", ".join(map(printable, self.left_out[:3]))
    return (
      f"{self.name!r} has {len(self.left_out):,} files that are not read, since"
      f" they are hidden or end in none of {', '.join(SUFFIXES)}: {first}"
      f"{', ...' * (len(self.left_out) > 3)}"
    )

  def _file(self, raw: Record) -> tuple[tf.Tensor, tf.Tensor]:
    paths, labels = self._tensors
    return tf.gather(paths, raw["index"]), tf.gather(labels, raw["index"])


def open_folder(dataset: str, split: str, data_dir: str | None) -> FolderSource:
  """Opens "folder:/path"; a relative path is relative to the working directory.

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
    left_out=left_out,
    paths=tuple(path for path, _ in records),
    path_labels=np.array([label_of[c] for _, c in records], np.int32),
  )


def _stamp(root: pathlib.Path) -> tuple[int, ...]:
  """Returns when the folders changed; until they change, one scan is enough."""
  if not root.is_dir():
    return ()
  folders = [root, *(root / name for name in _subfolders(root))]
  for folder in folders[1:]:
    if folder.name.lower() in _SPLIT_OF:
      folders += [folder / name for name in _subfolders(folder)]
  return tuple(folder.stat().st_mtime_ns for folder in folders)


@functools.lru_cache(maxsize=2)
def _scan(root: pathlib.Path, dataset: str, stamp: tuple[int, ...]):
  """Returns what an open folder consists of.

  Returns:
    The names of the classes; for each split, (path, class) of its records; and
    the files that are no records.
  """
  del stamp
  if not root.is_dir():
    raise ValueError(
      f"got data set {dataset!r}, but {root} is no folder; expected"
      " one folder of images per class in it."
    )
  names, left_out = _subfolders(root), []
  if found := _split_folders(root, names, dataset):
    class_names, by_split = _given_splits(found, dataset, left_out)
  else:
    files = _class_files(root, names, dataset, left_out)
    class_names, by_split = tuple(files), _divide(root, files)
  records = {k: _ordered(files) for k, files in by_split.items()}
  return class_names, records, tuple(left_out)


def _split_folders(
  root: pathlib.Path, names: list[str], dataset: str
) -> dict[str, pathlib.Path]:
  """Returns the folder of each split; none where the folders are classes.

  The folders are splits if one of them has a name of `train`. The exception is
  a data set with a class of such a name: that folder has no folders in it, and
  not all others have names of splits.
  """
  found = collections.defaultdict(list)
  for name in names:
    if split := _SPLIT_OF.get(name.lower()):
      found[split].append(root / name)
  others = len(names) - sum(map(len, found.values()))
  if "train" not in found or (others and not _subfolders(found["train"][0])):
    return {}
  for split, folders in found.items():
    if len(folders) > 1:
      raise ValueError(
        f"got data set {dataset!r} with the folders"
        f" {' and '.join(map(str, folders))}, which mean the same split,"
        f" {split!r}; expected one of them. Join them, or move others away."
      )
  return {split: found[split][0] for split in SPLIT_FOLDERS if split in found}


def _given_splits(
  found: dict[str, pathlib.Path], dataset: str, left_out: list[str]
):
  train = found["train"]
  if len(found) == 1:
    raise ValueError(
      f"got data set {dataset!r} with {train} but no split to score; expected"
      f" {train.parent / 'val'} beside it (or {_others()}). To have one made,"
      f" name the folder of the classes: {PREFIX}{train}."
    )
  by_split = {
    split: _class_files(folder, _subfolders(folder), dataset, left_out)
    for split, folder in found.items()
  }
  class_names = tuple(by_split["train"])
  for split, files in by_split.items():
    for extra in sorted(set(files) - set(class_names)):
      raise ValueError(
        f"got data set {dataset!r} with the class folder"
        f" {found[split] / extra}, expected a class of"
        f" {train}.{nearest(extra, class_names)}"
      )
  return class_names, {
    split: {c: _full(found[split] / c, names) for c, names in files.items()}
    for split, files in by_split.items()
  }


def _others() -> str:
  names = (*SPLIT_FOLDERS["val"][1:], *SPLIT_FOLDERS["test"])
  return f"{', '.join(names)}, in any case"


def _class_files(
  root: pathlib.Path, names: list[str], dataset: str, left_out: list[str]
) -> _Files:
  """Returns the images of each class folder, sub-folders included.

  Appends to `left_out` what else is there.
  """
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
      f" images per class, and at least two classes.{_meant(root, files)}"
    )
  empty = [name for name in names if not files[name]]
  if len(empty) < len(names) and not any(map(_own, files.values())):
    raise ValueError(
      f"got data set {dataset!r} whose class folders in {root}"
      f" ({', '.join(names[:4])}{', ...' * (len(names) > 4)}) hold no images of"
      " their own, only folders; expected the images of a class in its"
      f" folder.{_meant(root, files)}"
    )
  if empty:
    more = f" and {len(empty) - 1} more" * (len(empty) > 1)
    raise ValueError(
      f"got data set {dataset!r} whose class folder {root / empty[0]}{more}"
      f" holds no images; expected files named {', '.join(SUFFIXES)} (in any"
      " case). Add images or remove the folder."
    )
  return files


def _own(images: list[str]) -> bool:
  """Whether some files are in the folder itself, not in a folder below."""
  return any(os.sep not in path for path in images)


def _meant(root: pathlib.Path, files: _Files) -> str:
  """Returns a hint at the folder below that probably has the class folders.

  Args:
    root: The folder that the user gave.
    files: Its folders, and the images in each.
  """
  for suffix, prefix in ((".tar", "webdataset:"), (".parquet", "parquet:")):
    if not files and any(root.glob(f"*{suffix}")):
      return (
        f" It holds {suffix} files: to import them, run"
        f" vit-jax prepare {prefix}{root} --name=NAME."
      )
  while files and not any(map(_own, files.values())):
    root = root / max(files, key=lambda name: len(files[name]))
    files = {name: _images_in(root / name)[0] for name in _subfolders(root)}
    is_split = any(name.lower() in SPLIT_FOLDERS["train"] for name in files)
    if is_split or (len(files) > 1 and any(map(_own, files.values()))):
      return f" Did you mean {PREFIX}{root}?"
  return ""


def _subfolders(root: pathlib.Path) -> list[str]:
  with os.scandir(root) as entries:
    return sorted(
      e.name for e in entries if e.is_dir() and not e.name.startswith(".")
    )


def _images_in(root: pathlib.Path) -> tuple[list[str], list[str]]:
  """Returns the images in a folder, at any depth, and the other files.

  A link that leads nowhere is among the images, so that it is named and
  counted. Hidden files and folders are among the others, and so are pipes and
  devices, which reading might wait for, and links to a folder around them.
  """
  found, others = [], []

  def walk(folder: str, relative: str, above: tuple[os.stat_result, ...]):
    try:
      above = (*above, os.stat(folder))
      with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda e: e.name)
    except OSError as e:
      raise ValueError(
        f"got the folder {printable(folder)}, which cannot be opened:"
        f" {e.strerror or e}."
      ) from None
    for entry in entries:
      path = os.path.join(relative, entry.name)
      is_image = entry.name.lower().endswith(SUFFIXES)
      if entry.name.startswith("."):
        others.append(path)
      elif os.path.isdir(entry.path):
        is_loop = entry.is_symlink() and any(
          os.path.samestat(os.stat(entry.path), other) for other in above
        )
        if is_loop:
          others.append(path)
        else:
          walk(entry.path, path, above)
      elif is_image and (entry.is_file() or not os.path.exists(entry.path)):
        found.append(path)
      else:
        others.append(path)

  walk(str(root), "", ())
  return sorted(found), others


def _hash(path: str) -> bytes:
  # The hash is of class and file name, not of the path of the folder.
  return hashlib.blake2b(path_bytes(f"{_SALT}/{path}")).digest()


def _full(folder: pathlib.Path, names: list[str]) -> list[str]:
  return [os.path.join(folder, name) for name in names]


def _divide(root: pathlib.Path, files: _Files) -> dict[str, _Files]:
  """Makes `train` and `val` from the files of each class."""
  by_split = collections.defaultdict(dict)
  for name, relative in files.items():
    paths = sorted(relative, key=_hash)
    num_val = 0
    if len(paths) > 1:
      num_val = max(1, int(len(paths) * VAL_SHARE + 0.5))
    by_split["train"][name] = _full(root / name, paths[num_val:])
    by_split["val"][name] = _full(root / name, paths[:num_val])
  return dict(by_split)


def _ordered(files: _Files) -> list[tuple[str, str]]:
  """Returns (path, class) of all files, in the order of a hash."""
  records = [(path, name) for name, paths in files.items() for path in paths]
  return sorted(
    records, key=lambda r: _hash("/".join([r[1], os.path.basename(r[0])]))
  )
