"""The folder of a run in a bucket (gs://), read and written with TensorStore.

epath by itself uses TensorFlow there. For a small file, that takes 3 to 8
requests, each on a new connection; and TensorFlow remembers the size of an
object for 5 seconds, so that it cuts a file that another host has made longer.
TensorStore keeps its connections and remembers nothing. Orbax needs it anyway.

An object is there as a whole or not at all. A folder is what the names of
objects have in common: it exists as soon as an object is in it.

Orbax asks 15 times a save for folders that it has just made, and removes files
before it writes them. In a new folder (`mkdir` without exist_ok), this process
knows what it has written, and makes no request for that.
"""

import contextlib
import errno
import fnmatch
import functools
import io
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

# About a minute in all; then a request fails.
RETRIES = {"max_retries": 8, "initial_delay": "1s", "max_delay": "12s"}

# New folders -> names of the objects that this process has written in them.
_written: dict[str, set[str]] = {}


class BucketPath(type(epath.Path())):
  """A path whose usual methods take one request each.

  `is_dir`, `exists`, `iterdir`, `glob` and `names` list all objects below the
  path, 1,000 in a request.

  All methods raise FileNotFoundError if the bucket, or an object to read, does
  not exist, PermissionError if this account may not use it, and OSError if the
  store does not answer.
  """

  def names(self) -> list[str]:
    """Returns the names of all objects in this folder, relative to it."""
    folder = _key(self) + "/" if _key(self) else ""
    keys = _list(self, folder, folder[:-1] + "0" if folder else "")
    names = sorted(key[len(folder) :] for key in keys)
    # TensorFlow and Google's console mark a folder by an object `folder/`.
    return [name for name in names if name and not name.endswith("/")]

  def exists(self) -> bool:
    if str(self) in _written or self.name in _written.get(str(self.parent), ()):
      return True
    key = _key(self)
    keys = _list(self, key, key + "0")
    return any(name == key or name.startswith(key + "/") for name in keys)

  def is_dir(self) -> bool:
    return str(self) in _written or bool(self.names())

  def iterdir(self) -> Iterator["BucketPath"]:
    if not (names := self.names()):
      raise FileNotFoundError(errno.ENOENT, "no such folder", str(self))
    yield from (self / n for n in {name.split("/")[0]: 0 for name in names})

  def glob(self, pattern: str) -> Iterator["BucketPath"]:
    """Yields the files and folders whose relative path matches a pattern."""
    depth = pattern.count("/") + 1
    paths = {"/".join(name.split("/")[:depth]): 0 for name in self.names()}
    yield from (self / path for path in fnmatch.filter(paths, pattern))

  def mkdir(
    self,
    mode: int | None = None,
    parents: bool = False,
    exist_ok: bool = False,
  ) -> None:
    """Makes no request: a folder needs no object of its own.

    Without `exist_ok`, the caller knows that the folder does not exist.
    """
    if not exist_ok:
      _written[str(self)] = set()

  def open(
    self, mode: str = "r", **options: Any
  ) -> io.BytesIO | io.TextIOWrapper:
    """Opens the object in memory; it is written when it is closed."""
    data = b""
    if mode[0] != "w":
      with contextlib.suppress(*[FileNotFoundError] * (mode[0] == "a")):
        data = self._read()
    file = _Object(data) if mode[0] == "r" else _Object(data, self._write)
    file.seek(len(data) if mode[0] == "a" else 0)
    return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")

  def unlink(self, missing_ok: bool = False) -> None:
    """Removes the object; an object that is not there is no error."""
    if self.name in _written.get(str(self.parent), {self.name}):
      self._write(None)

  def rmtree(self, missing_ok: bool = False) -> None:
    """Removes all objects in this folder."""
    import tensorstore as ts

    key = _key(self)
    keys = ts.KvStore.KeyRange(key + "/", key + "0")
    _result(self, _store(self).delete_range(keys))
    for folder in [f for f in _written if f"{f}/".startswith(f"{self}/")]:
      del _written[folder]

  def rename(self, target: os.PathLike) -> "BucketPath":
    """Copies all objects of this folder through this host, and removes them."""
    target = type(self)(target)
    for name in self.names():
      (target / name).write_bytes((self / name).read_bytes())
    self.rmtree()
    return target

  def _read(self) -> bytes:
    got = _result(self, _store(self).read(_key(self)))
    if got.state != "value":
      raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
    return got.value

  def _write(self, data: bytes | None) -> None:
    _result(self, _store(self).write(_key(self), data))
    if data is not None:
      _written.get(str(self.parent), set()).add(self.name)


class _Object(io.BytesIO):
  """The bytes of an object; `write` gets them when the file is closed."""

  def __init__(self, data: bytes, write=None):
    super().__init__(data)
    self._write = write

  def close(self) -> None:
    write, self._write = self._write, None
    if write is not None:
      write(self.getvalue())
    super().close()


def _key(path: BucketPath) -> str:
  """Returns the name of an object in its bucket."""
  return str(path).removeprefix("gs://").partition("/")[2]


@functools.cache
def _open(bucket: str) -> Any:
  import tensorstore as ts

  return ts.KvStore.open(
    {"driver": "gcs", "bucket": bucket, "gcs_request_retries": RETRIES}
  ).result()


def _store(path: BucketPath) -> Any:
  """Returns TensorStore's store of a path's bucket."""
  return _open(str(path).removeprefix("gs://").partition("/")[0])


def _list(path: BucketPath, first: str, end: str) -> list[str]:
  """Returns the names of objects from `first` to before `end`."""
  import tensorstore as ts

  keys = _result(path, _store(path).list(ts.KvStore.KeyRange(first, end)))
  return [os.fsdecode(key) for key in keys]


def _result(path: BucketPath, future: Any) -> Any:
  """Waits for TensorStore, whose errors are ValueErrors that begin with a code.

  A missing object is no error there, so that NOT_FOUND is a missing bucket.
  """
  try:
    return future.result()
  except ValueError as e:
    text = str(e).partition(" [http_response")[0].partition("\n")[0]
    if text.startswith("NOT_FOUND"):
      code, text = errno.ENOENT, "the bucket does not exist"
    elif text.startswith(("PERMISSION_DENIED", "UNAUTHENTICATED")):
      code = errno.EACCES
    else:
      code = errno.ENETUNREACH
    raise OSError(code, text, str(path)) from None
