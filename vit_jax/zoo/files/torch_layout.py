"""Key tables of PyTorch models: their arrays, and ours with the same numbers.

A key table is a list of `Row`s, one for each of our arrays: their name, our
name, and how the layouts differ. `timm_rows.py`, `hf_names.py` and
`openclip.py` have such tables.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.families import ModelConfig
from vit_jax.options import unexpected
from vit_jax.weights.weights_file import LazyArray, lazy, shorten

Shape = tuple[int, ...]


class Kind(NamedTuple):
  """How the layouts of their array and ours differ.

  axes: Axes of their array, for checks and messages; "" for any. D = heads *
    hd.
  shape: (their shape, number of heads) -> our shape.
  to_ours: (their array, our shape) -> our array.
  to_theirs: Our array -> their array.
  """

  axes: str
  shape: Callable[[Shape, int], Shape]
  to_ours: Callable[[np.ndarray, Shape], np.ndarray]
  to_theirs: Callable[[np.ndarray], np.ndarray]


def _same(axes: str) -> Kind:
  return Kind(axes, lambda s, _: s, lambda a, _: a, lambda a: a)


KINDS = {
  "same": _same(""),
  "tokens": _same("[1, n, width]"),
  # Ours: [in, out].
  "linear": Kind(
    "[out, in]", lambda s, _: s[::-1], lambda a, _: a.T, lambda a: a.T
  ),
  # Ours: [h, w, in, out].
  "conv": Kind(
    "[out, in, h, w]",
    lambda s, _: (s[2], s[3], s[1], s[0]),
    lambda a, _: a.transpose(2, 3, 1, 0),
    lambda a: a.transpose(3, 2, 0, 1),
  ),
  # Ours: [side, side, 3, out]; theirs is of flat patches, channels last.
  "patches": Kind(
    "[out, side * side * 3]",
    lambda s, _: (*(math.isqrt(s[1] // 3),) * 2, 3, s[0]),
    lambda a, shape: a.T.reshape(shape),
    lambda a: a.reshape(-1, a.shape[-1]).T,
  ),
  # Ours: [1, 1, width].
  "token": Kind(
    "[width]",
    lambda s, _: (1, 1, *s),
    lambda a, _: a[None, None],
    lambda a: a[0, 0],
  ),
  # Ours: [1, n, width].
  "table": Kind(
    "[n, width]",
    lambda s, _: (1, *s),
    lambda a, _: a[None],
    lambda a: a[0],
  ),
  # Ours: [in, out].
  "conv1x1": Kind(
    "[out, in, 1, 1]",
    lambda s, _: (s[1], s[0]),
    lambda a, _: a[:, :, 0, 0].T,
    lambda a: a.T[:, :, None, None],
  ),
  # Ours: [in, heads, hd].
  "to_heads": Kind(
    "[D, in]",
    lambda s, heads: (s[1], heads, s[0] // heads),
    lambda a, shape: a.T.reshape(shape),
    lambda a: a.reshape(a.shape[0], -1).T,
  ),
  # Ours: [heads, hd].
  "heads_bias": Kind(
    "[D]",
    lambda s, heads: (heads, s[0] // heads),
    lambda a, shape: a.reshape(shape),
    lambda a: a.reshape(-1),
  ),
  # Ours: [heads, hd, out].
  "from_heads": Kind(
    "[out, D]",
    lambda s, heads: (heads, s[1] // heads, s[0]),
    lambda a, shape: a.T.reshape(shape),
    lambda a: a.reshape(-1, a.shape[-1]).T,
  ),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """One of our arrays.

  Attributes:
    theirs: Name of their array that contains it.
    ours: Our flat name.
    kind: A key of `KINDS`.
    part: (i, n) if ours is the i-th of n equal parts of theirs, along axis 0.
  """

  theirs: str
  ours: str
  kind: str = "same"
  part: tuple[int, int] = (0, 1)


def norm_rows(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of a norm, scale and bias."""
  return [
    Row(f"{theirs}.weight", f"{ours}/scale"),
    Row(f"{theirs}.bias", f"{ours}/bias"),
  ]


def dense_rows(
  theirs: str,
  ours: str,
  kind: str = "linear",
  bias_kind: str = "same",
  part: tuple[int, int] = (0, 1),
) -> list[Row]:
  """Returns the rows of a linear layer or a convolution, kernel and bias."""
  return [
    Row(f"{theirs}.weight", f"{ours}/kernel", kind, part),
    Row(f"{theirs}.bias", f"{ours}/bias", bias_kind, part),
  ]


