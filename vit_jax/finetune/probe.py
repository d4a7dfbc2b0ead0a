"""Begins with a linear probe as head, and chooses what is saved at the end."""

from collections.abc import Sequence

from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.progress import note
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.experiment import Experiment
from vit_jax.finetune import linear_probe
from vit_jax.step import TrainState


class LinearProbe(Callback):
  """config.init_head=linear_probe, see `vit_jax.finetune.linear_probe`.

  Args:
    experiment: The run.
    evaluators: Its evaluators.
  """

  def __init__(self, experiment: Experiment, evaluators: Sequence[Evaluator]):
    self._experiment, self._evaluators = experiment, evaluators

  def initial_state(self, state: TrainState) -> TrainState:
    """Returns the state with the probe as head; writes the probe."""
    state, probe = linear_probe.start(self._experiment, self._evaluators, state)
    note(f"probe       {probe}")
    return state

  def final_state(self, step: int, state: TrainState) -> TrainState:
    """Returns the fine-tuned model, the probe, or a mean of both."""
    workdir = self._experiment.workdir
    state, text = linear_probe.best(workdir, self._evaluators, state)
    note(f"saved       {text}")
    return state
