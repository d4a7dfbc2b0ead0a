"""Weights as Google published them: one `.npz` of flat names.

Three generations of names lead to ours: the ViT paper's (numbers counted over
all layers of a block: `LayerNorm_2`), linen's (counted by kind: `LayerNorm_1`)
and big_vision's (linen's, the position table on top and without a row for the
class token). big_vision files may stack the blocks on a leading axis.
"""

import os
import re
import zipfile
import zlib

import flax
import jax.numpy as jnp
import numpy as np
from etils import epath

POS_EMBEDDING = "Transformer/posembed_input/pos_embedding"

# Training states hold the parameters under one of these, besides moments.
PREFIXES = ("opt/target/", "params/")

# A published name -> ours; the first match counts, other names are ours as
# they stand. The third column is how the ViT paper's files spell our name.
_BLOCK = r"^(Transformer/encoderblock(?:_\d+)?)"
NAMES = (
  (
    _BLOCK + "/MultiHeadDotProductAttention_[01]/",
    r"\1/MultiHeadDotProductAttention_0/",
    r"\1/MultiHeadDotProductAttention_1/",
  ),
  (_BLOCK + "/LayerNorm_[12]/", r"\1/LayerNorm_1/", r"\1/LayerNorm_2/"),
  (_BLOCK + "/MlpBlock_[03]/", r"\1/MlpBlock_0/", r"\1/MlpBlock_3/"),
  (r"^(Transformer/)?pos_embedding$", POS_EMBEDDING, POS_EMBEDDING),
)


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Returns the parameters of a file, by our flat names ("a/b/c").

  Moments and steps of a training state are left unread. A position table
  without a row for the class token, of a model that has one, gets a row of
  zeros, which changes nothing.

  Raises:
    ValueError: The file is damaged or no .npz, an array is no array of
      numbers, or two have the same name.
  """
  try:
    with epath.Path(path).open("rb") as stream:
      if not zipfile.is_zipfile(stream):
        raise zipfile.BadZipFile("it is no zip archive")
    return _read(path)
  except (zipfile.BadZipFile, EOFError, OSError, zlib.error) as e:
    raise ValueError(
      f"got {str(path)!r}, which cannot be read as a .npz ({e}); expected a"
      " whole file of arrays: copy it again, and compare its size."
    ) from None


def _read(path: str | os.PathLike) -> dict[str, np.ndarray]:
  params = {}
  # epath opens gs:// as well; np.load reads an array only when it is asked for.
  with (
    epath.Path(path).open("rb") as stream,
    np.load(stream, allow_pickle=False) as file,
  ):
    prefix = next(
      (p for p in PREFIXES if any(n.startswith(p) for n in file.files)), ""
    )
    names = [n for n in file.files if n.startswith(prefix)]
    for name in names:
      ours = rename(name.removeprefix(prefix))
      if ours in params:
        raise ValueError(
          f"{path}: got {name!r} and another array that are both {ours!r},"
          " expected one. Remove one of them."
        )
      try:
        array = file[name]
      except ValueError as e:
        raise ValueError(
          f"{path}: got pickled objects in {name!r}, expected numbers; these"
          " are not loaded, since a pickle may run any code."
        ) from e
      # numpy knows no bfloat16 and stores it as two nameless bytes.
      params[ours] = array.view(jnp.bfloat16) if array.dtype == "V2" else array
  if prefix + "pos_embedding" in names and "cls" in params:
    table = params[POS_EMBEDDING]
    params[POS_EMBEDDING] = np.pad(table, ((0, 0), (1, 0), (0, 0)))
  return params


def write(path: str | os.PathLike, params: dict) -> None:
  """Writes nested parameters under the names of the ViT paper's files.

  Args:
    path: A file, ending in .npz.
    params: Nested dict of arrays; blocks one by one, not stacked.
  """
  flat = flax.traverse_util.flatten_dict(params, sep="/")
  np.savez(path, **{rename(k, 2): np.asarray(v) for k, v in flat.items()})


def rename(name: str, column: int = 1) -> str:
  """Returns our name of a published one, or with `column` 2 the reverse.

  Example:
    >>> rename("Transformer/encoderblock_3/LayerNorm_2/scale")
    'Transformer/encoderblock_3/LayerNorm_1/scale'
  """
  for row in NAMES:
    if re.search(row[0], name):
      return re.sub(row[0], row[column], name)
  return name
