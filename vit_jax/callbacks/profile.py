"""A trace of some steps for TensorBoard's profiler: `train --profile=STEP`.

It is imported only on request, because clu's module loads TensorFlow, which
takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
from clu import periodic_actions, profiler

from vit_jax.callbacks.base import Callback
from vit_jax.options import ConfigError, unexpected

if TYPE_CHECKING:
  from vit_jax.step import TrainState

NUM_STEPS = 5


class Profile(Callback):
  """Writes a trace of `NUM_STEPS` steps, in process 0.

  TensorBoard shows it beside the metrics of the run, with the package
  tensorboard-plugin-profile. The train loop annotates the steps.

  Args:
    logdir: Folder of the run's TensorBoard files.
    first_step: Step after which the trace begins; 1 or more, so that the
      compilation of the first step is not in it.
  """

  def __init__(self, logdir: str, first_step: int):
    self._first_step = first_step
    self._last_step = first_step + NUM_STEPS
    self._step = 0
    self._profile = periodic_actions.Profile(
      logdir=logdir,
      num_profile_steps=NUM_STEPS,
      profile_duration_ms=None,
      first_profile=first_step,
      every_secs=None,
    )

  def on_start(self, start: int, state: TrainState, saved: Mapping) -> None:
    """See `Callback`.

    Raises:
      ConfigError: The run resumes at `first_step` or later.
    """
    if self._first_step <= start:
      later = f"a step after {start:,}, from which the run resumes"
      raise ConfigError([unexpected("--profile", self._first_step, later)])

  def on_step(
    self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping
  ) -> None:
    if jax.process_index() == 0 and step <= self._last_step:
      if step in (self._first_step, self._last_step):
        jax.block_until_ready(metrics)  # whole steps are in the trace
      self._step = step
      self._profile(step)

  def close(self, error: BaseException | None) -> None:
    if self._first_step <= self._step < self._last_step:
      profiler.stop()  # the run ended within the trace
