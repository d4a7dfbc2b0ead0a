"""Joins the processes of a run, before anything asks jax for devices."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
from jax.experimental import multihost_utils

from vit_jax.config import ConfigError
from vit_jax.distributed import exit_codes, tpu_slice
from vit_jax.options import unexpected

# Which process this is: by flags of the command, or by the environment.
FLAGS = ("coordinator", "num_processes", "process_id")
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

JOIN_SECONDS = 300.0  # as jax waits by default
HEARTBEAT_SECONDS = 30  # default for commands without a config

ADVICE = "docs/troubleshooting.md, Processes do not meet, has what to check"
READS_EARLY = (
  "--config: got an init= for which jax starts before the processes have"
  " joined; expected a file:"
  " vit-jax convert RUN run.safetensors --to=timm --drop_head."
)


class Group(NamedTuple):
  """The processes of a run, as seen from this one.

  Attributes:
    settings: Arguments of `jax.distributed.initialize`, which finds the others.
    name: Their address, and the number of this process, for an error.
    is_tpu_slice: Whether they are the hosts of a TPU slice.
  """

  settings: dict[str, Any]
  name: str
  is_tpu_slice: bool = False


def initialise(
  flags: Mapping[str, str | None] | None = None,
  errors: Iterable[str] = (),
  *,
  timeout: float = JOIN_SECONDS,
  heartbeat_timeout_seconds: int = HEARTBEAT_SECONDS,
  stops_on_sigterm: bool = False,
  before_joining: Callable[[], None] = lambda: None,
) -> None:
  """Connects this process to the others of its run, if there are any.

  The first of these that is present decides which processes there are:

  1. the flags --coordinator=host:port --num_processes --process_id;
  2. JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID;
  3. SLURM, for a process that srun started together with others;
  4. on a TPU VM whose slice has other hosts, what jax knows about the slice.

  A single process needs none of them, nor does the only host of a slice.

  Args:
    flags: Flags of the command line; only `FLAGS` are read.
    errors: Errors of the command line, which are raised together with those
      found here.
    timeout: Seconds to wait for the other processes. If they do not come, the
      process ends with `exit_codes.EXIT_RESTART`.
    heartbeat_timeout_seconds: Seconds without a heartbeat of a process after
      which jax aborts the others.
    stops_on_sigterm: Whether jax receives SIGTERM, which then does not end a
      process; see `multihost_utils.reached_preemption_sync_point`.
    before_joining: Called before this process joins others; raises if it must
      not join.

  Raises:
    ConfigError: Only some of the three flags or variables are set, or one of
      them is not an address or not a valid number; or another process of this
      host has already joined the others; or jax has already started.
    RuntimeError: jax has no such device here.
  """
  group = _group(flags or {}, errors)
  if group is None:
    return
  before_joining()
  if group.is_tpu_slice:
    tpu_slice.lock()
  group.settings["heartbeat_timeout_seconds"] = heartbeat_timeout_seconds
  jax.config.update("jax_enable_preemption_service", stops_on_sigterm)
  _join(group, timeout)


def _group(
  flags: Mapping[str, str | None], errors: Iterable[str]
) -> Group | None:
  """Returns the processes of the run; None if this process is alone."""
  by_flag = {f"--{name}": flags.get(name) for name in FLAGS}
  by_name = {name: os.environ.get(name) for name in VARIABLES}
  # A flag without its value is None, too, and among `errors` already.
  given = by_flag if any(by_flag.values()) else by_name
  is_slurm = is_slurm_step()
  if any(given.values()):
    if more := _errors(given):
      raise ConfigError([*errors, *more])
    address, count, index = given.values()
    settings = {
      "coordinator_address": address,
      "num_processes": int(count),
      "process_id": int(index),
      "cluster_detection_method": "deactivate",
      "local_device_ids": _slurm_devices() if is_slurm else None,
    }
    return Group(settings, f"{address}: process {index} of {count}")
  if is_slurm:
    settings = {
      "cluster_detection_method": "slurm",
      "local_device_ids": _slurm_devices(),
    }
    name = (
      f"SLURM job {os.environ['SLURM_JOB_ID']}, first of the nodes"
      f" {os.environ['SLURM_STEP_NODELIST']}: process"
      f" {_number('SLURM_PROCID')} of {_number('SLURM_NTASKS')}"
    )
    return Group(settings, name)
  if tpu_slice.is_tpu_vm():
    tpu = tpu_slice.find()
    if tpu.is_shared:
      return Group({}, f"TPU slice ({tpu.reason}): this process", True)
    exit_codes.say(f"TPU slice: {tpu.reason}; this process works alone.")
  elif _number("SLURM_NTASKS") > 1:
    exit_codes.say(
      f"SLURM has {_number('SLURM_NTASKS')} tasks for this job, but this"
      " process works alone: put srun before the command."
    )
  return None


def refuse_several_hosts() -> None:
  """Ends a single-process command on a TPU slice of several hosts.

  Otherwise libtpu would wait for a process on each host, without a message.
  """
  if not tpu_slice.is_tpu_vm():
    return
  tpu = tpu_slice.find()
  if tpu.is_shared:
    sys.exit(
      f"TPU slice: got one of several hosts ({tpu.reason}), expected a VM of"
      " one host; or put JAX_PLATFORMS=cpu before the command."
    )


def _errors(given: dict[str, str | None]) -> list[str]:
  """Checks that all three are set: an address and two numbers."""
  errors = [
    unexpected(
      name, "none", f"a value, because another of {', '.join(given)} is set"
    )
    for name, value in given.items()
    if not value
  ]
  (where, address), (how_many, count), (which, index) = given.items()
  if address:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
      expected = "host:port of process 0, such as host0:1234"
      errors.append(unexpected(where, repr(address), expected))
  if count and not (count.isdecimal() and int(count) > 0):
    errors.append(unexpected(how_many, repr(count), "a number from 1"))
    count = None
  if index and not (
    index.isdecimal() and (not count or int(index) < int(count))
  ):
    expected = f"a number from 0 to below {count or how_many}"
    errors.append(unexpected(which, repr(index), expected))
  return errors


def _join(group: Group, timeout: float) -> None:
  """Waits for the others for `timeout` seconds, and for all devices.

  If the others do not come, this process ends at once, before jax ends it with
  a C++ stack. Therefore jax waits in a thread, with a longer timeout than this
  function's. Nothing may ask jax for devices then: it would wait again.

  Raises:
    ConfigError: jax has already started.
    RuntimeError: jax has no such device here.
  """
  failed: list[BaseException] = []

  def connect():
    try:
      jax.distributed.initialize(
        **group.settings, initialization_timeout=int(timeout) + 60
      )
    except BaseException as e:  # a thread would print it and end
      failed.append(e)

  if group.settings.get("process_id") == 0:
    port = int(group.settings["coordinator_address"].rpartition(":")[2])
    try:
      socket.create_server(("", port)).close()
    except OSError as e:  # jax would end by a segmentation fault
      _end(group, f"cannot use its port ({os.strerror(e.errno)})")
  waiting = threading.Thread(target=connect, daemon=True)
  waiting.start()
  waiting.join(timeout)
  if waiting.is_alive():
    _end(group, f"waited {timeout:g} s in vain for the others")
  if failed:
    reason = _first_line(failed[0])
    if "before any JAX calls" in reason:
      raise ConfigError([READS_EARLY])
    _end(group, f"could not join ({type(failed[0]).__name__}: {reason})")
  try:
    jax.devices()  # of all processes
    if jax.default_backend() == "cpu":
      # Gloo connects the processes at their first collective, and waits for 30
      # s. Until here all waited for each other; later they may not be together.
      multihost_utils.sync_global_devices("joined")
  except (RuntimeError, ValueError) as e:
    if not exit_codes.is_late(e):
      raise
    _end(group, f"waited in vain for the others ({_first_line(e)})")


def _end(group: Group, error: str) -> NoReturn:
  """Ends this process with the code for causes that pass, in every host."""
  code = exit_codes.EXIT_RESTART
  text = f"{group.name} {error}; {ADVICE} (exit code {code})."
  exit_codes.end(code, lambda: exit_codes.say(text))


def _first_line(error: BaseException) -> str:
  return str(error).partition("\n")[0][:200]


def is_slurm_step() -> bool:
  """Whether srun started this process together with others.

  A batch script, and a shell within an allocation, also have the variables of
  the job. There, the step is missing or has one task.
  """
  return (
    "SLURM_JOB_ID" in os.environ
    and "SLURM_STEP_NODELIST" in os.environ
    and _number("SLURM_STEP_NUM_TASKS", _number("SLURM_NTASKS")) > 1
  )


def _slurm_devices() -> list[int] | None:
  """Returns the numbers of the visible GPUs that belong to this task.

  By default jax gives each task the GPU with the task's number on the node.
  That is right if a node has as many tasks as GPUs, and each task sees all
  GPUs. It would leave seven of eight idle if one task has the node to itself,
  and find none if SLURM shows each task only its own (--gpus-per-task).

  Returns:
    Numbers; an empty list for all GPUs; None for jax's default.
  """
  if os.environ.get("JAX_LOCAL_DEVICE_IDS"):  # jax reads it
    return None
  tasks = _number("SLURM_NTASKS") // max(1, _number("SLURM_STEP_NUM_NODES"))
  seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
  num_seen = len(seen.split(",")) if seen else 0
  if tasks <= 1 or 0 < num_seen < max(tasks, _number("SLURM_GPUS_ON_NODE")):
    return []
  if not num_seen:
    return None
  share, first = num_seen // tasks, _number("SLURM_LOCALID")
  return list(range(first * share, (first + 1) * share))


def _number(name: str, default: int = 0) -> int:
  """Returns an environment variable's number; the default if it has none."""
  value = os.environ.get(name, "")
  return int(value) if value.isdecimal() else default
