"""Describes TPU slices by name, without a TPU."""

import importlib.util
import math
import os
import re

import jax
from jax.experimental import topologies

from vit_jax.config import ConfigError
from vit_jax.devices import CHIPS, Chip
from vit_jax.options import unexpected

# Shapes of the slices that Google offers, in chips. Of three sides, also all
# multiples of four from the shortest to the longest, up to `LARGEST` chips.
# Sources, read on 2026-11-28: docs.cloud.google.com/tpu/docs/{v3,v4,v5e,v5p,
# v6e,tpu7x}; for the multiples cloud.google.com/tpu/docs/types-topologies; for
# one chip of TPU7x github.com/AI-Hypercomputer/xpk, system_characteristics.py.
_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4"
LISTED = {
  "v3": "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
  "v4": _CUBES,
  "v5e": _FLAT,
  "v5p": _CUBES,
  "v6e": _FLAT,
  "tpu7x": f"1x1x1 {_CUBES}",
}
LARGEST = {"v4": 16 * 16 * 16, "v5p": 16 * 16 * 24, "tpu7x": 16 * 24 * 24}
# Other names that users know, and the cores of a chip that an accelerator type
# counts: v5p-8 is four chips, v5litepod-8 eight. Sources: as above.
ALIASES = {"v5litepod": "v5e", "v7": "tpu7x", "v7x": "tpu7x"}
CORES = {"v3": 2, "v4": 2, "v5p": 2, "tpu7x": 2}
# libtpu does not search for a TPU, and does not warn that there is none.
ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
MOST_CHIPS = 100_000  # of all slices, which libtpu describes in a second
_NAME = re.compile(
  r"([a-z]+\d\w*)(?::(\d{1,6}(?:x\d{1,6})*)(_(?:un)?twisted)?|-(\d{1,6}))"
  r"(?:,slices=([1-9]\d{0,5}))?",
  re.ASCII,
)


def describe(topology: str) -> tuple[Chip, list]:
  """Returns the chip and the devices of a slice, or of several slices.

  Args:
    topology: Name of the slice, see `canonical`.

  Raises:
    ConfigError: The slice does not exist, libtpu is not installed, or libtpu
      refuses the slice.
  """
  topology = canonical(topology)
  generation = topology.split(":")[0]
  slice_name, _, number = topology.partition(",slices=")
  if number and CHIPS[generation].dcn_bandwidth is None:
    known = " or ".join(k for k, c in CHIPS.items() if c.dcn_bandwidth)
    expected = f"slices of {known}, whose network is known"
    raise ConfigError([unexpected("--topology", repr(topology), expected)])
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      ["libtpu: not installed: pip install 'jax[tpu]' (Python 3.12 or later)."]
    )
  for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  # One device per chip, as Cloud TPU runs a v4.
  options = {"chip_config_name": "megacore"} if generation == "v4" else {}
  if number:
    options["num_slices"] = int(number)
  try:
    topology_desc = topologies.get_topology_desc(
      platform="tpu", topology_name=slice_name, **options
    )
  except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as e:
    error = unexpected("--topology", repr(topology), "one of libtpu", str(e))
    raise ConfigError([error]) from None
  return CHIPS[generation], list(topology_desc.devices)


def canonical(topology: str) -> str:
  """Returns the name of a slice as libtpu knows it, such as "v5e:16x16".

  Args:
    topology: Chip and shape, such as "v5e:16x16", or an accelerator type, such
      as "v5litepod-256", which has the shape next to a square or cube. More
      such slices: "v5e:16x16,slices=2".

  Raises:
    ConfigError: Google does not offer the slice. libtpu also describes others,
      and ends the process if a side is 0.

  Example:
    >>> canonical("v5litepod-256"), canonical("v5p-128,slices=2")
    ('v5e:16x16', 'v5p:4x4x4,slices=2')
  """
  match = _NAME.fullmatch(topology)
  generation = match and ALIASES.get(match[1], match[1])
  if generation not in LISTED:
    expected = (
      f"one of {', '.join(CHIPS)} and a shape, such as v5e:16x16 or"
      " v5e:16x16,slices=2, or an accelerator type, such as v5litepod-256"
    )
    raise ConfigError([unexpected("--topology", repr(topology), expected)])
  _, shape, twist, cores, number = match.groups()
  shapes = _shapes(generation)
  if shape:
    sides = tuple(map(int, shape.split("x")))
    num_chips = math.prod(sides)
  else:
    sides, num_chips = None, int(cores) / CORES.get(generation, 1)
    equal = [s for s in shapes if math.prod(s) == num_chips]
    sides = min(equal, key=sum, default=None)
  if sides not in shapes:
    near = min(shapes, key=lambda s: abs(math.prod(s) - num_chips))
    why = "Google offers no such slice."
    expected = f"a slice such as {generation}:{_text(near)}"
    raise ConfigError([unexpected("--topology", repr(topology), expected, why)])
  if num_chips * int(number or 1) > MOST_CHIPS:
    most = f"at most {MOST_CHIPS:,} chips"
    raise ConfigError([unexpected("--topology", repr(topology), most)])
  slices = f",slices={number}" if number else ""
  return f"{generation}:{_text(sides)}{twist or ''}{slices}"


def _shapes(generation: str) -> list[tuple[int, ...]]:
  """Returns all slices of a chip."""
  most = LARGEST.get(generation, 0)
  return [
    *(tuple(map(int, s.split("x"))) for s in LISTED[generation].split()),
    *(
      (a, b, c)
      for a in range(4, most + 1, 4)
      for b in range(a, most // a + 1, 4)
      for c in range(b, most // (a * b) + 1, 4)
    ),
  ]


def _text(sides: tuple[int, ...]) -> str:
  return "x".join(map(str, sides))
