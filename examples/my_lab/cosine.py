"""A callback with memory: does each block move on, or to and fro?"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.callbacks import Callback


def dot(a, b):
  return optax.tree.vdot(a, b) / jnp.maximum(
    optax.tree.norm(a) * optax.tree.norm(b), 1e-30
  )


class Cosine(Callback):
  """Logs the cosine of successive updates by block, averaged over steps."""

  name = "cosine"

  def __init__(self, decay: float = 0.9):
    self._decay = decay

  def init_memory(self, params):
    last = jax.tree.map(jnp.zeros_like, params)
    return {"last": last, "mean": dict.fromkeys(params, jnp.zeros(()))}

  def step_metrics(self, step, grads, updates, params, memory):
    mean = {
      name: self._decay * memory["mean"][name]
      + (1 - self._decay) * dot(updates[name], memory["last"][name])
      for name in updates
    }
    metrics = {f"cosine/{name}": value for name, value in mean.items()}
    return metrics, {"last": updates, "mean": mean}
