"""Small runs in processes of their own, for the trials."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import several

ROOT = pathlib.Path(__file__).resolve().parents[2]
# All that a run can have within a few seconds: mixup, dropout, an average, two
# evaluators of which one scores in the background, three kinds of cadence.
CONFIG = """
from vit_jax.config import defaults

def get_config():
  c = defaults()
  c.total_steps = {steps}
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 2
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.model.dropout = 0.1
  c.data.dataset = "digits"
  c.data.ops = "decode|resize(20)|random_crop(16)"
  c.data.batch_size = 24
  c.objective.mixup = 0.4
  c.optim.lr, c.optim.warmup_steps, c.optim.ema_decay = 1e-3, 5, 0.9
  c.log_steps = 5
  c.checkpoint.every_steps = 7
  ops = "decode|resize(16)"
  test = dict(split="test[:101]", ops=ops)
  c.evals = dict(
    test=dict(kind="classification", every_steps=7, **test),
    few=dict(kind="fewshot", every_steps=15, l2=(1.0,), shots=(1, 5),
             train_split="train[:160]", **test),
  )
  return c
"""


def write_config(folder: pathlib.Path, steps: int = 60) -> pathlib.Path:
  """Writes the config of a small run; returns its file."""
  path = folder / "small.py"
  path.write_text(CONFIG.format(steps=steps))
  return path


def environment(folder: pathlib.Path) -> dict[str, str]:
  """Returns that of a process whose data and compiled programs are in a folder
  that all runs of a trial share, or all trials: that of $TRIALS_SHARE."""
  shared = pathlib.Path(os.environ.get("TRIALS_SHARE", folder))
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return env | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XDG_CACHE_HOME": str(shared / "cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "TFDS_DATA_DIR": os.environ.get("TFDS_DATA_DIR", str(shared / "tfds")),
    "PYTHONUNBUFFERED": "1",
  }


def start(
  config: pathlib.Path,
  workdir: pathlib.Path,
  options: Sequence[str] = (),
  processes: int = 1,
  env: Mapping[str, str] | None = None,
  acts: Mapping[int, Sequence[str]] | None = None,
) -> list[subprocess.Popen]:
  """Starts the processes of a run; their output goes to files of `workdir`'s
  name with .0.log and so on, appended.

  Args:
    config: File of the config; all runs of a folder share data and programs.
    workdir: Folder of the run.
    options: More of the command line.
    processes: How many.
    env: Variables of the environment beside those of `environment`.
    acts: Process -> the arguments of `acting.py`, for those that act.
  """
  started = []
  for i, command in enumerate(
    commands(config, workdir, options, processes, acts)
  ):
    with log(workdir, i).open("ab") as file:
      started.append(
        subprocess.Popen(
          command,
          cwd=config.parent,
          env=environment(config.parent) | dict(env or {}),
          stdin=subprocess.DEVNULL,
          stdout=file,
          stderr=subprocess.STDOUT,
          start_new_session=True,
        )
      )
  return started


def commands(
  config: pathlib.Path,
  workdir: str | os.PathLike,
  options: Sequence[str] = (),
  processes: int = 1,
  acts: Mapping[int, Sequence[str]] | None = None,
) -> list[list[str]]:
  """Returns the command line of each process; arguments as for `start`."""
  address, lines = several.address(), []
  for i in range(processes):
    acting = acts and i in acts
    program = ["faults.acting", *acts[i]] if acting else ["vit_jax", "train"]
    line = [sys.executable, "-m", *program, f"--config={config}"]
    line += [f"--workdir={workdir}", *options]
    if processes > 1:
      line += [f"--coordinator={address}", f"--process_id={i}"]
      line += [f"--num_processes={processes}"]
    lines.append(line)
  return lines


def wait_for(
  workdir: pathlib.Path,
  text: str,
  started: Sequence[subprocess.Popen],
  *,
  process: int = 0,
  count: int = 1,
  seconds: float = 300.0,
) -> float:
  """Waits until a process has printed a text so many times.

  Returns:
    When, by time.monotonic().

  Raises:
    AssertionError: It has not in this time, or all of `started` have ended.
  """
  end = time.monotonic() + seconds
  while True:
    have_ended = all(p.poll() is not None for p in started)
    if log(workdir, process).read_text(errors="replace").count(text) >= count:
      return time.monotonic()
    in_vain = f"no {text!r}:\n{output(workdir, process)}"
    assert not have_ended and time.monotonic() < end, in_vain
    time.sleep(0.05)


def log(workdir: pathlib.Path, process: int = 0) -> pathlib.Path:
  """Returns the file of what a process printed."""
  return workdir.with_name(f"{workdir.name}.{process}.log")


def output(workdir: pathlib.Path, process: int = 0, last: int = 3000) -> str:
  """Returns the end of what a process printed."""
  return log(workdir, process).read_text(errors="replace")[-last:]


def finish(started: Sequence[subprocess.Popen], seconds: float) -> list[int]:
  """Waits for processes and returns their codes; those left are killed.

  Raises:
    AssertionError: One was still there.
  """
  end = time.monotonic() + seconds
  try:
    return [p.wait(max(0.1, end - time.monotonic())) for p in started]
  except subprocess.TimeoutExpired:
    raise AssertionError(f"a process did not end in {seconds:g} s") from None
  finally:
    kill(started)


def kill(started: Sequence[subprocess.Popen]) -> None:
  """Kills what is left of processes and of their children."""
  for process in started:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def whole(
  config: pathlib.Path,
  workdir: pathlib.Path,
  options: Sequence[str] = (),
  processes: int = 1,
  seconds: float = 300,
) -> float:
  """Runs to the end; returns the seconds that it took."""
  began = time.monotonic()
  codes = finish(start(config, workdir, options, processes), seconds)
  outputs = "\n".join(output(workdir, i) for i in range(processes))
  assert not any(codes), f"ended with {codes}:\n{outputs}"
  return time.monotonic() - began


def arrays(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns every array of the newest checkpoint: parameters, optimizer,
  average, step."""
  import jax

  from vit_jax.checkpointing import checkpointer

  step = checkpointer.find(str(workdir))
  return {
    item + jax.tree_util.keystr(path): np.asarray(leaf)
    for item in ("params", "train")
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      checkpointer.load_tree(str(step / item))[0]
    )
  }


