"""The folders of a run's checkpoints: which are whole, which is the newest.

`checkpoints/<step>/` has the items `params`, `train` and `metadata`, and
`digests.json`, which is written last, before the folder gets its name. It
states the digests of all arrays, of the metadata and of the small files that
describe the arrays, and the size of every file. So a look at names, sizes and
small files finds a checkpoint of which a part is missing; a flipped bit in an
array is found by its digest only.

No Orbax here: see `vit_jax.checkpointing.checkpointer`.
"""

import errno
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from vit_jax import digests as digests_lib
from vit_jax.config import json_file
from vit_jax.digests import Digest
from vit_jax.options import shown
from vit_jax.paths import absolute, file_in, file_size, is_remote, kind
from vit_jax.writers import console

FOLDER = "checkpoints"
DIGESTS = "digests.json"
ITEMS = ("params", "train")
HAS_DIGESTS = "digests"  # key of the metadata
VERSION = 1
COMMITTED = "commit_success.txt"  # Orbax's, see `is_unfinished`
NONE_WHOLE = "none of its checkpoints is whole (see above)"
# Errors of a disk that say that a file is not what it was. Others (permission,
# a server that does not answer) say nothing about the file.
OF_THE_FILE = (
  errno.EINVAL,
  errno.EIO,
  errno.EISDIR,
  errno.ELOOP,
  errno.ENAMETOOLONG,
  errno.ENOENT,
  errno.ENOTDIR,
)
# The same of TensorStore, which names them in its errors, and of TensorFlow,
# whose errors are of classes such as UnavailableError.
OF_THE_STORE = (
  "ABORTED",
  "CANCELLED",
  "DEADLINE_EXCEEDED",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "UNAUTHENTICATED",
  "UNAVAILABLE",
)

# What jax says of a device that it cannot open, such as one in use.
OF_THE_DEVICE = "Unable to initialize backend"

# Seconds between looks after EIO, which a file server that is slow to answer
# gives as well as a bad disk.
WAITS = (1.0, 2.0, 4.0)

_told: set[str] = set()  # what this process has said about damaged folders


class DamagedError(ValueError):
  """A checkpoint is not what was written."""


def reason(e: BaseException) -> str | None:
  """Returns what is wrong with the files, in a line; None: nothing is.

  Args:
    e: What reading them raised.
  """
  text = str(e).strip().partition("\n")[0].partition("; copy the file")[0][:200]
  if isinstance(e, OSError) and e.errno and e.errno not in OF_THE_FILE:
    return None
  kind = type(e).__name__
  for word in OF_THE_STORE:
    if word in str(e) or kind == word.title().replace("_", "") + "Error":
      return None
  if isinstance(e, MemoryError) or OF_THE_DEVICE in str(e):
    return None
  if isinstance(e, DamagedError):
    return text
  return f"{kind}: {text}" if text else kind


def of(folder: epath.Path) -> dict[int, epath.Path]:
  """Returns step -> folder of `checkpoints/`, the newest first.

  Unfinished and removed ones have other names, or are `is_unfinished`.
  """
  if is_remote(folder) and not folder.is_dir():
    return {}  # else the error is TensorFlow's
  try:
    found = {int(p.name): p for p in folder.iterdir() if is_step(p.name)}
  except (FileNotFoundError, NotADirectoryError):
    return {}
  return {
    step: found[step]
    for step in sorted(found, reverse=True)
    if not is_unfinished(found[step])
  }


def is_unfinished(folder: epath.Path) -> bool:
  """Whether a step on Google's store, where Orbax does not rename, lacks the
  file that is written last."""
  is_there = str(folder).startswith("gs://")
  return is_there and not (folder / COMMITTED).exists()


def is_step(name: str) -> bool:
  return name.isascii() and name.isdigit() and str(int(name)) == name


def damage(folder: epath.Path) -> str | None:
  """Returns why a step's folder is not whole, by a look; None: it seems so.

  Reads no arrays.

  Raises:
    OSError: The folder cannot be read, for a reason that is none of its files'.
  """
  for wait in (*WAITS, None):
    try:
      return _difference(folder)
    except Exception as e:
      error = e
    if wait is None or getattr(error, "errno", None) != errno.EIO:
      break
    time.sleep(wait)
  if (why := reason(error)) is None:
    raise error
  return why


def _difference(folder: epath.Path) -> str | None:
  """Returns what of a step's folder is not as it was written; None: nothing."""
  metadata, kept = _metadata(folder), _kept(folder)
  if digests_lib.of_json(metadata) != kept["metadata"]:
    return "metadata/metadata is not what was written"
  for name, (size, digest) in kept["files"].items():
    path = folder / name
    if kind(path) != "file":
      return f"{name} is missing"
    if (found := file_size(path)) != size:
      return f"{name} has {found:,} bytes, expected {size:,}"
    if digest and digests_lib.of_bytes(path.read_bytes()) != digest:
      return f"{name} is not what was written"
  return None


def metadata(folder: epath.Path) -> dict[str, Any]:
  """Returns the JSON beside the parameters, as it was given to `save`.

  Raises:
    DamagedError: It is missing, or no JSON.
  """
  found = _metadata(folder)
  return {k: v for k, v in found.items() if k != HAS_DIGESTS}


