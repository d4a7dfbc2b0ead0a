"""Paths on a disk or in a bucket, and names that must stay in their folder.

A bucket is storage that is read by an address such as gs://.
"""

import os
import pathlib
import re
import stat
from collections.abc import Collection, Iterator

from etils import epath

from vit_jax.bucket import BucketPath
from vit_jax.options import shown

# Lower case; macOS's archives, Synology, QNAP, Windows, Linux, Android, Python.
_BY_PROGRAMS = {
  "__macosx",
  *("@eadir", "@eadir@synoeastream", "@tmp", "#recycle", "#snapshot"),
  *("@recycle", "@recently-snapshot", "~snapshot"),
  *("$recycle.bin", "recycler", "system volume information"),
  *("network trash folder", "temporary items", "lost+found", "lost.dir"),
  "__pycache__",
}

# Prefixes of data sets whose name has a path.
FOLDERS = ("folder:", "images:", "csv:", "parquet:")
# What may follow the path: "csv:a.csv?labels=cat,dog&group=patient".
_OPTION = r"(?=(?:image|labels|numbers|group)=)"


def file_in(folder: epath.Path, name: str) -> epath.Path:
  """Returns the path of a file in a folder; the file need not exist.

  A link may lead to another place in the folder. In the cache of Hugging Face,
  where `snapshots/REVISION` has links into `blobs` beside it, a link may lead
  to any place of that model's cache.

  Args:
    folder: The folder that a user named, or the folder of the user's file.
    name: Name of the file, which may come from another file, such as an index.

  Raises:
    ValueError: The name, or the link of that name, leads out of the folder.
  """
  path = folder / name
  if name in ("", ".", "..") or set(name) & {*"/\\\0"}:
    raise ValueError(
      f"got {shown(name)} in {str(folder)!r}, expected a file in that folder."
    )
  if is_remote(folder):
    return path  # buckets have no links
  # epath's own `resolve` follows no links.
  root, target = (pathlib.Path(p).resolve() for p in (folder, path))
  if root.parent.name == "snapshots":
    root = root.parent.parent
  if not target.is_relative_to(root):
    raise ValueError(
      f"got {str(path)!r}, which is a link to {target}, outside of its folder."
    )
  return path


def printable(text: str | bytes | os.PathLike) -> str:
  """Returns a text or a path with escapes for what a terminal cannot print.

  These are control characters, such as line ends and colour codes, and bytes of
  a path that are not UTF-8.

  Example:
    >>> printable("a\\nb" + chr(0xdce9))
    'a\\\\nb\\\\xe9'
  """

  def escaped(c):
    if "\udc80" <= c <= "\udcff":  # a byte that Python could not decode
      return f"\\x{ord(c) - 0xDC00:x}"
    return c.encode("unicode_escape").decode()

  return "".join(
    c if c.isprintable() else escaped(c) for c in os.fsdecode(text)
  )


def is_by_program(name: str) -> bool:
  """Whether a folder name is one that programs make, not users.

  Hidden names, such as .thumbnails and .ipynb_checkpoints, are among them.
  """
  name = name.lower()
  is_by_windows = re.fullmatch(r"found\.\d{3}", name)  # what its chkdsk finds
  return bool(name.startswith(".") or name in _BY_PROGRAMS or is_by_windows)


def walk(root: str | os.PathLike) -> Iterator[tuple[str, list[str], list[str]]]:
  """Walks a folder as `os.walk` does, also into links, but never twice.

  Raises:
    ValueError: A folder cannot be opened.
  """

  def fail(error: OSError):
    name = printable(error.filename or root)
    raise ValueError(f"{name}: cannot be opened: {error.strerror}.") from None

  seen = set()
  for folder, below, names in os.walk(root, onerror=fail, followlinks=True):
    real = os.path.realpath(folder)
    if real in seen:
      below.clear()
    else:
      seen.add(real)
      yield folder, below, names


def run_path(name: str | os.PathLike) -> epath.Path:
  """Returns the path of a run's folder, or of a file in it.

  Args:
    name: A path on disk, or an address such as gs://bucket/run.
  """
  in_bucket = os.fspath(name).startswith("gs://")
  return BucketPath(name) if in_bucket else epath.Path(name)


def is_remote(path: str | os.PathLike) -> bool:
  """Whether a path is in a bucket."""
  return "://" in str(path)


def absolute(path: epath.Path) -> epath.Path:
  """Returns a path that does not depend on the working directory.

  `resolve` of epath takes gs://b for a folder of the working directory.
  """
  return path if is_remote(path) else path.resolve()


def kind(path: epath.Path) -> str:
  """Returns "file" or "folder", or "" if neither exists.

  Raises:
    OSError: The disk cannot answer now. `exists` and `is_dir` of epath would
      return False.
  """
  if is_remote(path):
    return "folder" if path.is_dir() else "file" if path.exists() else ""
  try:
    mode = os.stat(path).st_mode
  except (FileNotFoundError, NotADirectoryError):
    return ""
  return "folder" if stat.S_ISDIR(mode) else "file"


def file_size(path: epath.Path) -> int:
  """Returns the size of a file in bytes.

  `stat` of epath fails if the owner has no name, as in many containers.
  """
  if is_remote(path):
    return path.stat().length
  return os.stat(path).st_size


def with_options(
  dataset: str, known: Collection[str] = ("image", "labels", "numbers", "group")
) -> tuple[str, dict[str, str]]:
  """Returns the name of a data set without its options, and the options.

  Args:
    dataset: The name.
    known: The options that it may have.

  Raises:
    ValueError: It has another option.

  Example:
    >>> with_options("csv:a.csv?labels=cat,dog&group=patient")
    ('csv:a.csv', {'labels': 'cat,dog', 'group': 'patient'})
  """
  name, *texts = re.split(rf"\?{_OPTION}", dataset, maxsplit=1)
  parts = re.split(f"&{_OPTION}", texts[0]) if texts else []
  options = dict(part.split("=", 1) for part in parts)
  for key in options:
    if key not in known:
      kind = name.partition(":")[0]
      raise ValueError(
        f"{key}: got {options[key]!r}, expected none for {kind}."
      )
  return name, options


def with_absolute_folder(value: object) -> object:
  """Returns the name of a data set; the path of a folder becomes absolute.

  Args:
    value: The name; anything else is returned as it is.

  Example:
    >>> with_absolute_folder("folder:/a/../b/"), with_absolute_folder("cifar10")
    ('folder:/b', 'cifar10')
  """
  if not isinstance(value, str) or not value.startswith(FOLDERS):
    return value
  name, _ = with_options(value)
  kind, _, path = name.partition(":")
  if is_remote(os.path.expanduser(path)):
    return value
  path = os.path.abspath(os.path.expanduser(path))
  return f"{kind}:{path}{value.removeprefix(name)}"


def cache_folder(name: str) -> pathlib.Path:
  """Returns $XDG_CACHE_HOME/vit_jax/<name>; the default is in ~/.cache."""
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "vit_jax" / name
