"""Flags, variables and SLURM state the process; errors are reported."""

import socket
import sys
import threading
import time

import jax
import pytest
import several

from vit_jax.callbacks import run_lock
from vit_jax.commands import evaluate, train
from vit_jax.config import ConfigError, cli
from vit_jax.distributed import exit_codes, processes, tpu_slice
from vit_jax.distributed.signals import StopSignals

FLAGS = dict(coordinator="host0:1234", num_processes="2", process_id="1")
VARIABLES = dict(zip(processes.VARIABLES, ("host9:99", "4", "3"), strict=True))
# What srun sets for the second of 16 tasks on two nodes with 8 GPUs each.
SLURM = {
  "SLURM_JOB_ID": "77",
  "SLURM_NTASKS": "16",
  "SLURM_PROCID": "1",
  "SLURM_LOCALID": "1",
  "SLURM_STEP_NODELIST": "node[001-002]",
  "SLURM_STEP_NUM_NODES": "2",
  "SLURM_STEP_NUM_TASKS": "16",
  "SLURM_GPUS_ON_NODE": "8",
  "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}
HOSTS = tpu_slice.Slice(True, "TPU_WORKER_HOSTNAMES has 2 hosts")
NODE = {  # one task a node
  "SLURM_NTASKS": "2",
  "SLURM_STEP_NUM_TASKS": "2",
  "SLURM_LOCALID": "0",
}


class Machine:
  """What surrounds a process: the environment, a TPU, and jax.

  Attributes:
    calls: Arguments that jax got, and "lock" where the host was reserved.
    join: Takes the place of `jax.distributed.initialize`.
  """

  def __init__(self, monkeypatch):
    self._patch, self.calls = monkeypatch, []
    self.join = lambda **settings: self.calls.append(settings)
    for name in (*VARIABLES, *SLURM, "JAX_LOCAL_DEVICE_IDS"):
      monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tpu_slice, "is_tpu_vm", lambda: False)
    monkeypatch.setattr(tpu_slice, "lock", lambda: self.calls.append("lock"))
    initialize = lambda **settings: self.join(**settings)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)

  def sets(self, variables):
    for name, value in variables.items():
      self._patch.setenv(name, value)

  def has_tpu(self, tpu):
    self._patch.setattr(tpu_slice, "is_tpu_vm", lambda: True)
    self._patch.setattr(tpu_slice, "find", lambda: tpu)


@pytest.fixture
def machine(monkeypatch):
  return Machine(monkeypatch)


def _errors(flags=None, errors=(), **options):
  with pytest.raises(ConfigError) as e:
    processes.initialise(flags, errors, **options)
  return e.value.errors


def test_a_process_on_its_own_joins_nobody(machine, capfd):
  processes.initialise()
  processes.initialise({**dict.fromkeys(FLAGS), "workdir": "x"})
  machine.sets(SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})
  processes.initialise()
  assert machine.calls == [] and capfd.readouterr() == ("", "")


JOINED = {"heartbeat_timeout_seconds": 30, "initialization_timeout": 360}


def test_flags_come_first(machine):
  machine.sets(VARIABLES | SLURM)
  machine.has_tpu(HOSTS)
  processes.initialise({**FLAGS, "workdir": "x"})
  told = {"coordinator_address": "host0:1234", "num_processes": 2}
  told |= {"process_id": 1, "cluster_detection_method": "deactivate"}
  assert machine.calls == [told | {"local_device_ids": [1]} | JOINED]


def test_then_environment_variables(machine):
  machine.sets(VARIABLES)
  processes.initialise(dict.fromkeys(FLAGS))
  (call,) = machine.calls
  assert call["coordinator_address"] == "host9:99"
  assert (call["num_processes"], call["process_id"]) == (4, 3)
  assert call["local_device_ids"] is None  # all of them


def test_then_slurm(machine):
  machine.sets(SLURM)
  machine.has_tpu(HOSTS)
  processes.initialise()
  (call,) = machine.calls
  assert call["cluster_detection_method"] == "slurm"
  assert "coordinator_address" not in call  # jax finds it


def test_then_a_tpu_of_several_hosts(machine, capfd):
  machine.has_tpu(HOSTS)
  processes.initialise(heartbeat_timeout_seconds=7)
  joined = JOINED | {"heartbeat_timeout_seconds": 7}
  assert machine.calls == ["lock", joined]  # before it joins
  assert capfd.readouterr().err == ""


