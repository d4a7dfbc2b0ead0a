"""Reads JSON of this or another program, and checks its types."""

import json
import math
import os
from typing import Any, TypeVar

from vit_jax.config.from_dict import from_dict
from vit_jax.options import unexpected

T = TypeVar("T")


def parse(text: str | bytes, where: str) -> Any:
  """Returns the value of a JSON text.

  Args:
    text: The text; bytes are UTF-8.
    where: The file, or a part of it, for messages.

  Raises:
    ValueError: The text is not JSON.
  """
  try:
    return json.loads(text)
  except ValueError as e:
    raise ValueError(f"{where}: got no JSON ({e}).") from None


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the JSON object in a file; {} if there is no file.

  Args:
    path: A file on disk or in a bucket.

  Raises:
    ValueError: The path cannot be read, or its content is no JSON object.
  """
  from vit_jax.paths import run_path  # --help does not wait for it

  try:
    text = run_path(path).read_bytes()
  except FileNotFoundError:
    return {}
  except OSError as e:
    raise ValueError(f"{path}: cannot be read: {e.strerror or e}.") from None
  values = parse(text, str(path))
  if not isinstance(values, dict):
    got = type(values).__name__
    raise ValueError(unexpected(str(path), got, "a JSON object"))
  return values


def read_as(cls: type[T], path: str | os.PathLike) -> T:
  """Returns the JSON object in a file as a dataclass; `cls()` without a file.

  Raises:
    ValueError: See `read` and `build`.
  """
  return build(cls, read(path), str(path))


def build(cls: type[T], values: Any, where: str, path: str = "") -> T:
  """Returns JSON values as a dataclass.

  Unknown names are ignored, and null means the default (see `from_dict`).

  Args:
    cls: A dataclass with the names that the caller needs.
    values: Values that `parse` returned.
    where: The file, for messages.
    path: Path of the values in the file, for messages; "": its top.

  Raises:
    ValueError: Values have other types; the message lists all of them.
  """
  errors: list[str] = []
  result = from_dict(cls, values, path, errors)
  if errors:
    raise ValueError(f"{where}: {' '.join(errors)}")
  return result


def is_number(value: Any) -> bool:
  """Whether the value is a finite number; JSON of Python may have NaN."""
  is_real = isinstance(value, int | float) and not isinstance(value, bool)
  return is_real and math.isfinite(value)
