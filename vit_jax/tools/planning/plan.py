"""The command `vit-jax plan`: plans one run, or searches for a faster one."""

import json
import math
import re
import sys
from typing import Any

from vit_jax.config import Config, ConfigError, cli
from vit_jax.distributed import signals
from vit_jax.options import unexpected
from vit_jax.tools.planning import planner
from vit_jax.tools.planning.search import Search, gib
from vit_jax.tools.planning.topology import canonical, describe

_PRICE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(\D*)")


def main(args: cli.Args) -> None:
  """Plans or searches, and prints the result."""
  wants_json = args.flags["json"] == "true"
  try:
    errors = list(args.errors)
    if not args.flags["topology"]:
      expected = "a slice, such as v5e:16x16"
      errors.append(unexpected("--topology", "none", expected))
    options = _options(args.flags, errors)
    if errors:
      raise ConfigError(errors)
    topology = canonical(args.flags["topology"])
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
  """Returns arguments of `plan` from flags; appends to the list of errors."""
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
  """Returns the number and the unit of a price; "": no unit.

  Example:
    >>> parse_price("1.2"), parse_price("1.20 USD"), parse_price(".5€")
    ((1.2, ''), (1.2, 'USD'), (0.5, '€'))

  Raises:
    ValueError: The text does not begin with a number.
  """
  match = _PRICE.fullmatch(text)
  if not match:
    expected = "a number, with or without a unit: 1.20 or 1.20USD"
    raise ValueError(unexpected("--price_per_chip_hour", repr(text), expected))
  return float(match[1]), match[2].strip()


def parse_input_rate(text: str) -> float:
  """Returns the images per second of --input_rate.

  Raises:
    ValueError: The text is not a number above 0.
  """
  try:
    value = float(text)
  except ValueError:
    value = 0.0
  if not 0 < value < math.inf:
    raise ValueError(unexpected("--input_rate", repr(text), "a number above 0"))
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
    print(file=stream, flush=True)  # the line of the choice has no end yet
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


def table(plan: dict[str, Any]) -> str:
  """Returns a plan as a table of text."""
  mesh = " x ".join(f"{k}={v}" for k, v in plan["mesh"].items())
  room = plan["capacity_bytes"] - plan["peak_bytes"]
  verdict = "fits" if plan["fits"] else "DOES NOT FIT"
  if not plan["fits"] and room >= 0:
    verdict = "A PROGRAM DOES NOT FIT; the step does"
  # jax counts half chips of some kinds as devices.
  is_chip = math.prod(plan["mesh"].values()) == plan["chips"]
  device = "chip" if is_chip else "core"
  rows = {
    "slice": f"{plan['topology']}, {plan['chips']} chips; mesh {mesh}",
    "split": plan["split"],
    "verdict": f"{verdict}: {gib(plan['peak_bytes'])} of"
    f" {gib(plan['capacity_bytes'])} a {device}, {gib(abs(room))}"
    f" {'to spare' if room >= 0 else 'too much'}",
  }
  if plan["price_seconds"] is not None:
    rows |= {
      "memory": f"arguments {gib(plan['argument_bytes'])}, temporaries"
      f" {gib(plan['temporary_bytes'])}",
      "work": f"{plan['flops'] / 1e12:,.2f} TFLOP,"
      f" {plan['bytes_accessed'] / 1e9:,.1f} GB a {device} and step",
      "collectives": ", ".join(
        f"{n:,.0f} x {kind} {size / 1e6:,.0f} MB"
        for kind, (n, size) in plan["collectives"].items()
      )
      or "none",
      "step": f"{1e3 * plan['price_seconds']:,.1f} ms, an estimate (cycles"
      f" and links {1e3 * plan['cycles_seconds']:,.1f}, roofline"
      f" {1e3 * plan['optimal_seconds']:,.1f})",
      "speed": f"{plan['images_per_second']:,.0f} images/s{_mfu(plan)},"
      f" estimate{'s' * (plan['mfu'] is not None)}",
    }
    if plan["hours"] is not None:
      rows["run"] = (
        f"{plan['steps']:,} steps: {plan['hours']:,.1f} hours,"
        f" {plan['chip_hours']:,.0f} chip-hours, estimates, without"
        " evaluation"
      )
    rows |= _host_rows(plan)
  if shares := plan.get("evaluation"):
    most = max(shares, key=shares.get)
    rows["evaluation"] = (
      f"{_percent(sum(shares.values()))} of the time of all steps on the chips,"
      f" an estimate, most of it {most} ({_percent(shares[most])})"
    )
  lines = [f"{key:<12}{value}" for key, value in rows.items()]
  lines += [f"{'program':<12}{text}" for text in _programs(plan)]
  lines += [f"{'left out':<12}{note}" for note in plan.get("left_out", ())]
  return "\n".join(lines)


def _mfu(plan: dict[str, Any]) -> str:
  return "" if plan["mfu"] is None else f", MFU {100 * plan['mfu']:.1f} %"


def _host_rows(plan: dict[str, Any]) -> dict[str, str]:
  """Returns the lines on the input of hosts and on the price of the run."""
  num_hosts, cores = plan["hosts"], plan["input_cores"]
  on = "one host" if num_hosts == 1 else f"each of {num_hosts} hosts"
  text = f"{plan['input_per_host']:,.0f} images/s on {on}"
  if cores:
    text += f": {cores:,} core{'s' * (cores > 1)} at"
    text += f" {plan['input_rate']:,.0f} a core, {plan['input_rate_of']}"
    if vcpus := plan["host_vcpus"]:
      there = vcpus // 2
      excess = ", fewer than needed" if cores > there else ""
      text += (
        f"; a host of four chips has {vcpus} vCPUs ({there} cores){excess}"
      )
  else:
    text += f"; {plan['input_rate_of']}"
  lines = {"input": text}
  if plan["price"] is not None:
    unit = plan["price_unit"]
    hour = f"{plan['price_per_chip_hour']:g} {unit}".rstrip()
    total = f"{plan['price']:,.2f} {unit}".rstrip()
    lines["price"] = f"{total} at {hour} a chip and hour, an estimate"
  return lines


def _percent(share: float) -> str:
  return f"{100 * share:.2f} %"


def _programs(plan: dict[str, Any]) -> list[str]:
  """Returns a line for each program; all digests share one."""
  sizes: dict[str, list[int | None]] = {}
  for program in plan.get("programs", ()):
    kind = program["name"].split()[0]
    sizes.setdefault(kind, []).append(program["peak_bytes"])
  texts = []
  for kind, peaks in sizes.items():
    name = kind if len(peaks) == 1 else f"{kind} of {len(peaks)} kinds of array"
    if None in peaks:
      texts.append(f"{name}: DOES NOT FIT, even alone")
      continue
    fits = max(peaks) <= plan["capacity_bytes"]
    texts.append(f"{name}: {gib(max(peaks))}" + ", DOES NOT FIT" * (not fits))
  return texts
