"""Flags, variables and SLURM state the process; errors are reported."""

import socket
import subprocess
import sys
import time

import jax
import pytest
import several

from vit_jax.callbacks import run_lock
from vit_jax.commands import evaluate, train
from vit_jax.config import ConfigError, cli
from vit_jax.distributed import exit_codes, processes, tpu_slice
from vit_jax.distributed.signals import StopSignals

FLAGS = {
  "coordinator": "host0:1234",
  "num_processes": "2",
  "process_id": "1",
}
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


@pytest.fixture
def calls(monkeypatch):
  """Arguments that jax got, on a machine without the variables and a TPU."""
  for name in (*VARIABLES, *SLURM, "JAX_LOCAL_DEVICE_IDS"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(tpu_slice, "is_tpu_vm", lambda: False)
  calls = []
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda **settings: calls.append(settings)
  )
  return calls


def _set(monkeypatch, variables):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)


def _is_tpu(monkeypatch, tpu):
  """On a TPU VM whose slice is that."""
  monkeypatch.setattr(tpu_slice, "is_tpu_vm", lambda: True)
  monkeypatch.setattr(tpu_slice, "find", lambda: tpu)


def _errors(flags=None, errors=(), **options):
  with pytest.raises(ConfigError) as e:
    processes.initialise(flags, errors, **options)
  return e.value.errors


def test_a_process_on_its_own_joins_nobody(calls, capfd):
  processes.initialise()
  processes.initialise({**dict.fromkeys(FLAGS), "workdir": "x"})
  assert calls == [] and capfd.readouterr() == ("", "")


def test_flags_come_first(calls, monkeypatch):
  _set(monkeypatch, VARIABLES | SLURM)
  _is_tpu(monkeypatch, HOSTS)
  processes.initialise({**FLAGS, "workdir": "x"})
  assert calls == [
    {
      "coordinator_address": "host0:1234",
      "num_processes": 2,
      "process_id": 1,
      "cluster_detection_method": "deactivate",
      "local_device_ids": [1],
      "heartbeat_timeout_seconds": 30,
      "initialization_timeout": 360,
    }
  ]


def test_then_environment_variables(calls, monkeypatch):
  _set(monkeypatch, VARIABLES)
  processes.initialise(dict.fromkeys(FLAGS))
  (call,) = calls
  assert call["coordinator_address"] == "host9:99"
  assert (call["num_processes"], call["process_id"]) == (4, 3)
  assert call["local_device_ids"] is None  # all of them


def test_then_slurm(calls, monkeypatch):
  _set(monkeypatch, SLURM)
  _is_tpu(monkeypatch, HOSTS)
  processes.initialise()
  (call,) = calls
  assert call["cluster_detection_method"] == "slurm"
  assert "coordinator_address" not in call  # jax finds it


def test_then_a_tpu_of_several_hosts(calls, monkeypatch, capfd):
  locks = []
  _is_tpu(monkeypatch, HOSTS)
  monkeypatch.setattr(tpu_slice, "lock", lambda: locks.append(len(calls)))
  processes.initialise(heartbeat_timeout_seconds=7)
  assert calls == [
    {"heartbeat_timeout_seconds": 7, "initialization_timeout": 360}
  ]
  assert locks == [0]  # before it joins
  assert capfd.readouterr().err == ""


def test_the_only_host_of_a_tpu_joins_nobody_and_says_so(
  calls, monkeypatch, capfd
):
  """A coordinator at jax's fixed port would meet a second process there."""
  _is_tpu(monkeypatch, tpu_slice.Slice(False, "X has 1 host"))
  processes.initialise()
  out, err = capfd.readouterr()
  assert calls == [] and out == ""
  assert err == "TPU slice: X has 1 host; this process works alone.\n"


