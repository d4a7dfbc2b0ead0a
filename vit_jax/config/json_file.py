"""JSON that others wrote: read within limits, and its types looked at.

Size, number of values and depth are bounded before anything is built from the
text, so that a file cannot take more than a few hundred MB, or a second.
"""

import json
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from vit_jax.options import shown

MAX_BYTES = 16 * 2**20  # of a file; 43,000 names of classes take 3 MiB
MAX_VALUES = 500_000  # of a file
MAX_DEPTH = 100
MAX_LINES_BYTES = 256 * 2**20  # of a file with a value per line
MAX_LINE_BYTES = 2**20
MAX_WHOLE = 2**63 - 1  # where a whole number is asked for
MAX_NUMBER = 2**127 - 1  # of any; the FLOPs of a long run are beyond 2^63


class Whole(NamedTuple):
  """A shape of `faults`: a whole number within bounds, both included."""

  low: int = 0
  high: int = MAX_WHOLE


SIDE = Whole(1, 2**16)  # of an image, pixels
SIZE = (SIDE, SIDE)


def parse(text: str | bytes, where: str) -> Any:
  """Returns the value of a JSON text.

  Args:
    text: At most `MAX_BYTES`.
    where: The file, or the part of one, for messages.

  Raises:
    ValueError: It is no JSON; or has two values of one name, a number beyond
      128 bits, half a character (a lone surrogate), or more than the limits.
  """
  if len(text) > MAX_BYTES:
    raise ValueError(
      f"{where}: got more than {MAX_BYTES:,} bytes, expected a small JSON file."
      " Is it the right file?"
    )
  try:
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    # Commas within texts count, too: the true number is not larger.
    count = sum(map(text.count, ",[{")) + 1
    if count > MAX_VALUES:
      raise ValueError(f"about {count:,} values, expected {MAX_VALUES:,}")
    value = json.loads(text, object_pairs_hook=_unique)
    _check(value)
  except RecursionError:
    raise ValueError(_no_json(where, f"more than {MAX_DEPTH} levels")) from None
  except ValueError as e:
    raise ValueError(_no_json(where, str(e))) from None
  return value


def read(path: str | os.PathLike, shape: Any = None) -> dict[str, Any]:
  """Returns the JSON object of a file; {} if there is none.

  Args:
    path: A file, on disk or wherever `epath` reads.
    shape: What it should be, see `faults`; None: any object.

  Raises:
    ValueError: It is no JSON object, see `parse`, or of another shape: all
      faults at once.
  """
  if not epath.Path(path).exists():
    return {}
  values = parse(contents(path), str(path))
  if not isinstance(values, dict):
    raise ValueError(
      f"{path}: got a {type(values).__name__}, expected options by name. Copy"
      " the file again."
    )
  check(values, shape or {}, str(path))
  return values


def beginning(path: str | os.PathLike) -> bytes:
  """Returns the bytes of a file, or the first `MAX_BYTES` and one.

  Raises:
    OSError: It cannot be read.
  """
  with epath.Path(path).open("rb") as stream:
    return stream.read(MAX_BYTES + 1)


def contents(path: str | os.PathLike) -> bytes:
  """Returns what `beginning` does.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It cannot be read, as a folder.
  """
  try:
    return beginning(path)
  except FileNotFoundError:
    raise
  except OSError as e:
    raise ValueError(
      f"{path}: got no readable file ({e.strerror or e}), expected one; look at"
      " its type and its permissions."
    ) from None


def text_lines(path: str | os.PathLike) -> list[str]:
  """Returns the lines of a small text that are not blank, stripped.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It is no text, or has more than `MAX_BYTES`, or `MAX_VALUES`
      lines.
  """
  data = contents(path)
  try:
    lines = data.decode("utf-8").splitlines()
  except UnicodeDecodeError as e:
    raise ValueError(
      f"{path}: got bytes that are no text ({e.reason} at {e.start:,}),"
      " expected UTF-8. Is it the right file?"
    ) from None
  if len(data) > MAX_BYTES or len(lines) > MAX_VALUES:
    raise ValueError(
      f"{path}: got more than {MAX_BYTES:,} bytes, or {MAX_VALUES:,} lines;"
      " expected a small text. Is it the right file?"
    )
  return [line.strip() for line in lines if line.strip()]


