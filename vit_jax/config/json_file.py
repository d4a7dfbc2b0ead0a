"""JSON that others wrote: read, and its types checked."""

import json
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from etils import epath

from vit_jax.config.from_dict import from_dict
from vit_jax.options import shown

T = TypeVar("T")

MAX_WHOLE = 2**63 - 1  # where a whole number is asked for


class Whole(NamedTuple):
  """A shape of `faults`: a whole number within bounds, both included."""

  low: int = 0
  high: int = MAX_WHOLE


SIDE = Whole(1, 2**16)  # of an image, pixels
SIZE = (SIDE, SIDE)


def parse(text: str | bytes, where: str) -> Any:
  """Returns the value of a JSON text.

  Args:
    text: The text; bytes are UTF-8.
    where: The file, or the part of one, for messages.

  Raises:
    ValueError: It is no JSON.
  """
  try:
    return json.loads(text)
  except RecursionError:
    message = "too many brackets"
  except ValueError as e:
    message = str(e)
  raise ValueError(f"{where}: got no JSON ({message}); copy the file again.")


def read(path: str | os.PathLike, shape: Any = None) -> dict[str, Any]:
  """Returns the JSON object of a file; {} if there is none.

  Args:
    path: A file, on disk or wherever `epath` reads.
    shape: What it should be, see `faults`; None: any object.

  Raises:
    ValueError: It is no JSON object, see `parse`, or of another shape: all
      faults at once.
  """
  try:
    values = parse(_contents(path), str(path))
  except FileNotFoundError:
    return {}
  if not isinstance(values, dict):
    raise ValueError(
      f"{path}: got a {type(values).__name__}, expected options by name. Copy"
      " the file again."
    )
  check(values, shape or {}, str(path))
  return values


def _contents(path: str | os.PathLike) -> bytes:
  """Returns the bytes of a file.

  Raises:
    FileNotFoundError: There is none.
    ValueError: It cannot be read, as a folder.
  """
  try:
    return epath.Path(path).read_bytes()
  except FileNotFoundError:
    raise
  except OSError as e:
    raise ValueError(
      f"{path}: got no readable file ({e.strerror or e}), expected one; look at"
      " its type and its permissions."
    ) from None


def read_as(cls: type[T], path: str | os.PathLike) -> T:
  """Returns the JSON object of a file as a dataclass; `cls()` if there is none.

  Raises:
    ValueError: As `read` and `build`.
  """
  return build(cls, read(path), str(path))


def build(cls: type[T], values: Any, where: str, path: str = "") -> T:
  """Returns values of JSON as a dataclass, see `from_dict`.

  Names that it does not have are ignored, and null stands for a default.

  Args:
    cls: A dataclass with the names that are needed.
    values: As `parse` returns them.
    where: The file, for messages.
    path: Place of the values in the file, for messages; "": its top.

  Raises:
    ValueError: Values are of other types; the message lists them.
  """
  errors: list[str] = []
  if isinstance(values, dict):
    result = from_dict(cls, values, path, errors, is_foreign=True)
  else:
    key = f"{path}: " if path else ""
    errors = [f"{key}got {shown(values)}, expected options by name."]
  if errors:
    more = f" And {len(errors) - 10:,} more." * (len(errors) > 10)
    raise ValueError(
      f"{where}: {' '.join(errors[:10])}{more} Copy the file again, or remove"
      " what is wrong."
    )
  return result


def lines(
  path: str | os.PathLike,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
  """Yields the number, from 1, and the object of each line that is not blank.

  The object is None where the line holds none.
  """
  with epath.Path(path).open("rb") as stream:
    for number, line in enumerate(stream, 1):
      if not line.strip():
        continue
      try:
        value = json.loads(line)
      except (RecursionError, ValueError):
        value = None
      yield number, value if isinstance(value, dict) else None


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