@pytest.mark.parametrize(
  "changes, device_ids",
  [
    ({}, [1]),  # a task a GPU, all see all
    ({"CUDA_VISIBLE_DEVICES": "1"}, []),  # --gpus-per-task=1
    (NODE, []),  # all eight, where jax would take the first
    # Four tasks on two nodes: four GPUs each, seen with the others' or alone.
    (NODE | {"SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, [4, 5, 6, 7]),
    (
      NODE | {"SLURM_NTASKS": "4", "CUDA_VISIBLE_DEVICES": "4,5,6,7"},
      [],
    ),
    ({"CUDA_VISIBLE_DEVICES": ""}, None),  # jax takes the task's number
    ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, None),  # jax reads it
  ],
)
def test_devices_of_a_slurm_task(calls, monkeypatch, changes, device_ids):
  _set(monkeypatch, SLURM | changes)
  processes.initialise()
  assert [c["local_device_ids"] for c in calls] == [device_ids]


@pytest.mark.parametrize(
  "changes",
  [
    {"SLURM_STEP_NODELIST": None, "SLURM_STEP_NUM_TASKS": None},  # sbatch
    {"SLURM_STEP_NUM_TASKS": "1"},  # a shell in an allocation
  ],
)
def test_without_srun_a_process_is_alone_and_says_so(
  calls, monkeypatch, capfd, changes
):
  variables = {k: v for k, v in (SLURM | changes).items() if v}
  _set(monkeypatch, variables)
  processes.initialise()
  out, err = capfd.readouterr()
  assert calls == [] and out == ""
  assert err == (
    "SLURM has 16 tasks for this job, but this process works alone: put srun"
    " before the command.\n"
  )


def test_a_slurm_job_of_one_task_is_alone(calls, monkeypatch, capfd):
  _set(monkeypatch, SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})
  processes.initialise()
  assert calls == [] and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("names", [processes.VARIABLES, tuple(FLAGS)])
def test_all_three_or_none(calls, monkeypatch, names):
  is_flag = names == tuple(FLAGS)
  flags = {names[1]: "2"} if is_flag else {}
  if not is_flag:
    monkeypatch.setenv(names[1], "2")
  options = [f"--{n}" for n in names] if is_flag else names
  wrong = [error.split(":")[0] for error in _errors(flags)]
  assert wrong == [options[0], options[2]]
  assert calls == []


def test_flags_are_not_filled_up_by_the_environment(calls, monkeypatch):
  _set(monkeypatch, VARIABLES)
  errors = _errors({"coordinator": "host0:1234"})
  assert [f.split(":")[0] for f in errors] == [
    "--num_processes",
    "--process_id",
  ]


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({"coordinator": "host0"}, "--coordinator: got 'host0', expected host:po"),
    ({"process_id": "2"}, "--process_id: got '2', expected a number from 0 to"),
    ({"num_processes": "0"}, "--num_processes: got '0', expected a number"),
  ],
)
def test_values_are_checked(calls, changes, expected):
  (error,) = _errors(FLAGS | changes)
  assert error.startswith(expected) and calls == []


@pytest.fixture
def ends(monkeypatch):
  """The process does not end: `SystemExit` has the code."""

  def end(code, *closing):
    for act in closing:
      act()
    sys.exit(code)

  monkeypatch.setattr(exit_codes, "end", end)


def _late(capfd, *args, **options) -> str:
  """Returns the sentence of a process that could not join."""
  with pytest.raises(SystemExit) as e:
    processes.initialise(*args, **options)
  assert e.value.code == exit_codes.EXIT_RESTART
  (line,) = capfd.readouterr().err.splitlines()
  return line


def test_others_who_do_not_come(calls, ends, monkeypatch, capfd):
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda **settings: time.sleep(5)
  )
  line = _late(capfd, FLAGS, timeout=0.1)
  assert line.startswith(
    "host0:1234: process 1 of 2 waited 0.1 s in vain for the others"
  )
  _set(monkeypatch, SLURM)
  line = _late(capfd, timeout=0.1)
  assert line.startswith(
    "SLURM job 77, first of the nodes node[001-002]: process 1 of 16 waited"
  )


