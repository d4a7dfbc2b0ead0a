"""What the project exists for, in its smallest forms; these tests run first.

A run that is stopped, killed, damaged or moved ends as one that was not, two
processes stop together, and a notebook's cells run. `pytest -m faults` and
test_notebook.py have the other cases.
"""

import ast
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import signal
import time

import jax
import numpy as np
import optax
import pytest
import several
import tiny
from faults import runs

from vit_jax import sharding, train
from vit_jax.callbacks import Callback, Stop
from vit_jax.callbacks.preemption import Preemption
from vit_jax.checkpointing import checkpointer, layout
from vit_jax.config import Config
from vit_jax.distributed import processes
from vit_jax.evaluators.evaluator import Evaluator, EvaluatorConfig

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"
STEPS = 6


def _config(**changes) -> Config:
  """Six steps, with a checkpoint after every second one."""
  return tiny.config(
    **{
      "total_steps": STEPS,
      "log_steps": 1,
      "checkpoint__every_steps": 2,
      "model__depth": 1,
      "mesh__fsdp": 2,
      "optim__ema_decay": 0.9,
      "optim__schedule": "constant",  # runs of other lengths are compared
      **changes,
    }
  )


class _Data(tiny.Data):
  """Another batch in each step; `starts` are the steps it was read from."""

  def __init__(self, pause: float = 0.0):
    self.starts, self._pause = [], pause

  def batches(self, start_step, process_index, process_count):
    self.starts.append(start_step)
    for batch in super().batches(start_step, process_index, process_count):
      time.sleep(self._pause)
      yield {
        k: np.split(v, process_count)[process_index] for k, v in batch.items()
      }


@dataclasses.dataclass(frozen=True)
class Norm(EvaluatorConfig):
  """Scores a norm of the parameters after every second step."""

  SPLITS = ()

  def make(self, context):
    return _Norm(context)


class _Norm(Evaluator):
  def gather(self, params):
    return optax.global_norm(params)

  def score(self, gathered):
    return {f"{self.config.name}/norm": float(gathered)}


class _At(Callback):
  """Calls a function after a step, when the loop asks whether to stop."""

  def __init__(self, step, function):
    self._step, self._function = step, function

  def check_stop(self, step):
    if step == self._step:
      self._function()


def _train(workdir, *callbacks) -> list[int]:
  """Trains to the last step; returns the steps that the data began with.

  On two of the devices: eight are compiled for, and saved, in longer time.
  """
  data, make_mesh = _Data(), sharding.make_mesh
  with pytest.MonkeyPatch.context() as patch:
    two = lambda mesh: make_mesh(mesh, jax.devices()[:2])
    patch.setattr(sharding, "make_mesh", two)
    train.train_and_evaluate(_config(), str(workdir), data, callbacks=callbacks)
  return data.starts


