"""Whether other hosts work on the TPU slice of this one.

libtpu waits for all hosts of a slice, and jax's coordinator for all processes.
So a process must know about them before it asks for devices, or it would wait
for ever, or train alone. `jax.distributed.initialize` finds the hosts, but also
joins them, and starts a coordinator at a fixed port even for a single host.
Therefore this module reads what jax reads: the variables of GKE, or the
metadata server of Compute Engine.
"""

import glob
import importlib.util
import os
import pathlib
import re
import socket
import urllib.request
from typing import NamedTuple

from vit_jax.options import ConfigError, unexpected

# The first that is set has the names of a slice's hosts, as jax reads them.
FILE_OF_HOSTS = "TPU_PROCESS_ADDRESSES_PATH"
NAMES = (FILE_OF_HOSTS, "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
# Processes of a slice along each axis; all 1: libtpu uses this host's chips.
BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
# The coordinator's by default. The firewall rule of some slices opens 8476, but
# not 8482. Source: github.com/jax-ml/jax/issues/35905.
PORT = "8482"
METADATA_SECONDS = 5.0  # It answers within milliseconds.

_locks: list[socket.socket] = []  # of this process


class Slice(NamedTuple):
  """The slice, or slices, of this host's chips.

  Attributes:
    is_shared: Whether it has chips of other processes.
    reason: How that is known.
  """

  is_shared: bool
  reason: str


def is_tpu_vm() -> bool:
  """Whether this machine has a TPU that jax uses by default."""
  if "JAX_FORCE_TPU_INIT" in os.environ:
    return True
  chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
  return bool(chips) and importlib.util.find_spec("libtpu") is not None


def find() -> Slice:
  """Returns what the environment of a TPU VM says about its slice."""
  platforms = os.environ.get("JAX_PLATFORMS", "")
  if platforms and "tpu" not in platforms.lower().split(","):
    return Slice(False, f"JAX_PLATFORMS={platforms} leaves the TPU out")
  slices = os.environ.get("MEGASCALE_NUM_SLICES", "")
  if slices.isdecimal() and int(slices) > 1:
    return Slice(True, f"MEGASCALE_NUM_SLICES={slices}")
  for name in BOUNDS:
    if bounds := os.environ.get(name):
      return Slice({*bounds.split(",")} != {"1"}, f"{name}={bounds}")
  name = next((name for name in NAMES if os.environ.get(name)), None)
  count = _num_hosts(name) if name else 0
  reason = f"hosts in {name}: {count}" if name else "no hosts stated"
  if count > 1:
    return Slice(True, reason)
  if (name and slices) or "TPU_SKIP_MDS_QUERY" in os.environ:
    return Slice(False, reason)
  try:
    count = count or _metadata("worker-network-endpoints").count(",") + 1
    match = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata("tpu-env"))
  except OSError as e:
    return Slice(False, f"{reason}, and the metadata server has none ({e})")
  if match and int(match[1]) > 1:
    return Slice(True, f"slices of the metadata server: {match[1]}")
  return Slice(count > 1, f"hosts of the metadata server: {count}")


def _num_hosts(name: str) -> int:
  hosts = os.environ[name]
  if name == FILE_OF_HOSTS:
    hosts = pathlib.Path(hosts).read_text()
  return hosts.count(",") + 1


def _metadata(key: str) -> str:
  """Returns an attribute of this machine, from Google's metadata server."""
  server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
  request = urllib.request.Request(
    f"http://{server}/computeMetadata/v1/instance/attributes/{key}",
    headers={"Metadata-Flavor": "Google"},
  )
  with urllib.request.urlopen(request, timeout=METADATA_SECONDS) as response:
    return response.read().decode()


def port() -> str:
  """Returns the port of the coordinator, which is on the first host."""
  return os.environ.get("JAX_COORDINATOR_PORT") or PORT


def lock() -> None:
  """Reserves this host's place at the coordinator until the process ends.

  A second process with the same place would reach the coordinator of the first,
  which would then abort all processes of that run.

  Raises:
    ConfigError: Another process has the place.
  """
  # Several processes of a host, each with chips of its own, differ in this.
  worker = os.environ.get("TPU_WORKER_ID") or "0"
  # A name in Linux's abstract namespace: the kernel frees it with the process.
  place = socket.socket(socket.AF_UNIX)
  try:
    place.bind(f"\0vit_jax-tpu-{port()}-{worker}")
  except OSError:
    got = f"another process of this host, at port {port()}"
    hint = "End it on every host."
    raise ConfigError([unexpected("TPU slice", got, "none", hint)]) from None
  _locks.append(place)
