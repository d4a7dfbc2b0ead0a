"""A run that is stopped saves, and goes on to the bits of one left alone.

`make faults` does this with signals, in all phases, and with two processes.
"""

import threading

import pytest
from faults import runs

from vit_jax import train
from vit_jax.callbacks.base import Callback, Stop
from vit_jax.config import cli
from vit_jax.evaluators import fewshot
from vit_jax.tools.reporting import run_state
from vit_jax.tools.reporting.runs import find_runs

STEPS = 18
pytestmark = pytest.mark.faults


class StopAt(Callback):
  """Stops a run after a step, or in the evaluation that follows it."""

  def __init__(self, step, in_evaluation=False):
    self._stop_step, self._in_evaluation = step, in_evaluation
    self._step, self.stops = 0, threading.Event()

  def on_step(self, step, batch, metrics):
    self._step = step

  def on_eval_batch(self):
    self._stop_if(self._in_evaluation)

  def check_stop(self, step):
    self._stop_if(not self._in_evaluation)

  def stop_requested(self):
    return self.stops.is_set()

  def _stop_if(self, is_place):
    if is_place and self._step == self._stop_step:
      self.stops.set()
      raise Stop("SIGTERM")


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

  stop = StopAt(7, in_evaluation=True)
  with pytest.raises(Stop) as stopped:
    train.train_and_evaluate(config, str(workdir), callbacks=[stop])
  assert stopped.value.step == 7 and _steps(workdir) == [7]
  assert _scored(workdir) == []  # given up: made up for
  (run,) = find_runs(workdir)
  state = run_state.state(run)
  assert state.kind == run_state.STOPPED
  assert "SIGTERM at step 7" in state.text

  # Scores of an earlier step, in the background, are waited for.
  stop, score = StopAt(16), fewshot.Fewshot.score

  def late(self, gathered):
    assert stop.stops.wait(60)
    return score(self, gathered)

  with monkeypatch.context() as patch, pytest.raises(Stop) as stopped:
    patch.setattr(fewshot.Fewshot, "score", late)
    train.train_and_evaluate(config, str(workdir), callbacks=[stop])
  assert stopped.value.step == 16 and _steps(workdir) == [14, 16]
  assert _scored(workdir) == [(7, "test"), (14, "test"), (15, "few")]

  train.train_and_evaluate(config, str(workdir))
  runs.assert_same(workdir, want)


class StopAtTheEnd(Callback):
  """Stops a run when it waits for the scores of its last step."""

  is_last = has_evaluated = is_stopping = False

  def on_step(self, step, batch, metrics):
    self.is_last = step == STEPS

  def on_eval_batch(self):
    self.has_evaluated = self.is_last

  def stop_requested(self):
    self.is_stopping = self.has_evaluated
    return self.is_stopping

  def check_stop(self, step):
    if self.is_stopping:
      raise Stop("SIGTERM")


@pytest.mark.nightly
def test_scores_of_the_last_step_that_come_too_late_come_on_resume(
  config, tmp_path, monkeypatch
):
  workdir = tmp_path / "run"
  has_stopped, scored, score = threading.Event(), [], fewshot.Fewshot.score

  def late(self, gathered):
    scored.append(self)
    assert len(scored) == 1 or has_stopped.wait(60)  # 15, then 18
    return score(self, gathered)

  with monkeypatch.context() as patch, pytest.raises(Stop) as stopped:
    patch.setattr(fewshot.Fewshot, "score", late)
    train.train_and_evaluate(config, str(workdir), callbacks=[StopAtTheEnd()])
  has_stopped.set()
  assert stopped.value.step == STEPS and STEPS in _steps(workdir)
  assert (STEPS, "few") not in _scored(workdir)
  (run,) = find_runs(workdir)
  assert run_state.state(run).kind == run_state.STOPPED

  train.train_and_evaluate(config, str(workdir))
  assert _scored(workdir)[-2:] == [(STEPS, "test"), (STEPS, "few")]
  (run,) = find_runs(workdir)
  assert run_state.state(run).kind == run_state.FINISHED
