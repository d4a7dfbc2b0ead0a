"""A run that had a notice saves, and goes on to the bits of one left alone.

`make faults` does this with signals, in all phases, and with two processes.
"""

import time

import pytest
from trials import runs

from vit_jax import train
from vit_jax.callbacks.defaults import Stopping
from vit_jax.callbacks.preemption import Notices, Stop
from vit_jax.config import cli
from vit_jax.evaluators import fewshot
from vit_jax.reporting import run_state
from vit_jax.reporting.runs import find_runs

STEPS = 18


class At(Notices):
  """Has its notice in a phase, after a step."""

  def __init__(self, phase, step):
    super().__init__()
    self._at = (phase, step)

  def check(self):
    now = self.phases.now()
    if (now.name, now.step) == self._at:
      self.notice("SIGTERM")
    super().check()


@pytest.fixture
def config(tmp_path):
  path = runs.write_config(tmp_path, STEPS)
  return cli.parse("", {}, [f"--config={path}"]).config


def _steps(workdir):
  return sorted(
    int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()
  )


def _scored(workdir):
  return [
    (r["step"], name)
    for r in runs.rows(workdir)
    for name in ("test", "few")
    if any(k.startswith(f"{name}/") for k in r)
  ]


@pytest.mark.nightly
def test_a_stopped_run_ends_in_the_same_bits(config, tmp_path, monkeypatch):
  want, workdir = tmp_path / "want", tmp_path / "stopped"
  train.train_and_evaluate(config, str(want))

  stop = At("evaluation", 7)
  with pytest.raises(Stop) as stopped:
    train.train_and_evaluate(config, str(workdir), callbacks=[Stopping(stop)])
  assert stopped.value.step == 7 and _steps(workdir) == [7]
  assert _scored(workdir) == []  # given up: made up for
  (run,) = find_runs(workdir)
  told = run_state.state(run)
  assert told.kind == run_state.STOPPED
  assert "stopped by SIGTERM at step 7, which is saved. The same" in told.text

  # Scores of an earlier step, in the background, are waited for.
  stop, score = At("step", 16), fewshot.Fewshot.score

  def late(self, gathered):
    while stop.reason is None:
      time.sleep(0.01)
    return score(self, gathered)

  with monkeypatch.context() as patch, pytest.raises(Stop) as stopped:
    patch.setattr(fewshot.Fewshot, "score", late)
    train.train_and_evaluate(config, str(workdir), callbacks=[Stopping(stop)])
  assert stopped.value.step == 16 and _steps(workdir) == [14, 16]
  assert _scored(workdir) == [(7, "test"), (14, "test"), (15, "few")]

  train.train_and_evaluate(config, str(workdir))
  runs.assert_same(workdir, want)
