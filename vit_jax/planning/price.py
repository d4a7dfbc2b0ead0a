"""The estimated time of a program that XLA compiled for a TPU."""

import math
import re
from typing import Any

from vit_jax.devices import Chip
from vit_jax.planning.hlo import Module

# Custom calls whose time XLA does not know; two are of several slices.
UNKNOWN_CALLS = r'custom_call_target="(ConcatBitcast|ZeroCrop|SliceId)"'


def price(compiled, chip: Chip) -> dict[str, Any]:
  """Returns work and estimated time of a compiled step, on each chip."""
  text, costs = compiled.as_text(), compiled.cost_analysis()
  looped, once = Module(text).totals(chip)
  # XLA subtracts a second for each of these.
  unknown = len(re.findall(UNKNOWN_CALLS, text))
  optimal = costs["optimal_seconds"] + unknown
  optimal *= looped.roof_seconds / once.roof_seconds
  # Of a loop XLA's can be below the time of its arithmetic at the peak.
  optimal = max(optimal, looped.roof_seconds)
  links = looped.link_seconds(chip)
  cycles = looped.cycles / chip.clock + links
  return {
    "flops": costs["flops"] + looped.flops - once.flops,
    "bytes_accessed": costs["bytes accessed"] * looped.bytes / once.bytes,
    "cycles_seconds": cycles,
    "link_seconds": links,
    "between_slices_seconds": looped.between_slices_seconds(chip),
    "optimal_seconds": optimal,
    "price_seconds": math.sqrt(cycles * optimal),
    "collectives": looped.collectives,
  }
