"""The cache of compiled programs, the first step, and its line."""

import os

import jax
import pytest
import tiny
from compiled import Compiled

from vit_jax.callbacks import Callback, CallbackList, startup
from vit_jax.train import train_and_evaluate


@pytest.fixture
def clock(monkeypatch):
  now = [10.0]
  monkeypatch.setattr(startup.time, "time", lambda: now[0])
  return now


@pytest.fixture
def folder():
  """Returns the folder of compiled programs that jax has; none at first."""
  names = "jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches"
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update("jax_compilation_cache_dir", None)
  yield lambda: jax.config.jax_compilation_cache_dir
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.parametrize(
  "variable, inside", [("XDG_CACHE_HOME", ""), ("HOME", ".cache")]
)
def test_the_cache_is_on_in_the_users_cache_folder(
  tmp_path, monkeypatch, folder, variable, inside
):
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  monkeypatch.setenv(variable, str(tmp_path))
  startup.use_cache()
  path = tmp_path / inside / "vit_jax" / "xla"
  assert folder() == str(path) and path.is_dir()


@pytest.mark.parametrize(
  "count, expected", [(2, "gs://bkt/run/xla"), (1, None)]
)
def test_several_processes_keep_programs_in_the_run(
  monkeypatch, folder, count, expected
):
  monkeypatch.setattr(jax, "process_count", lambda: count)
  monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # not writable
  startup.use_cache("gs://bkt/run")
  assert folder() == expected


def test_a_cache_in_a_bucket_is_not_for_xla_itself(folder):
  """It cannot open what is there, whoever named it."""
  jax.config.update("jax_compilation_cache_dir", "gs://mine")
  startup.use_cache("gs://bkt/run")
  assert folder() == "gs://mine"
  assert jax.config.jax_persistent_cache_enable_xla_caches == "none"


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


class _Scores(Callback):
  def __init__(self):
    self.seen = []

  def on_scores(self, step, scores):
    self.seen.append((step, scores["digits/top1"]))


@pytest.mark.slow
def test_a_run_compiles_its_step_once_and_callbacks_see_all_scores(
  tmp_path,
):
  """A thread begins before there is a batch, and compiles for its shapes."""
  score = dict(kind="classification", dataset="digits", split="test[:64]")
  score |= dict(ops="decode|resize(16)", every_steps=1, at_start=True)
  config = tiny.config(
    total_steps=2, model__depth=1, optim__warmup_steps=0, evals__digits=score
  )
  scores = _Scores()
  with tiny.devices(1), Compiled() as compiled:
    train_and_evaluate(config, str(tmp_path), tiny.Data(), callbacks=[scores])
  assert compiled.names.count("train_step") == 1
  assert [step for step, _ in scores.seen] == [0, 1, 2]
  # The head begins at zero: the first class of all.
  assert 0.05 < scores.seen[0][1] < 0.2
