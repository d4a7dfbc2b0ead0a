"""The learning rate of a run in its metrics."""

from collections.abc import Callable

import jax
import numpy as np

from vit_jax.callbacks.base import Callback


class LearningRate(Callback):
  """Adds `lr`, the learning rate of the newest update that was applied.

  A skipped step applies none, so the schedule lags by the number of `skipped`
  steps. `NonFinite`, an earlier callback, counts them.

  Args:
    schedule: Jitted; updates applied so far -> learning rate.
  """

  def __init__(self, schedule: Callable[[jax.Array], jax.Array]):
    self._schedule = schedule

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    updates = step - 1 - int(values.get("skipped", 0))
    rate = self._schedule(jax.device_put(np.int32(updates)))
    return values | {"lr": float(jax.device_get(rate))}
