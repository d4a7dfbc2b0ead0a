"""Whether other hosts work on the TPU slice of this one, as jax finds out.

libtpu waits for all hosts of a slice, and jax's coordinator for all processes,
so a process has to know before it asks for devices. On a host that has a slice
to itself there is nobody to meet: a coordinator would only take a fixed port,
where a second process of the host reaches that of the first, and aborts it.
"""

import fcntl
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import NamedTuple

from vit_jax.config import ConfigError

# The first that is set has the names of a slice's hosts, as jax reads them.
NAMES = (
  "TPU_PROCESS_ADDRESSES_PATH",
  "TPU_PROCESS_ADDRESSES",
  "TPU_WORKER_HOSTNAMES",
)
# Processes of a slice along each axis; all 1: libtpu takes this one's chips.
BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
PORT = "8482"  # of the coordinator, where JAX_COORDINATOR_PORT has no other

# A metadata server answers within milliseconds, and jax asks again for 3 s
# where it knows a key not; where there is none, a minute may pass.
SECONDS = 20.0

_held: dict[pathlib.Path, int] = {}  # locks of this process, by their files


class Slice(NamedTuple):
  """What is known of the slice, or slices, of this host's chips.

  Attributes:
    is_shared: Whether it has chips of other processes.
    why: By what that is known.
  """

  is_shared: bool
  why: str


def is_tpu_vm() -> bool:
  """Whether jax uses this machine's TPU unless it is told otherwise."""
  from jax._src import cloud_tpu_init  # jax has no public way

  return cloud_tpu_init.running_in_cloud_tpu_vm


def find() -> Slice:
  """Returns what jax's clusters know of a TPU VM.

  Raises:
    ConfigError: The hosts are stated, but cannot be read.
  """
  from jax._src.clusters import GkeTpuCluster  # jax has no public way

  platforms = os.environ.get("JAX_PLATFORMS", "")
  if platforms and "tpu" not in platforms.lower().split(","):
    return Slice(False, f"JAX_PLATFORMS={platforms} leaves the TPU out")
  num_slices = os.environ.get("MEGASCALE_NUM_SLICES", "")
  is_multislice = num_slices.isdecimal() and int(num_slices) > 1
  stated = (f"{n}={os.environ[n]}" for n in BOUNDS if os.environ.get(n))
  bounds = next(stated, "")
  is_one = {*bounds.partition("=")[2].split(",")} == {"1"}
  if is_one and not is_multislice:
    return Slice(False, bounds)
  try:
    hosts = GkeTpuCluster._get_worker_host_names_env_var()
  except (RuntimeError, ValueError) as e:
    raise ConfigError([f"{NAMES[0]}: {e}."]) from e
  if hosts is None:
    why = f"none of {', '.join(NAMES)} is set"
  else:
    name = next((n for n in NAMES if os.environ.get(n) == hosts), NAMES[0])
    count = hosts.count(",") + 1
    why = f"{name} has {_counted(count, 'host')}"
    if count > 1:
      return Slice(True, why)
  if is_multislice:
    return Slice(True, f"MEGASCALE_NUM_SLICES={num_slices}")
  are_several = bool(bounds) and not is_one
  if hosts is not None and num_slices and not are_several:
    return Slice(False, why)
  if "TPU_SKIP_MDS_QUERY" in os.environ:
    why = bounds if are_several else why
    return Slice(are_several, f"{why}; TPU_SKIP_MDS_QUERY is set")
  # Other slices than the one whose hosts are named may be known to it alone.
  asked, what = (_hosts, "host") if hosts is None else (_slices, "slice")
  count, failure = _within(SECONDS, asked)
  if failure:
    silent = f"the metadata server cannot be asked ({failure})"
    if are_several:
      return Slice(True, f"{bounds}, and {silent}")
    return Slice(False, f"{why}, and {silent}")
  if count > 1 or hosts is None:
    why = f"the metadata server has {_counted(count, what)}"
  return Slice(count > 1, why)


def _slices() -> int:
  from jax._src.clusters import GkeTpuCluster

  return GkeTpuCluster._get_num_slices()


def _hosts() -> int:
  from jax._src.clusters import GceTpuCluster

  return (
    GceTpuCluster.get_process_count() if GceTpuCluster.is_env_present() else 0
  )


def _counted(count: int, what: str) -> str:
  return f"{count or 'no'} {what}{'s' * (count > 1)}"


def _within(seconds: float, ask: Callable[[], int]) -> tuple[int, str]:
  """Returns an answer, or why there is none within that time."""
  got: list[tuple[int, str]] = []

  def answer():
    try:
      got.append((ask(), ""))
    except Exception as e:  # of requests, or what jax cannot read
      got.append((0, type(e).__name__))

  thread = threading.Thread(target=answer, daemon=True)
  thread.start()
  thread.join(seconds)
  return got[0] if got else (0, f"in {seconds:g} s")


def lock() -> None:
  """Holds this host's place at the coordinator until the process ends.

  A second process in the same place reaches the coordinator of the first, which
  then aborts all processes of that run.

  Raises:
    ConfigError: Another process has it.
  """
  port = os.environ.get("JAX_COORDINATOR_PORT") or PORT
  # Several processes of a host, each with chips of its own, differ in this.
  worker = os.environ.get("TPU_WORKER_ID", "")
  worker = worker if worker.isdecimal() else "0"
  folder = pathlib.Path(tempfile.gettempdir())
  path = folder / f"vit_jax-tpu-{port}-{worker}.lock"
  if path in _held:
    return
  try:
    file = _open(path)
  except OSError:  # e.g. a disk that is only read: as without a lock
    return
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    pid = os.read(file, 20).decode(errors="replace").strip()
    os.close(file)
    who = f"process {pid}" if pid.isdecimal() else "another process"
    raise ConfigError(
      [
        f"{path}: {who} of this host has joined the TPU slice at port {port},"
        " and jax would abort it if this one did; let it finish, or end it on"
        " every host, or put JAX_PLATFORMS=cpu before a command that can do"
        " without the TPU."
      ]
    ) from None
  except OSError:  # a file system without locks
    os.close(file)
    return
  _held[path] = file
  try:
    os.ftruncate(file, 0)
    os.write(file, f"{os.getpid()}\n".encode())
  except OSError:  # the disk is full: the lock is held all the same
    pass


def _open(path: pathlib.Path) -> int:
  """Opens, or makes, a file that all users of the machine may lock."""
  flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
  try:
    # Linux refuses O_CREAT for a file of another user in /tmp, even if it is
    # there and may be written.
    return os.open(path, flags)
  except FileNotFoundError:
    file = os.open(path, flags | os.O_CREAT)
    os.fchmod(file, 0o666)
    return file
