"""Stops a run on SIGTERM or Ctrl-C, in all its processes at the same step."""

from collections.abc import Mapping

from vit_jax.callbacks.base import Callback, Stop
from vit_jax.distributed.signals import StopSignals


class Preemption(Callback):
  """Raises `Stop` after a step, or after a batch of an evaluation.

  A single process stops at the first such place after SIGTERM or Ctrl-C.
  Several processes stop only on SIGTERM, which jax's preemption service may
  receive in any of them. All stop at the first place that none of them has
  passed. A place is the number of checks so far, the same in all processes.

  Args:
    signals: Signals of this process; None if jax receives them, as in one of
      several processes, or if nothing does.
  """

  def __init__(self, signals: StopSignals | None = None):
    self._signals = signals
    self._phase, self._step, self._num_checks = "start", 0, 0
    if signals is not None:
      signals.action = self.action

  def on_phase(self, name: str) -> None:
    self._phase = name

  def on_step(self, step: int, batch: Mapping, metrics: Mapping) -> None:
    self._step = step

  def on_eval_batch(self) -> None:
    self._check()

  def check_stop(self, step: int) -> None:
    self._check()

  def stop_requested(self) -> bool:
    return self._signals is not None and self._signals.received is not None

  def action(self) -> str | None:
    """Returns what the run does after a first signal; None without a state."""
    if not self._step:
      return None
    what = {
      "evaluation": "the evaluation is given up (the same command does it"
      " again), the state is saved",
      "save": "the checkpoint is completed",
    }.get(self._phase, "the state is saved at the next step")
    return f"the run is at step {self._step:,}; {what}"

  def _check(self) -> None:
    from jax.experimental import multihost_utils

    self._num_checks += 1
    if self._signals is not None:
      if self._signals.received is not None:
        raise Stop(self._signals.received)
    elif multihost_utils.reached_preemption_sync_point(self._num_checks):
      raise Stop("SIGTERM")
