"""Options as typed fields, and values from the text of the command line."""

import dataclasses
import difflib
import importlib.util
import math
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator

# Modules of what only the extra `train` installs.
NOT_LEAN = (
  "sklearn",
  "tensorboard",
  "tensorflow",
  "tensorflow_datasets",
  "threadpoolctl",
)
NEAR = 0.76  # share of letters that a misspelt word has in common
MOST_ERRORS = 50  # a config file of another program has thousands

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 12
_SHORT.maxlevel = 3


def shown(value) -> str:
  """Returns a value as Python writes it, shortened if it is long.

  Example:
    >>> shown([1, "a"]), len(shown("a" * 10**6))
    ("[1, 'a']", 120)
  """
  return _SHORT.repr(value)


def at_home(args: list[str]) -> list[str]:
  """Expands `~/` in arguments where bash does not.

  bash leaves it unchanged after an equals sign, as in
  --config=folder:path=~/birds.
  """
  home = os.path.expanduser("~")
  return [re.sub("=~(?=/)", lambda _: f"={home}", arg) for arg in args]


class ConfigError(ValueError):
  """All errors of a config, one per line."""

  def __init__(self, errors):
    self.errors = tuple(errors)
    count = len(self.errors)
    lines = "\n".join(f"  - {error}" for error in self.errors[:MOST_ERRORS])
    lines += f"\n  - and {count - MOST_ERRORS:,} more" * (count > MOST_ERRORS)
    super().__init__(
      f"{count} error{'s' * (count != 1)} in the configuration:\n{lines}"
    )


class Limit(typing.NamedTuple):
  """Which numbers an option may have: in words, and as a function."""

  expected: str
  holds: Callable[[float], bool]


ABOVE_0 = Limit("more than 0", lambda x: x > 0)
AT_LEAST_0 = Limit("0 or more", lambda x: x >= 0)
AT_LEAST_1 = Limit("1 or more", lambda x: x >= 1)
SHARE = Limit("a share from 0 to below 1", lambda x: 0 <= x < 1)


def option(
  default,
  doc: str,
  choices: dict[str, str] | None = None,
  is_rare: bool = False,
  is_open: bool = False,
  limit: Limit | None = None,
):
  """Returns a dataclass field that `--help` can describe.

  Args:
    default: Value if nothing is set.
    doc: One line with the meaning of the option and its unit.
    choices: Every allowed value with its meaning; None to allow any value.
    is_rare: Whether only `--help=all` describes it. Such options are the
      numerics of published files, which importing the weights sets.
    is_open: Whether a value may also be an import path; see `vit_jax.names`.
    limit: Which numbers are allowed; None to allow any.
  """
  metadata = {
    "doc": doc,
    "choices": choices or {},
    "is_rare": is_rare,
    "is_open": is_open,
    "limit": limit,
  }
  return dataclasses.field(default=default, metadata=metadata)


def nearest(word: str, known: Iterable[str]) -> str:
  """Returns " Did you mean 'x'?" with the known word nearest to `word`, or "".

  A known word is near if it has nearly the same letters, or the same letters in
  another order or number, or if it is the only one that begins with `word`, as
  "token" with "tok", or has it as a part, as "total_epochs" has "epochs". More
  distant words may have any other meaning, and so may those with only another
  first letter, as "patch" and "batch".

  Example:
    >>> nearest("optimiser", ["optimizer"]), nearest("opset", ["posemb"])
    (" Did you mean 'optimizer'?", '')
    >>> nearest("epochs", ["total_epochs", "lr"])
    " Did you mean 'total_epochs'?"
  """
  known, word = sorted(known), word[:100]
  lowered = {k.lower(): k for k in known}
  close = _close(word, known) or _close(word.lower(), lowered)
  if not close:
    letters = set(word.lower())
    close = [k for k in lowered if set(k) == letters] or [
      k
      for k in lowered
      if (len(word) >= 3 and k.startswith(word.lower()))
      or (len(word) > 3 and word.lower() in re.split(r"[\W_]+", k))
    ]
    close = close if len(close) == 1 else []
  return f" Did you mean {lowered.get(close[0], close[0])!r}?" if close else ""


def _close(word: str, known: Iterable[str]) -> list[str]:
  """Returns the words with nearly the same letters, the nearest first."""
  return [
    k
    for k in difflib.get_close_matches(word, known, cutoff=NEAR)
    if k[:1] == word[:1] or k[1:2] != word[1:2]
  ]


def not_installed(packages: Iterable[str], extra: str) -> str | None:
  """Returns how to install the missing packages of an extra, or None.

  Args:
    packages: Names to import.
    extra: Name of the extra of vit_jax that installs them.
  """
  missing = [p for p in packages if importlib.util.find_spec(p) is None]
  if not missing:
    return None
  return (
    f"got no {', '.join(missing)}, expected installed packages:"
    f" install vit_jax with its extra '{extra}' (README.md, Install)."
  )


