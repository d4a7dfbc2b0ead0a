"""Writes features of images to `.npz`, or to `.parquet` with pyarrow."""

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
  """Checks that the file can be written, before features are computed.

  Raises:
    ValueError: The name has no suffix of `SUFFIXES`.
    FileNotFoundError: The folder does not exist.
    ImportError: The suffix is .parquet, and pyarrow is not installed.
  """
  file = pathlib.Path(path)
  if file.suffix not in SUFFIXES or "://" in path:
    raise ValueError(
      f"--features: got {path!r}, expected a file on this machine that ends in"
      f" {' or '.join(SUFFIXES)}."
    )
  if not file.parent.is_dir():
    raise FileNotFoundError(
      f"--features: got {path!r}, but there is no folder {str(file.parent)!r};"
      " create it, or choose another folder."
    )
  if file.suffix == ".parquet" and not importlib.util.find_spec("pyarrow"):
    raise ImportError(
      f"--features: got {path!r}, which needs pyarrow, but it is not installed:"
      " pip install pyarrow, or choose a file that ends in .npz."
    )


def write(
  path: str, images: Sequence[str], features: Float[np.ndarray, "b ..."]
) -> None:
  """Writes names of images and their features; replaces an old file.

  Args:
    path: See `check`. An `.npz` has the arrays `image` and `features`. A
      `.parquet` has columns with these names; the features of an image are a
      list, or nested lists for tokens.
    images: Names of the images.
    features: Features of the images, float32 [b, ...].

  Raises:
    WriteError: The file cannot be written.
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