# An sbatch script, and a shell in an allocation.
BATCH = {k: v for k, v in SLURM.items() if "STEP" not in k}
SHELL = SLURM | {"SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
  "tpu, variables, word",
  [
    # A coordinator at jax's fixed port would meet a second process there.
    (tpu_slice.Slice(False, "X has 1 host"), {}, "X has 1 host"),
    (None, BATCH, "srun"),
    (None, SHELL, "srun"),
  ],
)
def test_a_process_that_seems_to_have_others_is_alone_and_says_so(
  machine, capfd, tpu, variables, word
):
  machine.sets(variables)
  if tpu:
    machine.has_tpu(tpu)
  processes.initialise()
  out, err = capfd.readouterr()
  assert machine.calls == [] and out == "" and word in err


@pytest.mark.parametrize(
  "changes, device_ids",
  [
    ({}, [1]),  # a task a GPU, all see all
    ({"CUDA_VISIBLE_DEVICES": "1"}, []),  # --gpus-per-task=1
    (NODE, []),  # all eight, where jax would take the first
    # Four tasks on two nodes: four GPUs each, seen with the others' or alone.
    (NODE | {"SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, [4, 5, 6, 7]),
    (NODE | {"SLURM_NTASKS": "4", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, []),
    ({"CUDA_VISIBLE_DEVICES": ""}, None),  # jax takes the task's number
    ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, None),  # jax reads it
  ],
)
def test_devices_of_a_slurm_task(machine, changes, device_ids):
  machine.sets(SLURM | changes)
  processes.initialise()
  assert [c["local_device_ids"] for c in machine.calls] == [device_ids]


# Flags, and the options that errors name.
WRONG = [
  ({"num_processes": "2"}, ["--coordinator", "--process_id"]),
  ({"coordinator": "host0:1234"}, ["--num_processes", "--process_id"]),
  (FLAGS | {"coordinator": "host0"}, ["--coordinator"]),
  (FLAGS | {"process_id": "2"}, ["--process_id"]),
  (FLAGS | {"num_processes": "0"}, ["--num_processes"]),
]


@pytest.mark.parametrize("flags, wrong", WRONG)
def test_flags_are_checked_and_not_filled_up_by_the_environment(
  machine, flags, wrong
):
  machine.sets(VARIABLES)
  assert [error.split(":")[0] for error in _errors(flags)] == wrong
  assert machine.calls == []


def test_of_three_variables_all_are_needed(machine):
  first, second, third = VARIABLES
  machine.sets({second: "2"})
  assert [error.split(":")[0] for error in _errors()] == [first, third]


@pytest.fixture
def late(monkeypatch, capfd):
  """The line of a process that could not join, which does not end."""

  def end(code, *closing):
    for act in closing:
      act()
    sys.exit(code)

  def line(*args, **options):
    with pytest.raises(SystemExit) as e:
      processes.initialise(*args, **options)
    assert e.value.code == exit_codes.EXIT_RESTART
    (line,) = capfd.readouterr().err.splitlines()
    return line

  monkeypatch.setattr(exit_codes, "end", end)
  return line


def test_others_who_do_not_come(machine, late):
  ends = threading.Event()
  machine.join = lambda **settings: ends.wait(60)
  assert late(FLAGS, timeout=0.01).startswith("host0:1234: process 1 of 2")
  machine.sets(SLURM)
  line = late(timeout=0.01)
  assert "job 77" in line and "node[001-002]: process 1 of 16" in line
  ends.set()


def _fails(text):
  def fails(**_):
    raise RuntimeError(text)

  return fails


def test_an_error_of_jax_is_passed_on(machine, late):
  machine.join = _fails("no such host\n(a stack)")
  machine.has_tpu(HOSTS)
  line = late()
  assert HOSTS.reason in line and "no such host" in line


def test_devices_of_the_others_that_do_not_come(machine, late, monkeypatch):
  monkeypatch.setattr(jax, "devices", _fails("DEADLINE_EXCEEDED: GetKeyValue"))
  assert "DEADLINE_EXCEEDED" in late(FLAGS)
  monkeypatch.setattr(jax, "devices", _fails("no libtpu"))
  with pytest.raises(RuntimeError, match="no libtpu"):
    processes.initialise(FLAGS)


def test_a_port_that_is_taken(machine, late):
  """jax would end by a segmentation fault."""
  with socket.create_server(("", 0)) as taken:
    address = f"localhost:{taken.getsockname()[1]}"
    line = late(FLAGS | {"coordinator": address, "process_id": "0"})
  assert "cannot use its port" in line and machine.calls == []


def test_a_config_that_computes_before_processes_join(machine):
  machine.join = _fails("initialize() must be called before any JAX calls")
  machine.has_tpu(HOSTS)
  (error,) = _errors()
  assert error.startswith("--config: ") and "vit-jax convert" in error


@pytest.fixture
def parsed(tmp_path):
  """The arguments of a command with these options."""
  config = tmp_path / "mine.py"
  config.write_text("from vit_jax.config import defaults as get_config\n")
  names = "workdir", "checkpoint", "json", "allow_change", "profile"
  flags = {**dict.fromkeys(names, ""), **cli.PROCESS_FLAGS}
  return lambda *options: cli.parse(
    "x", flags, [f"--config={config}", *options]
  )


def _train(args: cli.Args) -> None:
  train.run(args, StopSignals(), time.time())


@pytest.mark.parametrize("command", [_train, evaluate.run])
def test_commands_raise_them_with_their_own_errors(machine, command, parsed):
  assert tuple(cli.PROCESS_FLAGS) == processes.FLAGS
  with pytest.raises(SystemExit) as e:
    command(parsed("--process_id=7", "--num_processes=2", "--wrkdir=x"))
  for flag in ("wrkdir", "coordinator", "process_id"):
    assert f"--{flag}: " in str(e.value)
  assert machine.calls == []


@pytest.mark.parametrize("how", ["flags", "tpu"])
def test_a_second_start_does_not_join_the_run_that_goes_on(
  machine, tmp_path, parsed, how
):
  """jax would abort all processes of that run."""
  options = [f"--{k}={v}" for k, v in FLAGS.items()] if how == "flags" else []
  if how == "tpu":
    machine.has_tpu(HOSTS)
  refused = pytest.raises(SystemExit, match="another run trains")
  with run_lock.RunLock(str(tmp_path)), refused:
    _train(parsed(f"--workdir={tmp_path}", *options))
  assert machine.calls == []


# Real processes, which meet on this machine.


def _outputs(code, arguments, **env):
  """Returns (status, stdout, stderr) of a program for each row of arguments."""
  program = [sys.executable, "-c", "import sys, time\n" + code]
  commands = [[*program, *map(str, row)] for row in arguments]
  return several.run(commands, [several.env() | env] * len(commands))


JOIN = (
  "from vit_jax.distributed import exit_codes, processes\n"
  "flags = dict(zip(processes.FLAGS, sys.argv[2:]))\n"
  "processes.initialise(flags, timeout=float(sys.argv[1]))\n"
)


def _of_two(code, timeout=60):
  """Returns the outputs of both processes of a pair that joins."""
  address = several.address()
  rows = [(timeout, address, 2, i) for i in range(2)]
  return _outputs(JOIN + code, rows)


@pytest.mark.slow
def test_real_processes_meet_as_tasks_of_slurm():
  """All variables are as srun sets them; both nodes are this machine."""
  code = (
    "import jax, os\n"
    "os.environ['SLURM_PROCID'] = sys.argv[1]\n"
    "from vit_jax.distributed import processes\n"
    "processes.initialise(timeout=60)\n"
    "print(jax.process_index(), jax.process_count(), jax.device_count())\n"
  )
  env = SLURM | NODE | {"SLURM_STEP_NODELIST": "localhost,node2"}
  env["JAX_COORDINATOR_PORT"] = several.address().split(":")[1]
  for i, (_, out, err) in enumerate(_outputs(code, [[0], [1]], **env)):
    assert f"{i} 2 2" in out.splitlines(), err


@pytest.mark.slow
@pytest.mark.parametrize("process_id", [0, 1])
def test_a_real_process_whose_other_does_not_come(process_id):
  """jax by itself would end it by SIGABRT, with a stack of C++."""
  address = several.address()
  ((status, out, err),) = _outputs(JOIN, [(1, address, 2, process_id)])
  assert status == exit_codes.EXIT_RESTART and out == ""
  (line,) = err.splitlines()
  assert f"{address}: process {process_id} of 2 waited 1 s in vain" in line


@pytest.mark.nightly
def test_real_processes_that_do_not_meet_later_end_alike():
  """One of them waits for 1 s at a barrier of the coordinator."""
  code = (
    "from jax._src import distributed\n"
    "time.sleep(5 * int(flags['process_id']))\n"
    "try:\n"
    "  distributed.global_state.client.wait_at_barrier('a', 1000)\n"
    "except Exception as e:\n"
    "  exit_codes.end_if_joined(e, 30)\n"
  )
  for status, _, err in _of_two(code):
    assert status == exit_codes.EXIT_RESTART, err
    assert "DEADLINE_EXCEEDED" in err and "Traceback" not in err


@pytest.mark.nightly
def test_a_process_may_be_late_for_the_first_collective():
  """Gloo waits for 30 s, and starts as the processes join."""
  code = (
    "from jax.experimental import multihost_utils\n"
    "time.sleep(35 * int(flags['process_id']))\n"
    "multihost_utils.sync_global_devices('a')\n"
  )
  for status, _, err in _of_two(code):
    assert status == 0, err
