"""Joins the processes of a run before anything asks jax for devices."""

import glob
import importlib.util
import os

import jax

from vit_jax.config import ConfigError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialise() -> None:
  """Connects this process to the others, if there are others.

  On a TPU VM the machine's own metadata say who they are. Elsewhere, set in
  every process JAX_COORDINATOR_ADDRESS (host:port of process 0),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID. A process on its own needs nothing.

  Raises:
    ConfigError: Only some of the three are set.
  """
  given = [os.environ.get(name) for name in VARIABLES]
  if all(given):
    address, count, index = given
    jax.distributed.initialize(address, int(count), int(index))
  elif any(given):
    raise ConfigError(
      [
        f"environment variable {name}: not set, though another of"
        f" {', '.join(VARIABLES)} is; set all three, or none."
        for name, value in zip(VARIABLES, given, strict=True)
        if not value
      ]
    )
  elif _is_tpu_vm():
    jax.distributed.initialize()


def _is_tpu_vm() -> bool:
  has_chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
  return bool(has_chips) and importlib.util.find_spec("libtpu") is not None
