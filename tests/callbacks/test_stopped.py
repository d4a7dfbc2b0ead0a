"""A run that is stopped while it waits for its last scores.

`make faults` stops runs by signals, in all phases, and with two processes.
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


def _scored(workdir):
  return [
    (r["step"], name)
    for r in runs.rows(workdir)
    for name in ("test", "few")
    if any(k.startswith(f"{name}/") for k in r)
  ]


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
  tmp_path, monkeypatch
):
  path, workdir = runs.write_config(tmp_path, STEPS), tmp_path / "run"
  config = cli.parse("", {}, [f"--config={path}"]).config
  has_stopped, scored, score = threading.Event(), [], fewshot.Fewshot.score

  def late(self, gathered):
    scored.append(self)
    assert len(scored) == 1 or has_stopped.wait(60)  # 15, then 18
    return score(self, gathered)

  with monkeypatch.context() as patch, pytest.raises(Stop) as stopped:
    patch.setattr(fewshot.Fewshot, "score", late)
    train.train_and_evaluate(config, str(workdir), callbacks=[StopAtTheEnd()])
  has_stopped.set()
  assert stopped.value.step == STEPS
  assert (workdir / "checkpoints" / str(STEPS)).is_dir()
  assert (STEPS, "few") not in _scored(workdir)
  (run,) = find_runs(workdir)
  assert run_state.state(run).kind == run_state.STOPPED

  train.train_and_evaluate(config, str(workdir))
  assert _scored(workdir)[-2:] == [(STEPS, "test"), (STEPS, "few")]
  (run,) = find_runs(workdir)
  assert run_state.state(run).kind == run_state.FINISHED
