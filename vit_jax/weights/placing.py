"""Weights that a run starts from, put where its state is."""

from typing import Any

import jax
import jax.numpy as jnp


def with_weights(state: Any, params: Any) -> Any:
  """Returns a fresh state with the weights of config.init.

  Args:
    state: A `step.TrainState`, at step 0.
    params: Nested dict like that of the state; None where a parameter keeps its
      initial value, such as the head for other classes.
  """
  params = jax.tree.map(
    lambda fresh, new: (
      fresh if new is None else jax.device_put(new, fresh.sharding)
    ),
    state.params,
    params,
  )
  ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
  return state.replace(params=params, ema=ema)