def in_proj_rows(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of torch.nn.MultiheadAttention's three projections."""
  leaves = (("weight", "kernel", "to_heads"), ("bias", "bias", "heads_bias"))
  return [
    Row(f"{theirs}_{leaf}", f"{ours}/{name}/{our_leaf}", kind, (i, 3))
    for i, name in enumerate(("query", "key", "value"))
    for leaf, our_leaf, kind in leaves
  ]


def count_blocks(names: Iterable[str], regex: str) -> int:
  """Returns the largest number of a block, plus one.

  Args:
    names: Names of arrays.
    regex: Matches the beginning of a block's name; its first group is the
      number. It should bound the digits, or a name such as "blocks.99999999"
      makes a table of so many blocks.
  """
  numbers = [int(m[1]) for n in names if (m := re.match(regex, n))]
  return max(numbers, default=-1) + 1


def length(array: LazyArray | None) -> int:
  """Returns the size of the last axis; 0 without an array, and for a scalar."""
  return array.shape[-1] if array is not None and array.shape else 0


def to_ours(
  rows: Iterable[Row], arrays: Mapping[str, LazyArray], num_heads: int
) -> tuple[dict[str, LazyArray], list[str]]:
  """Returns our arrays, for the rows whose array exists; and errors."""
  params, errors = {}, {}
  for row in rows:
    if row.theirs in arrays:
      try:
        params[row.ours] = _to_ours(row, arrays[row.theirs], num_heads)
      except ValueError as e:  # once of an array of several parts
        errors[f"{row.theirs}: {e}"] = None
  return params, [*errors]


def _to_ours(row: Row, array: LazyArray, num_heads: int) -> LazyArray:
  kind = KINDS[row.kind]
  axes = kind.axes.strip("[]").split(", ") if kind.axes else []
  has_rank = not axes or len(array.shape) == len(axes)
  pairs = list(zip(axes, array.shape, strict=False))
  if not has_rank or any(axis == "1" and size != 1 for axis, size in pairs):
    raise ValueError(f"got shape {array.shape}, expected {kind.axes}.")
  index, count = row.part
  if count > 1:
    size, rest = divmod(array.shape[0], count)
    if rest:
      raise ValueError(f"got {array.shape}, expected {count} equal parts.")
    start = index * size
    array = array.then(
      (size, *array.shape[1:]), lambda a: a[start : start + size]
    )
  if "D" in axes and array.shape[axes.index("D")] % num_heads:
    raise ValueError(
      f"got shape {array.shape}, expected {kind.axes} with D a multiple of"
      f" num_heads={num_heads}."
    )
  shape = kind.shape(array.shape, num_heads)
  return array.then(shape, lambda a: kind.to_ours(a, shape))


def to_theirs(
  rows: Sequence[Row], params: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Returns their arrays, and errors.

  Errors name rows that lack another part of the same array, and parameters
  without a row.
  """
  parts: dict[str, dict[int, np.ndarray]] = {}
  counts = {row.theirs: row.part[1] for row in rows}
  for row in rows:
    if row.ours in params:
      array = KINDS[row.kind].to_theirs(np.asarray(params[row.ours]))
      parts.setdefault(row.theirs, {})[row.part[0]] = array
  lacking = [
    row.ours
    for row in rows
    if row.theirs in parts and row.part[0] not in parts[row.theirs]
  ]
  errors = [f"{path}: missing beside the other parts." for path in lacking]
  known = {row.ours for row in rows}
  if unknown := [name for name in params if name not in known]:
    errors.append(
      f"got {shorten(unknown)}, which the library has no place for; --drop_head"
      " leaves out a head, and for timm the tanh layer before it."
    )
  arrays = {
    name: np.ascontiguousarray(
      np.concatenate([stacked[i] for i in range(counts[name])])
      if counts[name] > 1
      else stacked[0]
    )
    for name, stacked in parts.items()
    if len(stacked) == counts[name]
  }
  return arrays, errors


def add_zero_biases(params: dict[str, LazyArray]) -> None:
  """Adds biases of zero to attention without biases, in place."""
  for name, kernel in list(params.items()):
    path, _, leaf = name.rpartition("/")
    if leaf == "kernel" and path.endswith(("/query", "/key", "/value")):
      zeros = np.zeros(kernel.shape[1:], kernel.dtype)
      params.setdefault(f"{path}/bias", lazy(zeros))


def option_errors(
  model: ModelConfig, supported: Mapping[str, Sequence[Any]]
) -> list[str]:
  """Returns an error for each option that a library's model does not support.

  Args:
    model: The model to write.
    supported: Option -> values that the library's model supports.
  """
  errors = []
  for key, values in supported.items():
    if (value := getattr(model, key)) not in values:
      *first, last = map(repr, values)
      expected = f"{', '.join(first)} or {last}" if first else last
      errors.append(unexpected(f"config.model.{key}", repr(value), expected))
  return errors
