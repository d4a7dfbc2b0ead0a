"""Weights from elsewhere: read a file, fit it to a model, say what was done."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import flax
import jax
import numpy as np
from etils import epath

from vit_jax import checkpoint
from vit_jax.models.resample import resample_posemb
from vit_jax.models.stacking import stack_blocks, unstack_blocks
from vit_jax.weights import google

# Trained for one set of classes: loaded as a whole or not at all.
HEAD = ("head/", "pre_logits/")


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters as they were found, under our names.

  Attributes:
    params: Flat, "a/b/c" -> array.
    metadata: format ("npz" or "checkpoint"); path; grid, the (rows, columns)
      of patches that the position table is for, or None where nobody knows;
      has_cls_row, whether row 0 of that table is the class token's; pre_logits,
      whether a tanh layer precedes the head; and what a checkpoint says more.
  """

  params: dict[str, Any]
  metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Report:
  """What became of the weights; paths as the file has them, unstacked.

  Attributes:
    path: Where they came from.
    loaded: Path -> shape, resized ones included.
    resized: Path -> (old grid, new grid).
    reinitialised: Paths of the model that keep their initial values.
    ignored: Paths of the file that the model has no use for.
  """

  path: str
  loaded: dict[str, tuple[int, ...]]
  resized: dict[str, tuple[tuple[int, int], tuple[int, int]]]
  reinitialised: tuple[str, ...]
  ignored: tuple[str, ...]


def read(
  path: str | os.PathLike, grid: tuple[int, int] | None = None
) -> Weights:
  """Reads weights of any known format.

  Args:
    path: A `.npz` of Google's (see `google.py`), or the folder of one of our
      runs, of its checkpoints, or of one step.
    grid: Rows and columns of patches of the position table, for a file that
      does not say and whose patches do not lie in a square.

  Raises:
    FileNotFoundError: Nothing is there.
    ValueError: The format is unknown, or the file holds no numbers.
  """
  file = epath.Path(path)
  if file.suffix == ".npz":
    if not file.exists():
      raise FileNotFoundError(
        f"got {str(path)!r}, which does not exist; expected a .npz of weights."
      )
    params, metadata = google.read(file), {"format": "npz"}
  elif file.is_file():
    raise ValueError(
      f"got {str(path)!r}, expected a .npz file, or the folder of a run, of"
      " its checkpoints or of one step."
    )
  else:
    nested, metadata = checkpoint.load_params(str(path))
    params = flax.traverse_util.flatten_dict(nested, sep="/")
    metadata = {**metadata, "format": "checkpoint"}
  grid = grid or metadata.get("grid")
  metadata |= {
    "path": str(path),
    "grid": tuple(grid) if grid else None,
    # Wherever there are both, the table begins with the class token's row:
    # `google.read` adds it to big_vision's files.
    "has_cls_row": google.POS_EMBEDDING in params and "cls" in params,
    "pre_logits": "pre_logits/kernel" in params,
  }
  return Weights(params, metadata)


