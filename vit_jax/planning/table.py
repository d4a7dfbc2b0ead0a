"""A plan as a table of text."""

import math
from typing import Any

from vit_jax.planning.search import gib


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
  lines += [f"{'left out':<12}{note}" for note in plan.get("not_rehearsed", ())]
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
