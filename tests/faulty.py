"""Modules of one's own that a run refuses, or notes; see test_examples.py."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from my_lab.plain import Plain
from my_lab.twins import Twins

from vit_jax.callbacks import Callback
from vit_jax.options import option


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
class Local(Twins):
  """Its memory is a mean over the rows of a device."""

  def make(self, model, run_shape, models):
    learner = super().make(model, run_shape, models)

    def targets(teacher, batch, rng, step, memory, over):
      found = learner.targets(teacher, batch, rng, step, memory, over)
      bright = batch["views"].astype(jnp.float32).mean((1, 2, 3, 4))
      rows = {**found.rows, "bright": bright - memory["centre"]}
      return found._replace(rows=rows, memory={"centre": bright.mean()})

    first = {"centre": jnp.zeros(())}
    return dataclasses.replace(learner, targets=targets, memory=first)


class _Headed(nn.Module):
  network: nn.Module
  is_shared: bool

  def setup(self):
    if self.is_shared:
      nn.share_scope(self, self.network)
    self.projection = nn.Dense(8)

  def __call__(self, images, **options):
    logits, out = self.network(images, **options)
    return logits, out | {"pre_logits": self.projection(out["pre_logits"])}


@dataclasses.dataclass(frozen=True)
class Headed(Twins):
  """A network with a projection of the objective's own."""

  own = "projection/"
  is_shared: bool = option(True, "whether the network is at the root")

  def network(self, model):
    return _Headed(super().network(model), self.is_shared)


@dataclasses.dataclass(frozen=True)
class Disowned(Headed):
  """The same, which does not say what is its own."""

  own = None


@dataclasses.dataclass(frozen=True)
class Headless(Plain):
  """A family whose declared head is not there."""

  HEADS = r"answer/"
