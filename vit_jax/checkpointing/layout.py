"""The folders of a run's checkpoints: which are complete, which is the newest.

`checkpoints/<step>/` has the items `params`, `train` and `metadata`, and
`digests.json`, which is written last, before the folder gets its name.
`digests.json` has the digests of all arrays, of the metadata and of the small
files that describe the arrays, and the size of every file. So names, sizes and
small files show that a part of a checkpoint is missing. Only an array's digest
shows that a bit in it flipped.

In a bucket, where an object is there as a whole or not at all and the store
itself checks its bits, `digests.json` has the names of the files and no more:
one request lists them, however many hosts have written.

This module does not import Orbax, see `vit_jax.checkpointing.checkpointer`.
"""

import errno
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from vit_jax import digests as digests_lib
from vit_jax.bucket import BucketPath
from vit_jax.config import json_file
from vit_jax.digests import Digest
from vit_jax.options import shown
from vit_jax.paths import absolute, file_in, file_size, kind, run_path
from vit_jax.writers import console

FOLDER = "checkpoints"
DIGESTS = "digests.json"
ITEMS = ("params", "train")
HAS_DIGESTS = "digests"  # key of the metadata
VERSION = 1
COMMITTED = "commit_success.txt"  # Orbax's, see `step_folders`
NONE_WHOLE = "none of its checkpoints is whole (see above)"
# Errors of a disk that say that a file is not what it was. Others (permission,
# a server that does not answer) say nothing about the file.
FILE_ERRNOS = (
  errno.EINVAL,
  errno.EIO,
  errno.EISDIR,
  errno.ELOOP,
  errno.ENAMETOOLONG,
  errno.ENOENT,
  errno.ENOTDIR,
)
# The same of TensorFlow, which reads buckets: NOT_FOUND, OUT_OF_RANGE and
# DATA_LOSS, by `tf.errors.OpError.error_code`.
FILE_ERROR_CODES = (5, 11, 15)

_logged: set[str] = set()  # damaged folders that this process has reported


class DamagedError(ValueError):
  """A checkpoint differs from what was written."""


def damage_of(error: Exception) -> str | None:
  """Returns the damage that an error shows, as a line; None if maybe none.

  Errors of memory, devices, permissions, or of a server that does not answer
  say nothing about the files. TensorStore's errors are all of one class, and
  count as damage: if it could not reach the files, an older checkpoint is used,
  and the steps since are computed again.

  Args:
    error: Raised by reading the files.
  """
  if isinstance(error, (MemoryError, jax.errors.JaxRuntimeError)):
    return None
  if isinstance(error, OSError) and error.errno not in (None, *FILE_ERRNOS):
    return None
  code = getattr(error, "error_code", None)  # TensorFlow's
  if code is not None and code not in FILE_ERROR_CODES:
    return None
  text = str(error).strip().partition("\n")[0][:200]
  if isinstance(error, DamagedError):
    return text
  return f"{type(error).__name__}: {text}"


def step_folders(folder: epath.Path) -> dict[int, epath.Path]:
  """Returns step -> folder of `checkpoints/`, the newest first.

  Unfinished and removed folders have other names. In a bucket, where Orbax
  does not rename folders, they lack the object that is written last.
  """
  if isinstance(folder, BucketPath):
    committed = (name.split("/") for name in folder.names())
    names = [step for step, *rest in committed if rest == [COMMITTED]]
  else:
    try:
      names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
      return {}
  steps = sorted((int(name) for name in names if is_step(name)), reverse=True)
  return {step: folder / str(step) for step in steps}


def is_step(name: str) -> bool:
  return name.isascii() and name.isdigit() and str(int(name)) == name


def damage(folder: epath.Path) -> str | None:
  """Returns why a step's folder is not complete; None if it seems complete.

  It reads no arrays.

  Raises:
    OSError: The folder cannot be read, for a reason other than its files.
  """
  try:
    return _difference(folder)
  except Exception as e:
    if (reason := damage_of(e)) is None:
      raise
    return reason


def _difference(folder: epath.Path) -> str | None:
  """Returns how a step's folder differs from what was written, or None."""
  metadata, stored = _read_metadata(folder), _read_digests_file(folder)
  if digests_lib.of_json(metadata) != stored["metadata"]:
    return "metadata/metadata is not what was written"
  objects = {*folder.names()} if isinstance(folder, BucketPath) else None
  for name, (size, digest) in stored["files"].items():
    path = folder / name
    if objects is not None:
      if name not in objects:
        return f"{name} is missing"
    elif kind(path) != "file":
      return f"{name} is missing"
    elif size is not None and (got := file_size(path)) != size:
      return f"{name} has {got:,} bytes, expected {size:,}"
    if digest and digests_lib.of_bytes(path.read_bytes()) != digest:
      return f"{name} is not what was written"
  return None


def metadata(folder: epath.Path) -> dict[str, Any]:
  """Returns the JSON beside the parameters, as it was passed to `save`.

  Raises:
    DamagedError: It is missing, or is not JSON.
  """
  values = _read_metadata(folder)
  return {k: v for k, v in values.items() if k != HAS_DIGESTS}


def _read_metadata(folder: epath.Path) -> dict[str, Any]:
  in_bucket = isinstance(folder, BucketPath)  # one request is enough there
  for name in () if in_bucket else ("params", "metadata"):
    if kind(file_in(folder, name)) != "folder":
      raise DamagedError(f"{name}/ is missing")
  return read_json(folder, "metadata/metadata")