def rows(workdir: pathlib.Path) -> list[dict]:
  """Returns the rows of metrics.jsonl without what measures the machine."""
  from vit_jax.writers.metric_writer import is_measured

  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if not is_measured(k)}
    for line in lines
  ]


def board(workdir: pathlib.Path) -> list[dict]:
  """Returns what TensorBoard reads, as `rows` does."""
  from tensorboard.backend.event_processing import event_file_loader

  from vit_jax.writers.metric_writer import is_measured

  rows = []
  for path in sorted((workdir / "tensorboard").glob("*tfevents*")):
    for event in event_file_loader.LegacyEventFileLoader(str(path)).Load():
      if event.HasField("summary"):
        values = {v.tag: v.simple_value for v in event.summary.value}
        row = {"step": event.step, **values}
        rows.append({k: v for k, v in row.items() if not is_measured(k)})
  return rows


def assert_same(got: pathlib.Path, want: pathlib.Path) -> int:
  """Compares two runs bit by bit: newest checkpoint, metrics, TensorBoard.

  Returns:
    The number of numbers in their arrays.

  Raises:
    AssertionError: The first difference.
  """
  a, b = arrays(got), arrays(want)
  assert a.keys() == b.keys(), f"arrays {a.keys() ^ b.keys()}"
  for key in a:
    same = a[key].dtype == b[key].dtype and a[key].shape == b[key].shape
    same = same and a[key].tobytes() == b[key].tobytes()
    assert same, f"{key} differs"
  mine, others = rows(got), rows(want)
  steps = [[(r["step"], *sorted(r)) for r in x] for x in (mine, others)]
  assert steps[0] == steps[1], (
    f"rows {[s[:2] for s in steps[0]]} are not {[s[:2] for s in steps[1]]}"
  )
  for r, s in zip(mine, others, strict=True):
    assert r == s, f"row {r} is not {s}"
  shown = [
    {k: v if k == "step" else float(np.float32(v)) for k, v in r.items()}
    for r in mine
  ]
  assert board(got) == shown, "TensorBoard has other rows than metrics.jsonl"
  return sum(x.size for x in a.values())
