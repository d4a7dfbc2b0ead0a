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
# One task a node; four; one in all; an sbatch script; a shell in an allocation.
NODE = SLURM | {
  "SLURM_NTASKS": "2",
  "SLURM_STEP_NUM_TASKS": "2",
  "SLURM_LOCALID": "0",
}
FOUR = NODE | {"SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
ONE = SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
BATCH = {k: v for k, v in SLURM.items() if "STEP" not in k}
SHELL = SLURM | {"SLURM_STEP_NUM_TASKS": "1"}
HOSTS = tpu_slice.Slice(True, "TPU_WORKER_HOSTNAMES has 2 hosts")
HOST = tpu_slice.Slice(False, "X has 1 host")


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
    monkeypatch.setattr(tpu_slice, "lock", lambda: self.calls.append("lock"))
    initialize = lambda **settings: self.join(**settings)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    self.has()

  def has(self, variables=(), tpu=None):
    """Sets variables, and whether it is a VM of such a slice."""
    for name, value in dict(variables).items():
      self._patch.setenv(name, value)
    self._patch.setattr(tpu_slice, "is_tpu_vm", lambda: tpu is not None)
    self._patch.setattr(tpu_slice, "find", lambda: tpu)

  def fails(self, text):
    def join(**_):
      raise RuntimeError(text)

    self.join = join


@pytest.fixture
def machine(monkeypatch):
  return Machine(monkeypatch)


JOINED = {"heartbeat_timeout_seconds": 30, "initialization_timeout": 360}


@pytest.mark.parametrize(
  "variables, tpu, flags, want",
  [
    # Flags come first.
    (
      VARIABLES | SLURM,
      HOSTS,
      FLAGS,
      {
        "coordinator_address": "host0:1234",
        "num_processes": 2,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
        "local_device_ids": [1],
      },
    ),
    (  # Then variables; a process of these has all devices.
      VARIABLES,
      None,
      dict.fromkeys(FLAGS),
      {
        "coordinator_address": "host9:99",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
        "local_device_ids": None,
      },
    ),
    (  # Then SLURM; jax finds the coordinator.
      SLURM,
      HOSTS,
      {},
      {"cluster_detection_method": "slurm", "local_device_ids": [1]},
    ),
    # Then a TPU of several hosts, of which this is reserved before it joins.
    ({}, HOSTS, {}, {}),
  ],
)
def test_who_the_others_are(machine, capfd, variables, tpu, flags, want):
  machine.has(variables, tpu)
  processes.initialise({**flags, "workdir": "x"})
  lock = [] if want else ["lock"]
  assert machine.calls == [*lock, want | JOINED]
  assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
  "variables, tpu, word",
  [
    ({}, None, ""),
    (ONE, None, ""),
    # What seems to have others says that it is alone. At jax's fixed port a
    # coordinator would meet a second process.
    ({}, HOST, "X has 1 host"),
    (BATCH, None, "srun"),
    (SHELL, None, "srun"),
  ],
)
def test_a_process_on_its_own_joins_nobody(
  machine, capfd, variables, tpu, word
):
  machine.has(variables, tpu)
  processes.initialise(dict.fromkeys(FLAGS))
  out, err = capfd.readouterr()
  assert machine.calls == [] and out == ""
  assert word in err and bool(word) == bool(err)


@pytest.mark.parametrize(
  "variables, device_ids",
  [
    (SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, []),  # --gpus-per-task=1
    (NODE, []),  # all eight, where jax would take the first
    # Four tasks on two nodes: four GPUs each, seen with the others' or alone.
    (FOUR, [4, 5, 6, 7]),
    (FOUR | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, []),
    (SLURM | {"CUDA_VISIBLE_DEVICES": ""}, None),  # jax takes the task's number
    (SLURM | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, None),  # jax reads it
  ],
)
def test_devices_of_a_slurm_task(machine, variables, device_ids):
  machine.has(variables)
  processes.initialise()
  assert [c["local_device_ids"] for c in machine.calls] == [device_ids]


# Flags, and the options that errors name.
FIRST, SECOND, THIRD = VARIABLES


@pytest.mark.parametrize(
  "variables, flags, wrong",
  [
    # Flags are not filled up by the environment.
    (VARIABLES, {"num_processes": "2"}, ["--coordinator", "--process_id"]),
    (VARIABLES, FLAGS | {"coordinator": "host0"}, ["--coordinator"]),
    (VARIABLES, FLAGS | {"process_id": "2"}, ["--process_id"]),
    (VARIABLES, FLAGS | {"num_processes": "0"}, ["--num_processes"]),
    ({SECOND: "2"}, {}, [FIRST, THIRD]),
  ],
)
def test_all_three_are_needed_and_checked(machine, variables, flags, wrong):
  machine.has(variables)
  with pytest.raises(ConfigError) as e:
    processes.initialise(flags)
  assert [error.split(":")[0] for error in e.value.errors] == wrong
  assert machine.calls == []


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
  machine.has(SLURM)
  line = late(timeout=0.01)
  assert "job 77" in line and "node[001-002]: process 1 of 16" in line
  ends.set()


def test_jax_cannot_join(machine, late):
  machine.has(tpu=HOSTS)
  machine.fails("no such host\n(a stack)")
  line = late()
  assert HOSTS.reason in line and "no such host" in line
  # A config that computes before the processes join.
  machine.fails("initialize() must be called before any JAX calls")
  with pytest.raises(ConfigError, match="--config: .*vit-jax convert"):
    processes.initialise()


def test_devices_of_the_others_that_do_not_come(machine, late, monkeypatch):
  def devices():
    raise RuntimeError(text)

  monkeypatch.setattr(jax, "devices", devices)
  text = "DEADLINE_EXCEEDED: GetKeyValue"
  assert text in late(FLAGS)
  text = "no libtpu"
  with pytest.raises(RuntimeError, match=text):
    processes.initialise(FLAGS)


def test_a_port_that_is_taken(machine, late):
  """jax would end by a segmentation fault."""
  with socket.create_server(("", 0)) as taken:
    address = f"localhost:{taken.getsockname()[1]}"
    line = late(FLAGS | {"coordinator": address, "process_id": "0"})
  assert "cannot use its port" in line and machine.calls == []


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


def test_commands_raise_them_with_their_own_errors(machine, parsed):
  assert tuple(cli.PROCESS_FLAGS) == processes.FLAGS
  with pytest.raises(SystemExit) as e:
    evaluate.run(parsed("--process_id=7", "--num_processes=2", "--wrkdir=x"))
  for flag in ("wrkdir", "coordinator", "process_id"):
    assert f"--{flag}: " in str(e.value)
  assert machine.calls == []


def test_a_second_start_does_not_join_the_run_that_goes_on(
  machine, tmp_path, parsed
):
  """jax would abort all processes of that run."""
  machine.has(tpu=HOSTS)
  refused = pytest.raises(SystemExit, match="another run trains")
  with run_lock.RunLock(str(tmp_path)), refused:
    _train(parsed(f"--workdir={tmp_path}"))
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


def _of_two(code):
  """Returns the outputs of both processes of a pair that joins."""
  address = several.address()
  return _outputs(JOIN + code, [(60, address, 2, i) for i in range(2)])


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
  env = NODE | {"SLURM_STEP_NODELIST": "localhost,node2"}
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
