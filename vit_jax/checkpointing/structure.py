"""How the arrays of a config differ from those in a checkpoint.

Such a difference means another model or optimizer, not a damaged checkpoint.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.digests import Digest
from vit_jax.param_groups import path_of

MAX_DIFFERENCES = 6  # differences that are listed one by one


def errors(
  folder: epath.Path,
  stored: Mapping[str, Mapping[str, Digest]],
  items: Mapping[str, Any],
) -> list[str]:
  """Returns how a config's state differs from the one that was written.

  Args:
    folder: Folder of the step.
    stored: "params" and "train" -> path -> digest, as written.
    items: "params" and "train" -> tree of `jax.ShapeDtypeStruct`, of the
      config.

  Returns:
    One text, or none.
  """
  advice = (
    "resume with the config that wrote it"
    f" ({folder.parent.parent}/config.json), or choose another --workdir."
  )
  if differences := _differences(stored["params"], items["params"]):
    texts = listed(differences, MAX_DIFFERENCES)
    return [f"{folder} does not fit config.model: {texts}; {advice}"]
  if differences := _differences(stored["train"], items["train"]):
    return [
      f"{folder}: the optimizer's state does not fit config.optim (name,"
      f" ema_decay, accumulator_dtype): {listed(differences, 1)}; {advice}"
    ]
  return []


def _differences(stored: Mapping[str, Digest], tree: Any) -> list[str]:
  """Returns arrays that only one side has, or that differ in type or shape."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  want = {path_of(path): _type(leaf) for path, leaf in leaves}
  got = {path: _type(digest) for path, digest in stored.items()}
  return [
    f"{key} is {got.get(key, 'missing')}, expected {want.get(key, 'no array')}"
    for key in sorted(got.keys() | want.keys())
    if got.get(key) != want.get(key)
  ]


def _type(array: Digest | jax.ShapeDtypeStruct) -> str:
  return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def listed(texts: list[str], most: int) -> str:
  """Joins the first texts, and counts the others."""
  more = len(texts) - most
  return "; ".join(texts[:most]) + f"; and {more} more" * (more > 0)
