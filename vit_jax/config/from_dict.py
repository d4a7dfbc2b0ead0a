"""Builds dataclasses from the JSON of other programs."""

import dataclasses
import typing
from typing import Any, TypeVar

from vit_jax.options import parse_value, shown, type_name, unexpected

T = TypeVar("T")


def at_least(low: int, default=None):
  """Returns a dataclass field for numbers that must be `low` or more."""
  return dataclasses.field(default=default, metadata={"low": low})


def from_dict(cls: type[T], values: Any, where: str, errors: list[str]) -> T:
  """Builds a dataclass whose fields all have defaults.

  Unknown names are ignored, null means the default, a text is not converted to
  a number, and one number may stand for a tuple.

  Args:
    cls: The dataclass. Types of fields: those of `options.parse_value`, `dict`,
      `dict[str, T]`, `Any`, other dataclasses, and tuples of them.
    values: Name of a field -> value, from JSON.
    where: Path of the values, for messages; "": the top of a file.
    errors: Gets a message for each wrong value; its field has the default.
  """
  if not isinstance(values, dict):
    prefix = f"{where}: " if where else ""
    errors.append(f"{prefix}got {shown(values)}, expected options by name.")
    return cls()
  read = {}
  for field in dataclasses.fields(cls):
    value = values.get(field.name)
    if value is None:
      continue
    path = f"{where}.{field.name}" if where else field.name
    try:
      result = _value(field.type, value, path, errors)
      low = field.metadata.get("low")
      numbers = result if isinstance(result, tuple) else (result,)
      if low is not None and any(number < low for number in numbers):
        raise ValueError(unexpected(path, shown(value), f"{low} or more"))
      read[field.name] = result
    except ValueError as e:
      errors.append(str(e))
  return cls(**read)


def _value(annotation: Any, value: Any, path: str, errors: list[str]) -> Any:
  """Returns the value, converted to the type.

  Raises:
    ValueError: The value has another type.
  """
  kinds = typing.get_args(annotation)
  if annotation is Any:
    return value
  if dataclasses.is_dataclass(annotation):
    return from_dict(annotation, value, path, errors)
  if dict in (annotation, typing.get_origin(annotation)):
    if not isinstance(value, dict):
      raise ValueError(unexpected(path, shown(value), "options by name"))
    kind = kinds[1] if kinds else Any
    return {k: _value(kind, v, f"{path}.{k}", errors) for k, v in value.items()}
  if kinds and dataclasses.is_dataclass(kinds[0]):
    if not isinstance(value, list):
      raise ValueError(unexpected(path, shown(value), "a list"))
    return tuple(
      _value(kinds[0], v, f"{path}[{i}]", errors) for i, v in enumerate(value)
    )
  if isinstance(value, str) and annotation not in (str, str | None):
    expected = f"a value of type {type_name(annotation)}"
    raise ValueError(unexpected(path, shown(value), expected))
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if is_number and Ellipsis in kinds:
    value = [value]
  return parse_value(annotation, value, path)
