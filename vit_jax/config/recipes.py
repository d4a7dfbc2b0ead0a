"""Functions for config files: parsing of the argument, few-shot evaluators."""

from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.options import check_choice, unexpected

# Data set -> (split of the shots, split that is scored), as in big_vision
# (configs/common_fewshot.py). The first 65,000 images of ImageNet have at least
# 30 of every class.
FEWSHOT_SETS = {
  "caltech101": ("train", "test"),
  "cars196": ("train", "test"),
  "cifar100": ("train", "test"),
  "dtd": ("train", "test"),
  "oxford_iiit_pet": ("train", "test"),
  "uc_merced": ("train[:1000]", "train[1000:]"),
  "imagenet2012": ("train[:65000]", "validation"),
}


def arguments(text: str, known: dict[str, str]) -> dict[str, str]:
  """Parses the argument of a config, "model=B/16,res=384".

  A value may contain commas: a comma ends it only if a name and "=" follow.

  Args:
    text: The text after the colon.
    known: Name -> default value.

  Raises:
    ValueError: A name is unknown.

  Example:
    >>> arguments("res=384", {"model": "B/16", "res": "224"})
    {'model': 'B/16', 'res': '384'}
    >>> arguments("path=/a, b/c,res=8", {"path": "", "res": "224"})
    {'path': '/a, b/c', 'res': '8'}
  """
  values, key = dict(known), ""
  for part in text.split(",") if text else ():
    name, equals, value = part.partition("=")
    if key and not (equals and name.isidentifier()):
      values[key] += f",{part}"
      continue
    key = name
    check_choice(key, known, "argument")
    values[key] = value
  return values


def check_choices(
  args: dict[str, str], choices: Mapping[str, Collection[str]]
) -> None:
  """Checks arguments that take one of several values.

  Args:
    args: Result of `arguments`.
    choices: Name -> its possible values.

  Raises:
    ValueError: An argument has another value; the message has the nearest one.
  """
  for name, known in choices.items():
    if args[name] not in known:
      check_choice(args[name], [*filter(None, known)], name)


def number(args: dict[str, str], name: str) -> float:
  """Returns an argument as a number above 0.

  Raises:
    ValueError: The argument is not a number above 0.
  """
  try:
    value = float(args[name])
  except ValueError:
    value = 0.0
  if not 0 < value < float("inf"):
    raise ValueError(unexpected(name, args[name], "a number above 0"))
  return value


def whole_number(args: dict[str, str], name: str, low: int = 1) -> int:
  """Returns an argument as a whole number of at least `low`.

  Raises:
    ValueError: The argument is not such a number.
  """
  text = args[name]
  if not text.isdecimal() or int(text) < low:
    expected = f"a whole number, {low} or more"
    raise ValueError(unexpected(name, text, expected))
  return int(text)


def fewshot_evals(**options: Any) -> dict[str, dict[str, Any]]:
  """Returns an evaluator "fewshot_<data set>" for each of `FEWSHOT_SETS`.

  All are in the group "fewshot", so that their mean is written, too.

  Args:
    **options: Options of every evaluator.
  """
  return {
    f"fewshot_{dataset}": {
      "kind": "fewshot",
      "dataset": dataset,
      "train_split": support,
      "split": test,
      "group": "fewshot",
      **options,
    }
    for dataset, (support, test) in FEWSHOT_SETS.items()
  }
