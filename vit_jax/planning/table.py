"""A plan in words and numbers."""

import math
from typing import Any

from vit_jax.planning import host_requirements
from vit_jax.planning.search import gib


def table(found: dict[str, Any]) -> str:
  """Returns a plan as a table of text."""
  mesh = " x ".join(f"{k}={v}" for k, v in found["mesh"].items())
  room = found["capacity_bytes"] - found["peak_bytes"]
  verdict = "fits" if found["fits"] else "DOES NOT FIT"
  if not found["fits"] and room >= 0:
    verdict = "A PROGRAM DOES NOT FIT; the step does"
  # jax counts half chips of some kinds as devices.
  is_chip = math.prod(found["mesh"].values()) == found["chips"]
  device = "chip" if is_chip else "core"
  rows = {
    "slice": f"{found['topology']}, {found['chips']} chips; mesh {mesh}",
    "split": found["split"],
    "verdict": f"{verdict}: {gib(found['peak_bytes'])} of"
    f" {gib(found['capacity_bytes'])} a {device}, {gib(abs(room))}"
    f" {'to spare' if room >= 0 else 'too much'}",
  }
  if found["price_seconds"] is not None:
    rows |= {
      "memory": f"arguments {gib(found['argument_bytes'])}, temporaries"
      f" {gib(found['temporary_bytes'])}",
      "work": f"{found['flops'] / 1e12:,.2f} TFLOP,"
      f" {found['bytes_accessed'] / 1e9:,.1f} GB a {device} and step",
      "collectives": ", ".join(
        f"{n:,.0f} x {kind} {size / 1e6:,.0f} MB"
        for kind, (n, size) in found["collectives"].items()
      )
      or "none",
      "step": f"{1e3 * found['price_seconds']:,.1f} ms, an estimate (cycles"
      f" and links {1e3 * found['cycles_seconds']:,.1f}, roofline"
      f" {1e3 * found['optimal_seconds']:,.1f})",
      "speed": f"{found['images_per_second']:,.0f} images/s, MFU"
      f" {100 * found['mfu']:.1f} %, estimates",
    }
    if found["hours"] is not None:
      rows["run"] = (
        f"{found['steps']:,} steps: {found['hours']:,.1f} hours,"
        f" {found['chip_hours']:,.0f} chip-hours, estimates, without"
        " evaluation"
      )
    rows |= host_requirements.rows(found)
  if shares := found.get("evaluation"):
    most = max(shares, key=shares.get)
    rows["evaluation"] = (
      f"{_percent(sum(shares.values()))} of the time of all steps on the chips,"
      f" an estimate, most of it {most} ({_percent(shares[most])})"
    )
  lines = [f"{key:<12}{value}" for key, value in rows.items()]
  lines += [f"{'program':<12}{text}" for text in _programs(found)]
  lines += [
    f"{'left out':<12}{note}" for note in found.get("not_rehearsed", ())
  ]
  return "\n".join(lines)


def _percent(share: float) -> str:
  return f"{100 * share:.2f} %"


def _programs(found: dict[str, Any]) -> list[str]:
  """Returns a line for each program, and one for all digests."""
  sizes: dict[str, list[int | None]] = {}
  for program in found.get("programs", ()):
    kind = program["name"].split()[0]
    sizes.setdefault(kind, []).append(program["peak_bytes"])
  texts = []
  for kind, peaks in sizes.items():
    name = kind if len(peaks) == 1 else f"{kind} of {len(peaks)} kinds of array"
    if None in peaks:
      texts.append(f"{name}: DOES NOT FIT, its own arrays and numbers alone")
      continue
    fits = max(peaks) <= found["capacity_bytes"]
    texts.append(f"{name}: {gib(max(peaks))}" + ", DOES NOT FIT" * (not fits))
  return texts
