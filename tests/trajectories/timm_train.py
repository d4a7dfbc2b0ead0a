"""Schedule, running mean and torch's Adam, as in timm's `train.py`.

config.optim.schedule = "timm_train:cosine(min_lr=1e-5, warmup_lr=1e-6)"
config.optim.name = "timm_train:adam"
config.objective.kind = "timm_train:Averaged"
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from vit_jax.objectives import Classification
from vit_jax.objectives.objective import Average
from vit_jax.options import SHARE, option


def cosine(lr, warmup_steps, total_steps, min_lr, warmup_lr):
  """Returns step -> rate: half a cosine over all steps of the run.

  The warm-up from warmup_lr takes the place of its first steps
  (`--warmup-prefix` is off, as by default).
  """

  def rate(step):
    rise = warmup_lr + (lr - warmup_lr) * step / warmup_steps
    wave = 0.5 * (1.0 + jnp.cos(jnp.pi * step / total_steps))
    return jnp.where(step < warmup_steps, rise, min_lr + (lr - min_lr) * wave)

  return rate


def adam(b1=0.9, b2=0.999, eps=1e-8):
  """Returns optax's Adam with 1 - b^t as exact as in torch.

  optax subtracts a float32 power from 1: for b2 = 0.999 this is wrong by 1e-5
  of the result in the first step, and by 1e-6 in the twentieth.
  """
  inner = optax.scale_by_adam(b1, b2, eps)

  def update(grads, state, params=None):
    _, state = inner.update(grads, state)
    c1, c2 = (-jnp.expm1(state.count * math.log(b)) for b in (b1, b2))
    scaled = lambda m, v: m / c1 / (jnp.sqrt(v / c2) + eps)
    return jax.tree.map(scaled, state.mu, state.nu), state

  return optax.GradientTransformation(inner.init, update)


@dataclasses.dataclass(frozen=True)
class Averaged(Classification):
  """Classification; evaluations see a running mean as of `ModelEmaV3`."""

  ema: float = option(0.9999, "decay of the running mean", limit=SHARE)

  def make(self, model, run_shape, models):
    """The first update copies the parameters, as with `step=updates`."""
    decay = lambda step: jnp.where(step == 0, 0.0, self.ema)
    learner = super().make(model, run_shape, models)
    return dataclasses.replace(learner, teacher=Average(decay, True))