def lines(
  path: str | os.PathLike,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
  """Yields the number, from 1, and the object of each line that is not blank;
  None: it has none.

  The names of values are kept once for all lines. A line beyond
  `MAX_LINE_BYTES` is none.

  Raises:
    ValueError: The file has more than `MAX_LINES_BYTES`.
  """
  names: dict[str, str] = {}

  def row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {names.setdefault(k, k): v for k, v in pairs}

  with epath.Path(path).open("rb") as stream:
    total, number = 0, 1
    while line := stream.readline(MAX_LINE_BYTES):
      total += len(line)
      if total > MAX_LINES_BYTES:
        raise ValueError(
          f"{path}: got more than {MAX_LINES_BYTES:,} bytes, expected a file"
          " of lines; move it away, or keep its last lines (tail)."
        )
      this, number = number, number + line.endswith(b"\n")
      if not line.strip():
        continue
      try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=row)
        _check(value)
      except (ValueError, RecursionError):
        value = None
      yield this, value if isinstance(value, dict) else None


def check(values: Any, shape: Any, where: str) -> None:
  """Raises ValueError with all that is not of a shape, see `faults`."""
  if found := list(faults(values, shape, "")):
    more = f" And {len(found) - 10:,} more." * (len(found) > 10)
    raise ValueError(
      f"{where}: {' '.join(found[:10])}{more} Copy the file again, or remove"
      " what is wrong."
    )


def faults(value: Any, shape: Any, where: str) -> Iterator[str]:
  """Yields where a value is not of a shape.

  Args:
    value: As `parse` returns it; null is of every shape, as it means unknown.
    shape: `str`, `bool`; `float`, a finite number; `int`, a whole number from
      0, or a `Whole`; [shape], a list of such; (shape, shape), a list of two
      such; {name: shape}, an object, whose other names are not looked at;
      {str: shape}, an object with any names.
    where: Path of the value, for messages.
  """
  if value is None:
    return
  shape = Whole() if shape is int else shape
  if isinstance(shape, Whole):
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and shape.low <= value <= shape.high):
      yield _fault(where, value, f"a whole number from {shape.low:,}")
  elif shape is float:
    if not is_number(value):
      yield _fault(where, value, "a finite number")
  elif isinstance(shape, type):
    if not isinstance(value, shape):
      what = {str: "text", bool: "true or false", dict: "options by name"}
      yield _fault(where, value, what[shape])
  elif isinstance(shape, dict):
    if not isinstance(value, dict):
      yield _fault(where, value, "options by name")
      return
    for key, inner in shape.items():
      for name in value if key is str else [key]:
        path = f"{where}.{name}" if where else str(name)
        if key is str and value[name] is None:
          yield _fault(path, None, "a value")
        yield from faults(value.get(name), inner, path)
  elif not isinstance(value, list):
    yield _fault(where, value, "a list")
  elif isinstance(shape, tuple) and len(value) != len(shape):
    yield _fault(where, value, f"{len(shape)} values")
  else:
    shapes = shape if isinstance(shape, tuple) else shape * len(value)
    for i, (one, inner) in enumerate(zip(value, shapes, strict=True)):
      if one is None:
        yield _fault(f"{where}[{i}]", one, "a value")
      yield from faults(one, inner, f"{where}[{i}]")


def is_number(value: Any) -> bool:
  """Whether this is a finite number: JSON written by Python may have NaN."""
  is_real = isinstance(value, int | float) and not isinstance(value, bool)
  return is_real and math.isfinite(value)


def _fault(where: str, value: Any, expected: str) -> str:
  return f"{where[:200]}: got {shown(value)}, expected {expected}."


def _no_json(where: str, what: str) -> str:
  return f"{where}: got no JSON ({what}); copy the file again."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    names = [k for k, _ in pairs]
    twice = next(k for k in found if names.count(k) > 1)
    raise ValueError(f"two values of the name {shown(twice)}")
  return found


def _check(value: Any) -> None:
  """Raises ValueError beyond the depth, 128 bits, or half a character."""
  level = [value]
  for _ in range(MAX_DEPTH):
    below = []
    for one in level:
      if isinstance(one, dict):
        for key in one:
          key.encode()
        below += one.values()
      elif isinstance(one, list):
        below += one
      elif isinstance(one, str):
        one.encode()  # fails for a lone surrogate
      elif isinstance(one, int) and abs(one) > MAX_NUMBER:
        raise ValueError("a whole number beyond 128 bits")
    if not below:
      return
    level = below
  raise ValueError(f"more than {MAX_DEPTH} levels")
