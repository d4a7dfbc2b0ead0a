"""Classes and functions by name: a short name of a table, or an import path.

An import path is `my_lab.mae:MAE`, the attribute `MAE` of the module
`my_lab.mae`. It may stand wherever a config has a short name. Some take
arguments, too: `my_lab.monitor:Cosine(decay=0.9)`.
"""

import ast
import collections
import dataclasses
import importlib
import inspect
import re
import traceback
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from vit_jax.options import check_choice, nearest, type_name, unexpected

T = TypeVar("T")

_NAME = r"[A-Za-z_]\w*"
_PATH = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*")
FORM = "package.module:Class"


def split(text: str) -> tuple[str, str | None]:
  """Splits a name from the arguments in brackets behind it.

  Returns:
    The name, and the text between the brackets; None without brackets.

  Example:
    >>> split("my_lab.monitor:Cosine(decay=0.9)")
    ('my_lab.monitor:Cosine', 'decay=0.9')
    >>> split("my_lab.mae:MAE")
    ('my_lab.mae:MAE', None)
  """
  name, bracket, arguments = text.partition("(")
  if not bracket or not arguments.endswith(")"):
    return text, None
  return name, arguments[:-1]


def keywords(text: str, where: str) -> dict[str, Any]:
  """Returns the keyword arguments in a text: Python's literals by name.

  Args:
    text: The text between brackets, such as "decay=0.9, axes=(0, 1)".
    where: The option that has the text, for messages.

  Raises:
    ValueError: The text is anything else.

  Example:
    >>> keywords("decay=0.9, axes=(0, 1)", "config.callbacks")
    {'decay': 0.9, 'axes': (0, 1)}
  """
  try:
    call = ast.parse(f"f({text})", mode="eval").body
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
      if not call.args and all(k.arg for k in call.keywords):
        return {k.arg: ast.literal_eval(k.value) for k in call.keywords}
  except (SyntaxError, ValueError):
    pass
  expected = "arguments as Python writes them, such as decay=0.9, name='a'"
  raise ValueError(unexpected(where, f"({text})", expected))


class Table(collections.UserDict):
  """Short name -> class or function; a text is imported when it is read.

  So a run imports only the kinds that it has.

  Example:
    >>> table = Table({"counter": "collections:Counter"})
    >>> table["counter"]
    <class 'collections.Counter'>
  """

  def __getitem__(self, name):
    value = super().__getitem__(name)
    if isinstance(value, str):
      module, _, attribute = value.partition(":")
      value = getattr(importlib.import_module(module), attribute)
    return value


def is_path(name: str) -> bool:
  """Whether a name, possibly with arguments, has the form of an import path.

  Example:
    >>> [is_path(n) for n in ("a.b:C", "a:C(d=1)", "vit", "folder:/a")]
    [True, True, False, False]
  """
  return bool(_PATH.fullmatch(split(name)[0]))


def resolve(
  name: str, table: Mapping[str, T], where: str, base: type | None = None
) -> T:
  """Returns what a short name or an import path, without arguments, names.

  Args:
    name: A key of the table, or an import path. Modules are imported.
    table: Short name -> class or function.
    where: The option that has the name, for messages.
    base: The class that an imported one must be a subclass of; None: anything.
      If it has options (a dataclass), those of the subclass are checked.

  Raises:
    ValueError: There is no such short name, module or attribute, the import of
      the module fails, or the class has another base or unusable options.
  """
  if name in table:
    return table[name]
  if not _PATH.fullmatch(name):
    own = [f"an import path {FORM}"] if ":" in name or not table else []
    check_choice(name, [*table, *own], where)
  module_name, _, attributes = name.partition(":")
  found: Any = _module(name, module_name, where)
  for attribute in attributes.split("."):
    if not hasattr(found, attribute):
      raise ValueError(
        f"{where}: got {name!r}, but {module_name} has no {attributes}."
        + nearest(attribute, vars(found))
      )
    found = getattr(found, attribute)
  if base is not None and not (
    inspect.isclass(found) and issubclass(found, base)
  ):
    expected = f"a subclass of {base.__module__}.{base.__name__}"
    raise ValueError(unexpected(where, repr(name), expected))
  if dataclasses.is_dataclass(base):
    _check_options(found, f"{where}: got {name!r}")
  return found


def _check_options(cls: type, got: str) -> None:
  """Raises if an option is not a field, or has a type without a parser.

  Under `from __future__ import annotations` a type is a text, which becomes the
  type here.
  """
  for key, value in vars(cls).items():
    if isinstance(value, dataclasses.Field):
      what = f"option {key!r} is no field of a frozen dataclass"
      raise ValueError(f"{got}, whose {what}.")
  for field in dataclasses.fields(cls):
    try:
      if isinstance(field.type, str):
        field.type = typing.get_type_hints(cls)[field.name]
      type_name(field.type)
    except (KeyError, NameError, TypeError, ValueError):
      expected = "str, int, float, bool, tuple[X, ...] or X | None"
      what = f"option {field.name!r} has the type {field.type}"
      raise ValueError(f"{got}, whose {what}, expected {expected}.") from None


def _module(name: str, module: str, where: str) -> Any:
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as e:
    missing = f"but there is no module {e.name or module!r} on PYTHONPATH"
    raise ValueError(f"{where}: got {name!r}, {missing}.") from e
  except Exception as e:  # a module of one's own may raise anything
    last = traceback.extract_tb(e.__traceback__)[-1]
    line = getattr(e, "lineno", None) or last.lineno
    file = getattr(e, "filename", None) or last.filename
    raise ValueError(
      f"{where}: got {name!r}, whose import fails in {file}, line {line}:"
      f" {type(e).__name__}: {e}."
    ) from e