def _metadata(folder: epath.Path) -> dict[str, Any]:
  for name in ("params", "metadata"):
    if kind(file_in(folder, name)) != "folder":
      is_empty = not any(folder.iterdir())
      raise DamagedError(
        "the folder is empty" if is_empty else f"{name}/ is missing"
      )
  return read_json(folder, "metadata/metadata")


def read_json(folder: epath.Path, name: str) -> dict[str, Any]:
  """Returns the JSON object of a file.

  Raises:
    DamagedError: It is missing, or no JSON object.
    OSError: It cannot be read.
  """
  path = folder / name
  if not kind(path):
    raise DamagedError(f"{name} is missing")
  try:
    file_in(path.parent, path.name)  # no link
    found = json_file.parse(path.read_bytes(), name)
  except ValueError as e:
    raise DamagedError(str(e).partition("; copy the file")[0]) from None
  if not isinstance(found, dict):
    raise DamagedError(f"{name} is no JSON object")
  return found


def read_digests(folder: epath.Path) -> dict[str, dict[str, Digest]]:
  """Returns item -> path -> digest of a step; reads one small file.

  Raises:
    DamagedError: They are missing, or not what was written.
  """
  return {
    item: {
      path: Digest(dtype, tuple(shape), sums)
      for path, (dtype, shape, sums) in arrays.items()
    }
    for item, arrays in _kept(folder)["items"].items()
  }


def _kept(folder: epath.Path) -> dict[str, Any]:
  kept = read_json(folder, DIGESTS)
  if kept.pop("sha256", None) != digests_lib.of_json(kept):
    raise DamagedError(f"{DIGESTS} is not what was written")
  for name in kept["files"]:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
      raise DamagedError(f"{DIGESTS} names a file elsewhere, {shown(name)}")
  return kept


def write_digests(
  folder: epath.Path,
  items: Mapping[str, Mapping[str, Digest]],
  metadata: dict[str, Any],
) -> None:
  """Writes `digests.json`; the other files must be there.

  Args:
    folder: Of a step, finished but for its name.
    items: "params" and "train" -> path -> digest.
    metadata: What was written as such, with `HAS_DIGESTS`.
  """
  files = {
    str(path.relative_to(folder)): _described(path)
    for item in (*items, "metadata")
    for path in files_in(folder / item)
  }
  kept = {
    "version": VERSION,
    "items": items,
    "files": files,
    "metadata": digests_lib.of_json(metadata),
  }
  kept["sha256"] = digests_lib.of_json(kept)
  (folder / DIGESTS).write_text(json.dumps(kept))


def _described(path: epath.Path) -> tuple[int, str]:
  """Returns a file's size, and the digest of one that describes arrays."""
  size, name = file_size(path), str(path)
  has_arrays = path.parent.name == "d" or "/ocdbt.process_" in name
  return size, "" if has_arrays else digests_lib.of_bytes(path.read_bytes())


def files_in(folder: epath.Path) -> Iterator[epath.Path]:
  """Yields the files of a folder and of those in it, by name.

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
  """Returns the steps that seem whole, newest first, and what the others lack.

  Args:
    folder: `checkpoints/`.

  Raises:
    OSError: As `damage`.
  """
  errors = {step: damage(path) for step, path in of(folder).items()}
  # One that was removed meanwhile is neither.
  there = of(folder)
  good = [step for step, why in errors.items() if why is None]
  bad = {s: why for s, why in errors.items() if why is not None and s in there}
  return good, bad


def find(path: str, but: Collection[str] = ()) -> epath.Path:
  """Returns the folder of a step, given it, its run, or `checkpoints/`.

  Of a run it is the newest step that seems whole; those that do not are named
  on stderr.

  Args:
    path: What was given.
    but: Names of steps that are known to be damaged.

  Raises:
    FileNotFoundError: There is no checkpoint.
    DamagedError: There is none that is whole.
  """
  base = epath.Path(path)
  if (base / "params").is_dir():
    return absolute(base)
  bad: dict[int, str] = {}
  for parent in (base, base / FOLDER):
    good, bad = whole(parent)
    for step, why in bad.items():
      tell(parent / str(step), why)
    for step in good:
      if str(step) not in but:
        return absolute(parent / str(step))
    if good or bad:
      raise DamagedError(f"{parent}: {NONE_WHOLE}.")
  is_there = "has no checkpoint in it" if base.exists() else "does not exist"
  runs = [p.parent.name for p in sorted(base.glob(f"*/{FOLDER}"))[:5]]
  raise FileNotFoundError(
    f"got {path!r}, which {is_there}; expected the folder of a run (it holds"
    f" {FOLDER}/<step>/params), or of one step."
    + (f" Runs in it: {', '.join(runs)}." if runs else "")
  )


def tell(folder: epath.Path, why: str) -> None:
  """Prints, once in a process, that a checkpoint is passed over."""
  if (name := str(absolute(folder))) not in _told:
    _told.add(name)
    say(f"damaged     {folder}: {why}; this checkpoint is passed over")


def say(text: str) -> None:
  """Prints a line that must not be missed; only process 0 does."""
  if jax.process_index() == 0:
    console.write(sys.stderr, f"{text}\n")