def test_an_error_of_jax_is_passed_on(calls, ends, monkeypatch, capfd):
  def fails(**settings):
    raise RuntimeError("no such host\n(a stack)")

  monkeypatch.setattr(jax.distributed, "initialize", fails)
  monkeypatch.setattr(tpu_slice, "lock", lambda: None)
  _is_tpu(monkeypatch, HOSTS)
  line = _late(capfd)
  assert line.startswith(
    "TPU slice (TPU_WORKER_HOSTNAMES has 2 hosts): this process could not join"
    " (RuntimeError: no such host); "
  )


@pytest.mark.parametrize(
  "error, is_late",
  [
    (
      "Unable to initialize backend 'cpu': DEADLINE_EXCEEDED: GetKeyValue",
      True,
    ),
    ("Unable to initialize backend 'tpu': no libtpu", False),
  ],
)
def test_devices_of_the_others_that_do_not_come(
  calls, ends, monkeypatch, capfd, error, is_late
):
  def fails():
    raise RuntimeError(error)

  monkeypatch.setattr(jax, "devices", fails)
  if is_late:
    assert "DEADLINE_EXCEEDED" in _late(capfd, FLAGS)
  else:
    with pytest.raises(RuntimeError, match="no libtpu"):
      processes.initialise(FLAGS)


def test_a_port_that_is_taken(calls, ends, capfd):
  """jax would end by a segmentation fault."""
  with socket.create_server(("", 0)) as taken:
    address = f"localhost:{taken.getsockname()[1]}"
    line = _late(capfd, FLAGS | {"coordinator": address, "process_id": "0"})
  assert "cannot use its port" in line and calls == []


def test_a_config_that_computes_before_processes_join(calls, monkeypatch):
  def fails(**settings):
    raise RuntimeError("initialize() must be called before any JAX calls")

  monkeypatch.setattr(jax.distributed, "initialize", fails)
  monkeypatch.setattr(tpu_slice, "lock", lambda: None)
  _is_tpu(monkeypatch, HOSTS)
  (error,) = _errors()
  assert "vit-jax convert RUN RUN.npz --to=npz" in error


def _train(args: cli.Args) -> None:
  train.run(args, StopSignals(), time.time())


@pytest.mark.parametrize("command", [_train, evaluate.run])
def test_commands_raise_them_with_their_own_errors(calls, command, tmp_path):
  assert tuple(cli.PROCESS_FLAGS) == processes.FLAGS
  config = tmp_path / "mine.py"
  config.write_text("from vit_jax.config import defaults as get_config\n")
  args = cli.parse(
    "x",
    {
      **dict.fromkeys(("workdir", "checkpoint", "json"), ""),
      **dict.fromkeys(("allow_change", "profile"), ""),
      **cli.PROCESS_FLAGS,
    },
    [f"--config={config}", "--process_id=7", "--num_processes=2", "--wrkdir=x"],
  )
  with pytest.raises(SystemExit) as e:
    command(args)
  text = str(e.value)
  assert text.startswith("3 errors in the configuration:")
  assert "--wrkdir: no such flag. Did you mean 'workdir'?" in text
  assert "--coordinator: got none" in text
  assert "--process_id: got '7'" in text
  assert calls == []


@pytest.mark.parametrize("how", ["flags", "tpu"])
def test_a_second_start_does_not_join_the_run_that_goes_on(
  calls, monkeypatch, tmp_path, how
):
  """jax would abort all processes of that run."""
  config = tmp_path / "mine.py"
  config.write_text("from vit_jax.config import defaults as get_config\n")
  options = [f"--{k}={v}" for k, v in FLAGS.items()] if how == "flags" else []
  if how == "tpu":
    _is_tpu(monkeypatch, HOSTS)
  args = cli.parse(
    "x",
    {"workdir": "", "allow_change": "", "profile": "", **cli.PROCESS_FLAGS},
    [f"--config={config}", f"--workdir={tmp_path}", *options],
  )
  with run_lock.RunLock(str(tmp_path)), pytest.raises(SystemExit) as e:
    _train(args)
  assert "in which another run trains: host " in str(e.value) and calls == []


