"""Describes TPU slices by name, without a TPU."""

import importlib.util
import math
import os
import platform
import re

import jax
from jax.experimental import topologies

from vit_jax.config import ConfigError
from vit_jax.devices import CHIPS, Chip

# The largest slices. Source: cloud.google.com/tpu/docs, a page per generation.
LARGEST = {
  "v3": (32, 32),
  "v4": (16, 16, 16),
  "v5e": (16, 16),
  "v5p": (16, 16, 24),
  "v6e": (16, 16),
  "tpu7x": (16, 24, 24),
}
# libtpu does not search for a TPU, and does not warn that there is none.
ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
MOST_CHIPS = 100_000  # of all slices, which libtpu describes in a second
_NAME = re.compile(
  r"(\w+):([1-9]\d{0,5}(?:x[1-9]\d{0,5})*)(?:_(?:un)?twisted)?"
  r"(?:,slices=([1-9]\d{0,5}))?",
  re.ASCII,
)


def describe(topology: str) -> tuple[Chip, list]:
  """Returns the chip and the devices of a slice, or of several slices.

  Args:
    topology: Name of the slice, such as "v5e:16x16" or "v5e:16x16,slices=2".

  Raises:
    ConfigError: The slice does not exist, libtpu is not installed, or libtpu
      refuses the slice.
  """
  generation = topology.split(":")[0]
  slice_name, _, number = topology.partition(",slices=")
  if not _exists(topology):
    raise ConfigError(
      [
        f"--topology: got {topology!r}, expected one of {', '.join(CHIPS)} and"
        " a shape, such as v5e:16x16, or v5e:16x16,slices=2 for two slices"
        f" that the data centre's network joins{_limits(generation)}."
      ]
    )
  if number and CHIPS[generation].dcn_bandwidth is None:
    known = " or ".join(k for k, c in CHIPS.items() if c.dcn_bandwidth)
    raise ConfigError(
      [
        f"--topology: got {topology!r}, but the rate of the network between"
        f" {generation} slices is not known; expected {known}."
      ]
    )
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      [
        "libtpu: not installed, but it has the TPU's compiler; pip install"
        " 'jax[tpu]' with Python 3.12 or later (this is"
        f" {platform.python_version()}). No TPU is needed."
      ]
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
    raise ConfigError(
      [f"--topology: got {topology!r}, which libtpu does not support: {e}"]
    ) from None
  return CHIPS[generation], list(topology_desc.devices)


def _exists(topology: str) -> bool:
  """Whether a slice with this name can exist.

  libtpu also describes larger slices, and ends the process if a side is 0.
  """
  match = _NAME.fullmatch(topology)
  if not match or match[1] not in LARGEST:
    return False
  largest = LARGEST[match[1]]
  sides = [int(side) for side in match[2].split("x")]
  num_chips = math.prod(sides)
  return (
    len(sides) == len(largest)
    # One of three sides may be longer: switches join cubes of 4x4x4 chips.
    and (len(sides) == 3 or max(sides) <= max(largest))
    and num_chips <= math.prod(largest)
    and num_chips * int(match[3] or 1) <= MOST_CHIPS
  )


def _limits(generation: str) -> str:
  """Returns the limits of slices as the end of a sentence; "" if unknown."""
  if generation not in LARGEST:
    return ""
  largest = LARGEST[generation]
  return (
    f"; a slice of {generation} has {len(largest)} sides and at most"
    f" {math.prod(largest):,} chips ({'x'.join(map(str, largest))}), and all"
    f" slices have at most {MOST_CHIPS:,}"
  )
