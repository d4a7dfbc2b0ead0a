"""The cache of compiled programs, and the first step."""

import jax
import pytest
import tiny
from compiled import Compiled

from vit_jax.callbacks import Callback, startup
from vit_jax.train import train_and_evaluate


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


def test_the_cache_of_a_run_in_a_bucket(monkeypatch, folder):
  """Of several processes; XLA itself cannot open what is there."""
  monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # not writable
  startup.use_cache("gs://bkt/run")
  assert folder() is None
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  startup.use_cache("gs://bkt/run")
  assert folder() == "gs://bkt/run/xla"
  assert jax.config.jax_persistent_cache_enable_xla_caches == "none"
  jax.config.update("jax_compilation_cache_dir", "gs://mine")
  startup.use_cache("gs://bkt/run")  # the user has named one
  assert folder() == "gs://mine"


class _Scores(Callback):
  def __init__(self):
    self.seen = []

  def on_scores(self, step, scores):
    self.seen.append((step, scores["digits/top1"]))


@pytest.mark.slow
def test_a_run_compiles_its_step_once_and_callbacks_see_all_scores(
  tmp_path, capfd
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
  assert "to the end of the first step: " in capfd.readouterr().err
  assert [step for step, _ in scores.seen] == [0, 1, 2]
  # The head begins at zero: the first class of all.
  assert 0.05 < scores.seen[0][1] < 0.2