def _steps(workdir) -> list[str]:
  return sorted(p.name for p in (workdir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a run that nothing happened to; with checkpoints 2, 4, 6."""
  folder = tmp_path_factory.mktemp("headlines") / "whole"
  _train(folder)
  return folder


@pytest.fixture(scope="module")
def process():
  """Returns a process, as yet to be started, of a function and its arguments.

  All are forked from one that has imported the trainer, which takes longer than
  what they do.
  """
  context, started = multiprocessing.get_context("forkserver"), []
  context.set_forkserver_preload(["pytest", "vit_jax.train"])

  def of(function, *args):
    started.append(context.Process(target=function, args=args))
    return started[-1]

  yield of
  for each in started:
    if each.is_alive():
      each.kill()


def _stop():
  raise Stop("a test")


def _killed(workdir):
  """Dies when the arrays of the last checkpoint are on disk, and no more."""
  write = layout.write_digests

  def write_or_die(folder, items, metadata):
    if metadata["step"] == STEPS:
      os.kill(os.getpid(), signal.SIGKILL)
    write(folder, items, metadata)

  layout.write_digests = write_or_die
  _train(workdir)


def test_a_killed_run_ends_in_the_same_bits(whole, tmp_path, process):
  """The last checkpoint is unfinished, and the one before it lost a half."""
  workdir = tmp_path / "run"
  with pytest.raises(Stop):
    _train(workdir, _At(3, _stop))
  killed = process(_killed, workdir)
  killed.start()
  killed.join(300)
  assert killed.exitcode == -signal.SIGKILL
  three, four, unfinished = _steps(workdir)
  assert [three, four] == ["3", "4"] and unfinished.startswith("6.")
  files = (workdir / "checkpoints/4/train").rglob("d/*")
  largest = max(files, key=lambda p: p.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  assert _train(workdir) == [3]
  assert runs.assert_same(workdir, whole) > 10_000


def _one_of_two(index, address, workdir):
  """Process 1 gets SIGTERM after a step; they may stop after any later one."""
  os.environ["XLA_FLAGS"] = several.env()["XLA_FLAGS"]  # one device
  flags = dict(zip(processes.FLAGS, (address, "2", str(index)), strict=True))
  processes.initialise(flags, stops_on_sigterm=True)
  assert jax.device_count() == 2
  term = _At(STEPS, lambda: index and os.kill(os.getpid(), signal.SIGTERM))
  # The step of the checkpoint has no score yet.
  ops = "decode|resize(16)"
  config = _config(
    total_steps=600,
    checkpoint__every_steps=0,
    mesh__fsdp=1,
    mesh__data=2,
    evals={"a": {"kind": "test_headlines:Norm", "every_steps": 2, "ops": ops}},
  )
  data = _Data(0.05)
  try:
    train.train_and_evaluate(
      config,
      str(workdir),
      data,
      callbacks=[Preemption(), term],
      allow_change=["total_steps", "evals"],
    )
  except Stop as stop:
    text = f"{data.starts[0]} {stop.step}"
    workdir.with_name(f"stopped{index}").write_text(text)
    jax.distributed.shutdown()


def test_two_processes_stop_at_one_step(whole, tmp_path, process):
  """Each has a device of those of a run with fsdp=2. Devices add float32 (eps
  1.2e-7) in another order. One row is masked, so they have no equal number."""
  folder, address = tmp_path / "run", several.address()
  shutil.copytree(whole, folder)
  shutil.rmtree(folder / "checkpoints/6")
  two = [process(_one_of_two, i, address, folder) for i in range(2)]
  for each in two:
    each.start()
  for each in two:
    each.join(300)
  assert [each.exitcode for each in two] == [0, 0]
  first, second = ((tmp_path / f"stopped{i}").read_text() for i in range(2))
  start, end = first.split()
  assert first == second and start == "4" and int(end) > STEPS
  assert end in _steps(folder)  # with the shards of both
  assert checkpointer.verify(layout.find(str(folder))) is None
  scored = [row["step"] for row in runs.rows(folder) if "a/norm" in row]
  assert scored[:2] == [4, 6]
  got, want = (
    [r["train/loss"] for r in runs.rows(path) if "train/loss" in r][:STEPS]
    for path in (folder, whole)
  )
  assert len(set(want)) == STEPS
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_cells_of_a_notebook_run(tmp_path, monkeypatch):
  """All its imports, and the cells on the order of the records."""
  nbformat = pytest.importorskip("nbformat")
  pyplot = pytest.importorskip("matplotlib.pyplot")
  pyplot.switch_backend("agg")
  monkeypatch.chdir(tmp_path)
  notebook = nbformat.read(NOTEBOOKS / "02_data.ipynb", as_version=4)
  cells = [c.source for c in notebook.cells if c.cell_type == "code"][1:]
  imports = (ast.Import, ast.ImportFrom)
  lines = [x for cell in cells for x in ast.parse(cell).body]
  lines = [ast.unparse(x) for x in lines if isinstance(x, imports)]
  first = next(i for i, cell in enumerate(cells) if "digits = " in cell)
  names = {}
  for source in [*lines, *cells[first:]]:
    exec(source, names)
  assert len(pyplot.get_fignums()) == 1
  pyplot.close("all")
  assert names["is_same"] and names["is_whole"]
  count = names["count"]
  for epoch in names["order"][: 2 * count].reshape(2, count):
    np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
