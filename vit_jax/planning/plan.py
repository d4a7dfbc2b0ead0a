"""The command `vit-jax plan`: plans one run, or searches for a faster one."""

import json
import math
import re
import sys
from typing import Any

from vit_jax.config import Config, ConfigError, cli
from vit_jax.distributed import signals
from vit_jax.planning import planner
from vit_jax.planning.search import Search
from vit_jax.planning.table import table
from vit_jax.planning.topology import describe

_PRICE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(\D*)")


def main(args: cli.Args) -> None:
  """Plans or searches, and prints the result."""
  wants_json = args.flags["json"] == "true"
  try:
    errors = list(args.errors)
    if not args.flags["topology"]:
      errors.append("--topology: got none, expected such as v5e:16x16.")
    options = _options(args.flags, errors)
    if errors:
      raise ConfigError(errors)
    topology = args.flags["topology"]
    with signals.blocked():
      num_devices = len(describe(topology)[1])  # libtpu sets handlers
      signals.end_at_once(lambda: f"{topology} was not compiled to the end")
    if args.flags["search"] == "true":
      result, config = _search(
        args.config, topology, num_devices, wants_json, options
      )
    else:
      config = args.config
      text = f"compiling the train step for {topology}, which may take minutes"
      print(text, file=sys.stderr, flush=True)
      result = signals.in_thread(
        lambda: planner.plan(config, topology, **options)
      )
    if args.flags["all"] == "true" and result["price_seconds"]:
      result |= signals.in_thread(
        lambda: planner.plan_programs(config, topology, result)
      )
  except ConfigError as e:
    sys.exit(str(e))
  show(result, wants_json)


def _options(flags: dict[str, str | None], errors: list[str]) -> dict[str, Any]:
  """Returns arguments of `plan` from flags, and adds errors to the list."""
  options = {}
  for flag, name, parse in (
    ("input_rate", "input_rate", parse_input_rate),
    ("price_per_chip_hour", "chip_hour", parse_price),
  ):
    try:
      options[name] = parse(flags[flag]) if flags[flag] else None
    except ValueError as e:
      errors.append(str(e))
  return options


def parse_price(text: str) -> tuple[float, str]:
  """Returns the number and the unit of a price.

  Example:
    >>> parse_price("1.2"), parse_price("1.20 USD"), parse_price(".5€")
    ((1.2, ''), (1.2, 'USD'), (0.5, '€'))

  Raises:
    ValueError: It does not begin with a number.
  """
  match = _PRICE.fullmatch(text)
  if not match:
    raise ValueError(
      f"--price_per_chip_hour: got {text!r}, expected a number, and the unit"
      " behind it if it has one, such as 1.20USD."
    )
  return float(match[1]), match[2].strip()


def parse_input_rate(text: str) -> float:
  """Returns the images per second of --input_rate.

  Raises:
    ValueError: It is not a number above 0.
  """
  try:
    value = float(text)
  except ValueError:
    value = 0.0
  if not 0 < value < math.inf:
    raise ValueError(f"--input_rate: got {text!r}, expected a number above 0.")
  return value


def _search(
  config: Config,
  topology: str,
  num_devices: int,
  wants_json: bool,
  options: dict[str, Any],
) -> tuple[dict[str, Any], Config]:
  """Returns the plan of the fastest choice, and its config."""
  stream = sys.stderr if wants_json else sys.stdout
  search = Search(
    config,
    num_devices,
    lambda choice: planner.plan(choice, topology, **options),
    lambda text: print(text, file=stream, end="", flush=True),
  )

  def last_message() -> str:
    print(file=stream, flush=True)  # ends the line of the choice
    if search.fastest:
      show(search.fastest[0], wants_json)
    at = f"at choice {search.number} of {search.total}"
    return f"{at}; fastest so far: {search.best()}"

  signals.end_at_once(last_message)
  signals.in_thread(search.run)
  return search.fastest


def show(result: dict[str, Any], wants_json: bool) -> None:
  """Prints a plan."""
  print(json.dumps(result) if wants_json else table(result), flush=True)
