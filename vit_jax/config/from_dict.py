"""Builds dataclasses from the nested dicts of config files and JSON."""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vit_jax.names import is_path
from vit_jax.options import check_choice, nearest, parse_value, shown, type_name

T = TypeVar("T")
# (value, its path for messages, list that errors are added to) -> value of the
# field.
Reader = Callable[[Any, str, list[str]], Any]


def at_least(low: int, default=None):
  """Returns a dataclass field for numbers that must be `low` or more."""
  return dataclasses.field(default=default, metadata={"low": low})


def from_dict(
  cls: type[T],
  values: Any,
  where: str,
  errors: list[str],
  *,
  is_foreign: bool = False,
  readers: Mapping[str, Reader] | None = None,
) -> T:
  """Builds a dataclass whose fields all have defaults.

  Args:
    cls: The dataclass. Types of fields: those of `options.parse_value`, `dict`,
      `dict[str, T]`, `Any`, other dataclasses, and tuples of them.
    values: Name of a field -> value.
    where: Path of the values, for messages; "": the top of a file.
    errors: Gets a message for each wrong value; its field has the default.
    is_foreign: Whether another program may have written the values as JSON.
      Then unknown names are ignored, null means the default, a text is not
      converted to a number, and one number may stand for a tuple.
    readers: Name of a field -> function that reads its value.
  """
  if not isinstance(values, dict):
    prefix = f"{where}: " if where else ""
    errors.append(f"{prefix}got {shown(values)}, expected options by name.")
    return cls()
  fields = {f.name: f for f in dataclasses.fields(cls)}
  if not is_foreign:
    for key in [key for key in values if key not in fields]:
      near = nearest(key, fields) or f" {where} has {', '.join(fields)}."
      errors.append(f"{where}.{key}: no such option.{near}")
  read = {}
  for name, field in fields.items():
    value = values.get(name)
    if name not in values or is_foreign and value is None:
      continue
    path = f"{where}.{name}" if where else name
    if readers and name in readers:
      read[name] = readers[name](value, path, errors)
      continue
    try:
      result = _value(field.type, value, path, errors, is_foreign)
      named = result if isinstance(result, tuple) else (result,)
      if field.metadata.get("is_open"):
        named = tuple(v for v in named if v is None or not is_path(v))
      check_choice(named, field.metadata.get("choices"), path)
      low = field.metadata.get("low")
      numbers = result if isinstance(result, tuple) else (result,)
      if low is not None and any(number < low for number in numbers):
        raise ValueError(f"{path}: got {shown(value)}, expected {low} or more.")
      read[name] = result
    except ValueError as e:
      errors.append(str(e))
  return cls(**read)


def _value(
  annotation: Any, value: Any, path: str, errors: list[str], is_foreign: bool
) -> Any:
  """Returns the value, converted to the type.

  Raises:
    ValueError: The value has another type.
  """
  kinds = typing.get_args(annotation)
  if annotation is Any:
    return value
  if dataclasses.is_dataclass(annotation):
    return from_dict(annotation, value, path, errors, is_foreign=is_foreign)
  if dict in (annotation, typing.get_origin(annotation)):
    if not isinstance(value, dict):
      raise ValueError(f"{path}: got {shown(value)}, expected options by name.")
    if not kinds:
      return dict(value)
    return {
      k: _value(kinds[1], v, f"{path}.{k}", errors, is_foreign)
      for k, v in value.items()
    }
  if kinds and dataclasses.is_dataclass(kinds[0]):
    if not isinstance(value, list):
      raise ValueError(f"{path}: got {shown(value)}, expected a list.")
    return tuple(
      _value(kinds[0], v, f"{path}[{i}]", errors, is_foreign)
      for i, v in enumerate(value)
    )
  if is_foreign:
    if isinstance(value, str) and annotation not in (str, str | None):
      raise ValueError(
        f"{path}: got {shown(value)}, expected a value of type"
        f" {type_name(annotation)}."
      )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and Ellipsis in kinds:
      value = [value]
  return parse_value(annotation, value, path)
