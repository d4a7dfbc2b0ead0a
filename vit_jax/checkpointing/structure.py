"""How the state of a config differs from the one that a checkpoint has.

So that another model or optimizer is told from a damaged checkpoint.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.digests import Digest
from vit_jax.sharding import path_of

MAX_DIFFERENCES = 6  # listed one by one


def errors(
  folder: epath.Path, got: Mapping[str, Any], want: Mapping[str, Any]
) -> list[str]:
  """Returns how a config's state differs from the one that was written.

  Args:
    folder: Of the step, for the text.
    got: "params" and "train" -> tree of arrays, shapes or digests, as written.
    want: The same of the config.

  Returns:
    One text, or none.
  """
  advice = (
    "resume with the config that wrote it"
    f" ({folder.parent.parent}/config.json), or choose another --workdir."
  )
  if found := _shape_errors(got["params"], want["params"], folder, advice):
    return found
  got, want = _types(got["train"]), _types(want["train"])
  differing = [
    k for k in sorted(got.keys() | want) if got.get(k) != want.get(k)
  ]
  if not differing:
    return []
  texts = [
    f"{k} is {_array(got.get(k))}, expected {_array(want.get(k))}"
    for k in differing
  ]
  return [
    f"{folder}: the optimizer's state does not fit config.optim (name,"
    f" ema_decay, accumulator_dtype): {listed(texts, 1)}; {advice}"
  ]


def _types(tree) -> dict[str, tuple[str, tuple[int, ...]]]:
  return {
    path: (np.dtype(x.dtype).name, tuple(x.shape))
    for path, x in _flat(tree).items()
  }


def _array(found: tuple[str, tuple[int, ...]] | None) -> str:
  return f"{found[0]}{list(found[1])}" if found else "not there"


def _flat(tree) -> dict[str, Any]:
  """Returns path -> leaf of a tree of arrays, shapes or digests."""
  leaves = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=lambda x: isinstance(x, Digest)
  )
  return {path_of(path): leaf for path, leaf in leaves}


def _shape_errors(got, want, where: epath.Path, advice: str) -> list[str]:
  """Returns which parameters are missing, extra, or of another shape."""
  got, want = (
    {path: tuple(x.shape) for path, x in _flat(tree).items()}
    for tree in (got, want)
  )
  differences = [
    f"{key} has {_shape(got.get(key))}, expected {_shape(want.get(key))}"
    for key in sorted(got.keys() | want.keys())
    if got.get(key) != want.get(key)
  ]
  if not differences:
    return []
  told = listed(differences, MAX_DIFFERENCES)
  return [f"{where} does not fit config.model: {told}; {advice}"]


def listed(texts: list[str], most: int) -> str:
  """Joins texts, the first of them in full."""
  more = len(texts) - most
  return "; ".join(texts[:most]) + f"; and {more} more" * (more > 0)


def _shape(shape: tuple[int, ...] | None) -> str:
  return "no such parameter" if shape is None else f"shape {shape}"