def _python(code, *options, **env):
  return subprocess.Popen(
    [sys.executable, "-c", code, *options],
    env=several.env() | env,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


@pytest.mark.slow
def test_real_processes_meet_as_tasks_of_slurm():
  """All variables are as srun sets them; both nodes are this machine."""
  port = several.address().split(":")[1]
  tasks = [
    _python(
      "import jax\n"
      "from vit_jax.distributed import processes\n"
      "processes.initialise(timeout=60)\n"
      "print(jax.process_index(), jax.process_count(), jax.device_count())\n",
      **SLURM
      | NODE
      | {
        "SLURM_PROCID": str(i),
        "SLURM_STEP_NODELIST": "localhost,node2",
        "JAX_COORDINATOR_PORT": port,
      },
    )
    for i in range(2)
  ]
  outputs = [task.communicate(timeout=90) for task in tasks]
  for i, (out, err) in enumerate(outputs):
    assert f"{i} 2 2" in out.splitlines(), err


@pytest.mark.slow
@pytest.mark.parametrize(
  "process_id, host", [(0, ""), (1, ""), (1, "nowhere.invalid:9")]
)
def test_a_real_process_whose_other_does_not_come(process_id, host):
  """jax by itself would end it by SIGABRT, with a stack of C++."""
  address = host or several.address()
  process = _python(
    "import sys\n"
    "from vit_jax.distributed import processes\n"
    "flags = dict(zip(processes.FLAGS, sys.argv[1:]))\n"
    "processes.initialise(flags, timeout=1)\n",
    *(address, "2", str(process_id)),
  )
  out, err = process.communicate(timeout=60)
  assert process.returncode == exit_codes.EXIT_RESTART and out == ""
  (line,) = err.splitlines()
  assert f"{address}: process {process_id} of 2 waited 1 s in vain" in line


@pytest.mark.slow
def test_real_processes_that_do_not_meet_later_end_alike():
  """One of them waits for 1 s at a barrier of the coordinator."""
  address = several.address()
  both = [
    _python(
      "import sys, time\n"
      "from jax._src import distributed\n"
      "from vit_jax.distributed import exit_codes, processes\n"
      "flags = dict(zip(processes.FLAGS, sys.argv[1:]))\n"
      "processes.initialise(flags, timeout=60)\n"
      "time.sleep(5 * int(flags['process_id']))\n"
      "try:\n"
      "  distributed.global_state.client.wait_at_barrier('a', 1000)\n"
      "except Exception as e:\n"
      "  exit_codes.end_if_joined(e, 30)\n",
      *(address, "2", str(process_id)),
    )
    for process_id in range(2)
  ]
  for process in both:
    out, err = process.communicate(timeout=90)
    assert process.returncode == exit_codes.EXIT_RESTART, err
    assert "did not meet in time (DEADLINE_EXCEEDED" in err
    assert "Traceback" not in err


@pytest.mark.nightly
def test_a_process_may_be_late_for_the_first_collective():
  """Gloo waits for 30 s, and starts as the processes join."""
  address = several.address()
  both = [
    _python(
      "import sys, time\n"
      "from jax.experimental import multihost_utils\n"
      "from vit_jax.distributed import processes\n"
      "flags = dict(zip(processes.FLAGS, sys.argv[1:]))\n"
      "processes.initialise(flags, timeout=60)\n"
      "time.sleep(35 * int(flags['process_id']))\n"
      "multihost_utils.sync_global_devices('a')\n",
      *(address, "2", str(process_id)),
    )
    for process_id in range(2)
  ]
  for process in both:
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
