"""The type of numbers that must not be rounded to bfloat16."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def at_least_float32(dtype: DTypeLike) -> np.dtype:
  """Returns float32, or float64 for float64: for statistics, softmax, heads."""
  return jnp.promote_types(dtype, jnp.float32)
