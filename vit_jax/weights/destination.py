"""Where a file of weights is written: checked before a model is loaded."""

import os
import pathlib

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
  if target.exists():
    raise FileExistsError(
      f"DST: got {path!r}, which exists; expected a new one."
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