def adapt(
  weights: Weights,
  target: dict[str, Any],
  *,
  grid: tuple[int, int],
  has_cls_row: bool,
  class_names: Sequence[str] | None = None,
) -> tuple[dict[str, Any], Report]:
  """Fits weights to a model, as the paper does before fine-tuning.

  Arrays are taken where path and shape agree; the position table is resampled
  to the model's grid; blocks are stacked or unstacked as the model has them.
  Head and pre_logits are taken together, if both agree in all shapes and the
  classes are not known to be others; otherwise the model keeps its initial
  ones. All else must agree.

  Args:
    weights: From `read`.
    target: Nested dict of what has a shape: the model's parameters.
    grid: Rows and columns of patches of the model's images.
    has_cls_row: Whether the model's position table has a row for the class
      token.
    class_names: Of the model's data; None where nobody knows them.

  Returns:
    Nested dict like `target` of numpy float32 arrays, None where the model
    keeps its initial values; and what was done.

  Raises:
    ValueError: Parameters are missing, superfluous, of another shape or not
      finite; the message lists them all.

  Source: arXiv:2010.11929, section 3.2.

  Example:
    >>> loaded, report = adapt(read(path), params, grid=(24, 24),
    ...                        has_cls_row=True)  # doctest: +SKIP
    >>> params = jax.tree.map(lambda fresh, new: fresh if new is None else new,
    ...                       params, loaded)  # doctest: +SKIP
  """
  unstacked = jax.eval_shape(unstack_blocks, target)
  expected = {k: tuple(v.shape) for k, v in _flatten(unstacked).items()}
  nested = flax.traverse_util.unflatten_dict(weights.params, sep="/")
  got = _flatten(unstack_blocks(nested))
  faults, resized = [], {}
  shapes = {k: np.shape(v) for k, v in got.items()}  # as in the file
  heads = [
    {k: v for k, v in tree.items() if k.startswith(HEAD)}
    for tree in (shapes, expected)
  ]
  reinitialised, ignored = (), ()
  old_names = weights.metadata.get("class_names")
  has_other_classes = bool(old_names and class_names) and list(
    old_names
  ) != list(class_names)
  if heads[0] != heads[1] or has_other_classes:
    reinitialised = tuple(sorted(heads[1]))
    ignored = tuple(sorted(heads[0].keys() - heads[1].keys()))

  name = google.POS_EMBEDDING
  if name in got and name in expected:
    try:
      old_grid = _old_grid(weights.metadata, np.shape(got[name])[1])
      if weights.metadata["has_cls_row"] == has_cls_row:
        if old_grid != grid:
          resized[name] = (old_grid, grid)
        got[name] = resample_posemb(
          np.asarray(got[name], np.float32), old_grid, grid, has_cls_row
        )
    except ValueError as e:
      faults.append(f"{name}: {e}")
      del got[name], expected[name]

  loaded = {}
  for path in sorted(expected.keys() | got.keys()):
    if path in reinitialised or path in ignored:
      loaded |= {path: None} if path in reinitialised else {}
    elif path not in got:
      faults.append(f"{path}: missing, expected shape {expected[path]}.")
    elif path not in expected:
      faults.append(
        f"{path}: got shape {shapes[path]}, expected no such parameter."
      )
    elif np.shape(got[path]) != expected[path]:
      faults.append(
        f"{path}: got shape {shapes[path]}, expected {expected[path]}."
      )
    else:
      loaded[path] = np.asarray(got[path], np.float32)
      if bad := int(np.sum(~np.isfinite(loaded[path]))):
        faults.append(
          f"{path}: got {bad} values that are NaN or infinite, expected none."
        )
  if faults:
    lines = "\n".join(f"  - {fault}" for fault in faults)
    raise ValueError(
      f"{len(faults)} fault{'s' * (len(faults) != 1)} in the weights of"
      f" {weights.metadata.get('path')} for this model:\n{lines}\nSet"
      " config.model (variant, pool, posemb) as these weights were trained, or"
      " take others."
    )
  report = Report(
    path=str(weights.metadata.get("path")),
    loaded={k: v.shape for k, v in loaded.items() if v is not None},
    resized=resized,
    reinitialised=reinitialised,
    ignored=ignored,
  )
  params = flax.traverse_util.unflatten_dict(loaded, sep="/")
  if "encoderblock" in target["Transformer"]:
    params = stack_blocks(params)
  return params, report


def format_report(report: Report) -> str:
  """Returns a table of what was loaded, resized, re-initialised, ignored."""
  count = sum(math.prod(shape) for shape in report.loaded.values())
  resized = (
    f"{path}: {old[0]}x{old[1]} -> {new[0]}x{new[1]}"
    for path, (old, new) in report.resized.items()
  )
  rows = {
    "weights": report.path,
    "loaded": f"{len(report.loaded)} arrays, {count:,} parameters",
    "resized": ", ".join(resized) or "nothing",
    "re-initialised": ", ".join(report.reinitialised) or "nothing",
    "ignored": ", ".join(report.ignored) or "nothing",
  }
  return "\n".join(f"{key:<16}{value}" for key, value in rows.items())


def _flatten(params: dict[str, Any]) -> dict[str, Any]:
  return flax.traverse_util.flatten_dict(params, sep="/")


def _old_grid(metadata: dict[str, Any], num_rows: int) -> tuple[int, int]:
  """The stated grid of a table, else the square that it must be.

  A file that states none is one of those published, which are all square.
  """
  if metadata["grid"]:
    return metadata["grid"]
  num_patches = num_rows - int(metadata["has_cls_row"])
  side = math.isqrt(num_patches)
  if side * side != num_patches:
    raise ValueError(
      f"got {num_patches} patches, expected a square number, since the file"
      " states no grid. State it: weights.read(path, grid=(rows, columns))."
    )
  return side, side