def read_json(folder: epath.Path, name: str) -> dict[str, Any]:
  """Returns the JSON object of a file.

  Raises:
    DamagedError: It is missing, or is not a JSON object.
    OSError: It cannot be read.
  """
  path = folder / name
  try:
    file_in(path.parent, path.name)  # raises for a link out of the folder
    values = json_file.parse(path.read_bytes(), name)
  except (FileNotFoundError, NotADirectoryError):
    raise DamagedError(f"{name} is missing") from None
  except ValueError as e:
    raise DamagedError(str(e)) from None
  if not isinstance(values, dict):
    raise DamagedError(f"{name} is no JSON object")
  return values


def read_digests(folder: epath.Path) -> dict[str, dict[str, Digest]]:
  """Returns item -> path -> digest of a step; reads one small file.

  Raises:
    DamagedError: They are missing, or differ from what was written.
  """
  return {
    item: {
      path: Digest(dtype, tuple(shape), sums)
      for path, (dtype, shape, sums) in arrays.items()
    }
    for item, arrays in _read_digests_file(folder)["items"].items()
  }


def _read_digests_file(folder: epath.Path) -> dict[str, Any]:
  stored = read_json(folder, DIGESTS)
  if stored.pop("sha256", None) != digests_lib.of_json(stored):
    raise DamagedError(f"{DIGESTS} is not what was written")
  for name in stored["files"]:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
      raise DamagedError(f"{DIGESTS} names a file elsewhere, {shown(name)}")
  return stored


def write_digests(
  folder: epath.Path,
  items: Mapping[str, Mapping[str, Digest]],
  metadata: dict[str, Any],
) -> None:
  """Writes `digests.json`; the other files must exist.

  Args:
    folder: Folder of a step, complete except for its name.
    items: "params" and "train" -> path -> digest.
    metadata: The item that was written, with `HAS_DIGESTS`.
  """
  names = [*items, "metadata"]
  if isinstance(folder, BucketPath):
    objects = (n for n in folder.names() if n.split("/")[0] in names)
    files = {name: (None, "") for name in objects}
  else:
    files = {
      str(path.relative_to(folder)): _size_and_digest(path)
      for name in names
      for path in files_in(folder / name)
    }
  stored = {
    "version": VERSION,
    "items": items,
    "files": files,
    "metadata": digests_lib.of_json(metadata),
  }
  stored["sha256"] = digests_lib.of_json(stored)
  (folder / DIGESTS).write_text(json.dumps(stored))


def _size_and_digest(path: epath.Path) -> tuple[int, str]:
  """Returns a file's size, and its digest if it describes arrays."""
  size, name = file_size(path), str(path)
  has_arrays = path.parent.name == "d" or "/ocdbt.process_" in name
  return size, "" if has_arrays else digests_lib.of_bytes(path.read_bytes())


def files_in(folder: epath.Path) -> Iterator[epath.Path]:
  """Yields the files of a folder and of its sub-folders, by name.

  Raises:
    ValueError: One is a link out of its folder.
  """
  for path in sorted(folder.iterdir()):
    file_in(folder, path.name)
    if path.is_dir():
      yield from files_in(path)
    else:
      yield path


def whole(folder: epath.Path) -> tuple[list[int], dict[int, str]]:
  """Returns the complete steps, the newest first, and the damage of others.

  Args:
    folder: `checkpoints/`.

  Raises:
    OSError: As `damage`.
  """
  errors = {step: damage(path) for step, path in step_folders(folder).items()}
  good = [step for step, error in errors.items() if error is None]
  if len(good) == len(errors):
    return good, {}
  remaining = step_folders(folder)  # a run may have removed one meanwhile
  return good, {s: e for s, e in errors.items() if e and s in remaining}


def find(path: str, exclude: Collection[str] = ()) -> epath.Path:
  """Returns the folder of a step, for a step, a run, or `checkpoints/`.

  In a run it is the newest step that seems complete; damaged ones after it are
  named on stderr.

  Args:
    path: One of the three.
    exclude: Names of steps that are known to be damaged.

  Raises:
    FileNotFoundError: There is no checkpoint.
    DamagedError: No checkpoint is complete.
  """
  base = run_path(path)
  if (base / "params").is_dir():
    return absolute(base)
  for parent in (base, base / FOLDER):
    steps = step_folders(parent)
    for path in steps.values():
      if path.name in exclude:
        continue
      if not (error := damage(path)):
        return absolute(path)
      if path.is_dir():  # a run may have removed it meanwhile
        log_damage(path, error)
    if steps:
      raise DamagedError(f"{parent}: {NONE_WHOLE}.")
  what = "has no checkpoint in it" if base.exists() else "does not exist"
  raise FileNotFoundError(
    f"got {path!r}, which {what}; expected the folder of a run or of a step."
  )


def log_damage(folder: epath.Path, error: str) -> None:
  """Prints, once per process, that a checkpoint is skipped."""
  if (name := str(absolute(folder))) not in _logged:
    _logged.add(name)
    log(f"damaged     {folder}: {error}; this checkpoint is passed over")


def log(text: str) -> None:
  """Prints a line to stderr; only in process 0."""
  if jax.process_index() == 0:
    console.write(sys.stderr, f"{text}\n")
