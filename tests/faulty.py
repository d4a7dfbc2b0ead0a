"""Modules of one's own that a run refuses, or notes; see test_examples.py."""

import dataclasses

import jax.numpy as jnp
from my_lab.twins import Twins

from vit_jax.callbacks import Callback


class Logarithm(Callback):
  """Its metric is NaN, -inf and then a number."""

  name = "logarithm"

  def step_metrics(self, step, grads, updates, params, memory):
    return {"logarithm": jnp.log(step - 1.0)}, memory


@dataclasses.dataclass(frozen=True)
class Mixed(Twins):
  """A loss that is no sum over rows."""

  def make(self, model, run_shape, models):
    learner = super().make(model, run_shape, models)

    def loss(*arguments):
      total, count, named = learner.loss(*arguments)
      return jnp.log(total), count, named

    return dataclasses.replace(learner, loss=loss)


@dataclasses.dataclass(frozen=True)
class Whole(Twins):
  """A loss that needs all rows of a batch."""

  def make(self, model, run_shape, models):
    learner = super().make(model, run_shape, models)
    return dataclasses.replace(learner, whole_batch=True)