def parse_value(annotation, value, where: str):
  """Converts a value, or its text on the command line, to a type.

  Raises:
    ValueError: It is of another type; the message names `where`.
  """
  expected = f"a value of type {type_name(annotation)}"
  error = ValueError(unexpected(where, shown(value), expected))
  annotation, is_optional = _without_none(annotation)
  if is_optional and (value is None or value in ("None", "none", "null")):
    return None
  if typing.get_origin(annotation) is tuple:
    if isinstance(value, str):
      value = [v for v in _elements(value) if v.strip()]
    if not isinstance(value, list | tuple):
      raise error
    element, *_, last = typing.get_args(annotation)
    if last is not Ellipsis and len(value) != len(typing.get_args(annotation)):
      raise error
    return tuple(parse_value(element, v, where) for v in value)
  try:
    if annotation is bool:
      if isinstance(value, str):
        value = {"true": True, "1": True, "false": False, "0": False}[
          value.lower()
        ]
      if not isinstance(value, bool):
        raise error
      return value
    if isinstance(value, bool):
      raise error
    if annotation is int:
      number = int(value.replace("_", "")) if isinstance(value, str) else value
      if not math.isfinite(number) or number != int(number):
        raise error
      return int(number)
    if annotation is float:
      if not math.isfinite(float(value)):
        raise error
      return float(value)
  except (KeyError, OverflowError, TypeError, ValueError):
    raise error from None
  if not isinstance(value, str):
    raise error
  return value


def _elements(text: str) -> list[str]:
  """Splits a text at its commas, except for those inside brackets.

  Brackets around the whole text are left out.

  Example:
    >>> _elements("(1, 2)"), _elements("a:B(c=1,d=2),e")
    (['1', ' 2'], ['a:B(c=1,d=2)', 'e'])
  """
  parts, depth = [""], 0
  for letter in text.lstrip("([ "):
    if letter in ")]" and not depth:
      continue  # the end of the whole text
    depth += (letter in "([") - (letter in ")]")
    if letter == "," and not depth:
      parts.append("")
    else:
      parts[-1] += letter
  return parts


def type_name(annotation) -> str:
  """Returns the name of a type for messages, such as "whole number or None"."""
  annotation, is_optional = _without_none(annotation)
  if is_optional:
    return f"{type_name(annotation)} or None"
  if typing.get_origin(annotation) is tuple:
    element, *_, last = kinds = typing.get_args(annotation)
    many = f"{type_name(element)}s, comma-separated"
    return many if last is Ellipsis else f"{len(kinds)} {many}"
  return {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true/false",
  }[annotation]


def _without_none(annotation) -> tuple[typing.Any, bool]:
  """Splits `X | None` into X and whether None is allowed."""
  options = typing.get_args(annotation)
  origin = typing.get_origin(annotation)  # typing.Union of Optional[X]
  if origin in (types.UnionType, typing.Union) and type(None) in options:
    return next(o for o in options if o is not type(None)), True
  return annotation, False


def check_choice(value, choices: Iterable[str] | None, where: str) -> None:
  """Raises if a value, or one of a tuple, is not among the choices.

  Raises:
    ValueError: The message names `where`, the choices and the nearest one.
  """
  for one in value if isinstance(value, tuple) else (value,):
    if choices and one is not None and one not in choices:
      expected, near = (
        f"one of {', '.join(choices)}",
        nearest(str(one), choices),
      )
      raise ValueError(unexpected(where, shown(one), expected, near.lstrip()))


def unexpected(
  option: str, value: object, expected: str, hint: str = ""
) -> str:
  """Returns the sentence on a wrong value of an option.

  Args:
    option: Where the value stands, such as "config.optim.lr" or "--size".
    value: What was got.
    expected: What is allowed, in words.
    hint: A sentence on what to do, if that is not plain from `expected`.

  Example:
    >>> unexpected("config.optim.lr", -1.0, "a number above 0")
    'config.optim.lr: got -1.0, expected a number above 0.'
  """
  return f"{option}: got {value}, expected {expected}. {hint}".rstrip()


def limit_errors(options: object, where: str) -> Iterator[str]:
  """Yields an error for each option outside of its limit.

  Args:
    options: A dataclass with fields made by `option`.
    where: Path of the options, such as "config.optim".
  """
  for field in dataclasses.fields(options):
    limit, value = field.metadata.get("limit"), getattr(options, field.name)
    if limit and value is not None and not limit.holds(value):
      yield unexpected(f"{where}.{field.name}", value, limit.expected)
