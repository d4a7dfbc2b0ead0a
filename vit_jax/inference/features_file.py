"""Features of images in a file: `.npz`, or `.parquet` where pyarrow is."""

import importlib.util
import io
import pathlib
from collections.abc import Sequence

import numpy as np
from etils import epath
from jaxtyping import Float

from vit_jax.writers import atomic_files

SUFFIXES = (".npz", ".parquet")


def check(path: str) -> None:
  """Raises before anything is computed for the file.

  Raises:
    ValueError: Its name has no suffix of `SUFFIXES`.
    FileNotFoundError: Its folder does not exist.
    ImportError: pyarrow is not installed, and the file is parquet.
  """
  file = pathlib.Path(path)
  if file.suffix not in SUFFIXES or "://" in path:
    raise ValueError(
      f"--features: got {path!r}, expected a file on this machine that ends in"
      f" {' or '.join(SUFFIXES)}."
    )
  if not file.parent.is_dir():
    raise FileNotFoundError(
      f"--features: got {path!r}, but {str(file.parent)!r} is no folder; make"
      " it, or name another one."
    )
  if file.suffix == ".parquet" and not importlib.util.find_spec("pyarrow"):
    raise ImportError(
      f"--features: got {path!r}, but pyarrow, which writes parquet, is not"
      " installed: pip install pyarrow, or name a file that ends in .npz."
    )


def write(
  path: str, images: Sequence[str], features: Float[np.ndarray, "b ..."]
) -> None:
  """Writes names of images and their features; an old file is replaced.

  Args:
    path: See `check`. An `.npz` has the arrays `image` and `features`, a
      `.parquet` the columns of these names, in which a row of features is a
      list, nested where it has tokens.
    images: Their names, one a row.
    features: float32 [n, ...].

  Raises:
    WriteError: It cannot be written.
  """
  data = io.BytesIO()
  if path.endswith(".npz"):
    np.savez(data, image=np.array(images, np.str_), features=features)
  else:
    import pyarrow  # here, because .npz does not need it
    from pyarrow import parquet

    rows = pyarrow.array(features.reshape(-1))
    for size in reversed(features.shape[1:]):
      rows = pyarrow.FixedSizeListArray.from_arrays(rows, size)
    table = pyarrow.table({"image": list(images), "features": rows})
    parquet.write_table(table, data)
  atomic_files.replace(epath.Path(path), data.getvalue())
