"""Logs the norm of each block's update; stops a run where one explodes."""

import optax

from vit_jax.callbacks import Callback, Stop


class BlockUpdates(Callback):
  def __init__(self, limit: float):
    self._limit = limit

  def step_metrics(self, grads, updates, params):
    blocks = updates["Transformer"]
    names = [name for name in blocks if name.startswith("encoderblock")]
    return {f"update_norm/{k}": optax.tree.norm(blocks[k]) for k in names}

  def on_log(self, step, values):
    self._norms = {k: v for k, v in values.items() if "update_norm" in k}
    return values

  def check_stop(self, step):
    if large := [k for k, v in self._norms.items() if v > self._limit]:
      raise Stop(f"{large[0]} = {self._norms[large[0]]:.3g}")
