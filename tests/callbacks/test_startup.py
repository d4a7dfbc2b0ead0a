"""The cache of compiled programs, and the line about the first step."""

import os

import jax
import pytest

from vit_jax.callbacks import CallbackList, startup


@pytest.fixture
def clock(monkeypatch):
  now = [10.0]
  monkeypatch.setattr(startup.time, "time", lambda: now[0])
  return now


@pytest.mark.parametrize(
  "variable, folder", [("XDG_CACHE_HOME", ""), ("HOME", ".cache")]
)
def test_the_cache_is_on_in_the_users_cache_folder(
  tmp_path, monkeypatch, variable, folder
):
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  monkeypatch.setenv(variable, str(tmp_path))
  before = jax.config.jax_compilation_cache_dir
  try:
    jax.config.update("jax_compilation_cache_dir", None)
    startup.use_cache()
    path = tmp_path / folder / "vit_jax" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(path)
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
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


@pytest.mark.slow
def test_a_run_compiles_its_step_once(seen):
  """A thread begins before there is a batch, and compiles for its shapes."""
  assert seen.compiled.count("train_step") == 1
