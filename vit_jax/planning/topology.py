"""TPU slices by name, whose chips need not be there."""

import importlib.util
import re

import jax
from jax.experimental import topologies

from vit_jax.config import ConfigError
from vit_jax.devices import CHIPS, Chip


def describe(topology: str) -> tuple[Chip, list]:
  """Returns the chip and the devices of a slice, or of several joined ones.

  Raises:
    ConfigError: libtpu is absent, or does not know the slice.
  """
  generation = topology.split(":")[0]
  name, _, number = topology.partition(",slices=")
  if generation not in CHIPS or not re.fullmatch(r"([1-9]\d*)?", number):
    raise ConfigError(
      [
        f"--topology: got {topology!r}, expected one of {', '.join(CHIPS)} and"
        " a shape, such as v5e:16x16, or v5e:16x16,slices=2 for two slices"
        " that the data centre's network joins."
      ]
    )
  if number and CHIPS[generation].dcn_bandwidth is None:
    raise ConfigError(
      [
        f"--topology: got {topology!r}, but the rate of the network between"
        f" slices of {generation} is not known; expected v5e, v5p or v6e."
      ]
    )
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      [
        "libtpu: not installed; the TPU's compiler is in it: pip install"
        " 'jax[tpu]' (no TPU is needed)."
      ]
    )
  # One device per chip, as Cloud TPU runs a v4.
  options = {"chip_config_name": "megacore"} if generation == "v4" else {}
  if number:
    options["num_slices"] = int(number)
  try:
    found = topologies.get_topology_desc(
      platform="tpu", topology_name=name, **options
    )
  except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as e:
    raise ConfigError(
      [f"--topology: got {topology!r}, which libtpu refuses: {e}"]
    ) from None
  return CHIPS[generation], list(found.devices)
