"""Joins the processes of a run before anything asks jax for devices."""

import glob
import importlib.util
import os

import jax


def initialise() -> None:
  """Connects this process to the others, if there are others.

  On a TPU VM the machine's own metadata say who they are. Elsewhere, set in
  every process JAX_COORDINATOR_ADDRESS (host:port of process 0),
  JAX_NUM_PROCESSES and JAX_PROCESS_ID. A process on its own needs nothing.
  """
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    jax.distributed.initialize(
      os.environ["JAX_COORDINATOR_ADDRESS"],
      int(os.environ["JAX_NUM_PROCESSES"]),
      int(os.environ["JAX_PROCESS_ID"]),
    )
  elif _is_tpu_vm():
    jax.distributed.initialize()


def _is_tpu_vm() -> bool:
  has_chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
  return bool(has_chips) and importlib.util.find_spec("libtpu") is not None
