"""The cache of compiled programs, and the line about the first step."""

import logging
import os
import pathlib
import resource
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from vit_jax import train
from vit_jax.callbacks import CallbackList, startup


@pytest.fixture
def no_cache():
  """As in a process without settings, which are restored afterwards."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  yield
  jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def clock(monkeypatch):
  now = [10.0]
  monkeypatch.setattr(startup.time, "time", lambda: now[0])
  return now


@pytest.mark.parametrize(
  "variable, folder", [("XDG_CACHE_HOME", ""), ("HOME", ".cache")]
)
def test_the_cache_is_on_in_the_users_cache_folder(
  no_cache, tmp_path, monkeypatch, variable, folder
):
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  monkeypatch.setenv(variable, str(tmp_path))
  startup.use_cache()
  path = tmp_path / folder / "vit_jax" / "xla"
  assert jax.config.jax_compilation_cache_dir == str(path)
  assert path.is_dir()


@pytest.mark.parametrize("is_hit", [True, False])
def test_the_line_about_the_first_step(clock, is_hit):
  lines = []
  with CallbackList([startup.Startup(4.0, lines.append)]) as hooks:
    jax.monitoring.record_event(startup.CACHE_HIT)  # of another program
    if not is_hit:
      jax.monitoring.record_event(startup.CACHE_MISS)
    clock[0] = 10.5
    hooks.on_start(0, None, {})
    for step in range(2):
      with hooks.phase("input"):
        clock[0] += 0.25
      with hooks.phase("step" if step else "compile"):
        clock[0] += 1.25
      hooks.on_log(step, {})
  folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
  assert lines == [
    "start       8.0 s to the end of the first step: imports 6.0, model and"
    " state 0.5, evaluators 0.0, first batch 0.2, first step 1.2 (cache"
    f" {'hit' if is_hit else 'miss'}, {folder})"
  ]


class SeveralClasses(tiny.Data):
  is_multilabel = True

  def batches(self, *place):
    for batch in super().batches(*place):
      label = np.eye(tiny.NUM_CLASSES, dtype=np.float32)[batch["label"]]
      yield {**batch, "label": label}


@pytest.mark.parametrize(
  "data, loss",
  [
    (tiny.Data, "softmax"),
    pytest.param(SeveralClasses, "sigmoid", marks=pytest.mark.slow),
  ],
)
def test_a_run_compiles_its_step_once(data, loss, tmp_path, caplog):
  """The thread that begins before there is a batch compiles for its shapes."""
  config = tiny.config(
    total_steps=2, optim__warmup_steps=0, evals={}, objective__loss=loss
  )
  jax.config.update("jax_log_compiles", True)  # in all threads
  try:
    with caplog.at_level(logging.WARNING):
      train.train_and_evaluate(config, str(tmp_path), data())
  finally:
    jax.config.update("jax_log_compiles", False)
  names = [m for m in caplog.messages if m.startswith("Compiling jit(")]
  assert sum("jit(train_step)" in name for name in names) == 1, names


def test_the_step_is_imported_in_three_seconds():
  """Measures processor time, without other programs on this machine."""

  def seconds():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
      [sys.executable, "-c", "import vit_jax.step"],
      check=True,
      cwd=pathlib.Path(__file__).parents[2],
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(
      getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime")
    )

  # At best: a machine that is busy with other things counts them in.
  assert any(seconds() < 3 for _ in range(3))
