"""A plan in words and numbers."""

from typing import Any

from vit_jax.planning import hosts
from vit_jax.planning.search import gib


def table(found: dict[str, Any]) -> str:
  """Returns a plan as a table of text."""
  mesh = " x ".join(f"{k}={v}" for k, v in found["mesh"].items())
  room = found["capacity_bytes"] - found["peak_bytes"]
  verdict = "fits" if found["fits"] else "DOES NOT FIT"
  rows = {
    "slice": f"{found['topology']}, {found['chips']} chips; mesh {mesh}",
    "split": found["split"],
    "verdict": f"{verdict}: {gib(found['peak_bytes'])} of"
    f" {gib(found['capacity_bytes'])} a chip, {gib(abs(room))}"
    f" {'to spare' if room >= 0 else 'too much'}",
  }
  if found["price_seconds"] is not None:
    rows |= {
      "memory": f"arguments {gib(found['argument_bytes'])}, temporaries"
      f" {gib(found['temporary_bytes'])}",
      "work": f"{found['flops'] / 1e12:,.2f} TFLOP,"
      f" {found['bytes_accessed'] / 1e9:,.1f} GB a chip and step",
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
    rows |= hosts.rows(found)
  lines = [f"{key:<12}{value}" for key, value in rows.items()]
  for program in found.get("programs", ()):
    peak = program["peak_bytes"]
    size = gib(peak) if peak else "more than there is"
    verdict = "" if program["fits"] else ", DOES NOT FIT"
    lines.append(f"{'program':<12}{program['name']}: {size}{verdict}")
  lines += [
    f"{'left out':<12}{note}" for note in found.get("not_rehearsed", ())
  ]
  return "\n".join(lines)
