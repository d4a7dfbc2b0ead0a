"""Where a file of weights is written: checked before, removed if it fails."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from etils import epath


def check(path: str, suffix: str | None) -> None:
  """Raises if nothing can be written there.

  Args:
    path: A new file or folder; the folders above it need not exist.
    suffix: Ending that the name must have; None: any.

  Raises:
    FileExistsError: The path exists.
    ValueError: It has another suffix, or its folder cannot be written to; of a
      bucket that is not known beforehand.
  """
  target = epath.Path(path)
  for part in _parts(path):
    if part.exists():
      raise FileExistsError(
        f"DST: got {str(part)!r}, which exists; expected a new one."
      )
  if suffix and target.suffix != suffix:
    raise ValueError(f"DST: got {path!r}, expected a name ending in {suffix}.")
  if "://" in path:
    return
  parents = pathlib.Path(path).absolute().parents
  folder = next(p for p in parents if os.path.exists(p))
  if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
    raise ValueError(
      f"DST: got {path!r}, but no files can be written to {folder}; name"
      " another place."
    )


@contextlib.contextmanager
def whole_or_none(path: str) -> Iterator[None]:
  """Removes a new file or folder if the body raises.

  Args:
    path: What the body writes, after `check`.
  """
  try:
    yield
  except FileExistsError:  # it is another's
    raise
  except BaseException:  # Ctrl-C, too
    with contextlib.suppress(OSError):
      for part in _parts(path):
        if part.is_dir():
          part.rmtree()
        else:
          part.unlink(missing_ok=True)
    raise


def _parts(path: str) -> list[epath.Path]:
  """Returns the file or folder, and the second file that ONNX may need."""
  more = [f"{path}.data"] if path.endswith(".onnx") else []
  return [epath.Path(part) for part in (path, *more)]
