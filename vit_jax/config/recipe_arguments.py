"""Arguments of config files, the text after the colon of --config."""

from collections.abc import Collection, Mapping

from vit_jax.options import nearest


def arguments(text: str, known: dict[str, str]) -> dict[str, str]:
  """Parses the argument of a config, "model=B/16,res=384".

  Args:
    text: The text after the colon.
    known: Name -> default.

  Raises:
    ValueError: A name is unknown.

  Example:
    >>> arguments("res=384", {"model": "B/16", "res": "224"})
    {'model': 'B/16', 'res': '384'}
  """
  values = dict(known)
  for part in text.split(",") if text else ():
    key, _, value = part.partition("=")
    if key not in known:
      raise ValueError(
        f"got argument {key!r}, expected {', '.join(known)}."
        + nearest(key, known)
      )
    values[key] = value
  return values


def check_choices(
  args: dict[str, str], choices: Mapping[str, Collection[str]]
) -> None:
  """Checks arguments that take one of several values.

  Args:
    args: As `arguments` returns them.
    choices: Name -> the values that it takes.

  Raises:
    ValueError: An argument has another value (with the nearest one).
  """
  for name, known in choices.items():
    if args[name] not in known:
      raise ValueError(
        f"got {name}={args[name]}, expected one of"
        f" {', '.join(filter(None, known))}." + nearest(args[name], known)
      )


def number(args: dict[str, str], name: str) -> float:
  """Returns an argument as a number above 0.

  Raises:
    ValueError: It is none.
  """
  try:
    value = float(args[name])
  except ValueError:
    value = 0.0
  if not 0 < value < float("inf"):
    raise ValueError(f"got {name}={args[name]}, expected a number above 0.")
  return value
