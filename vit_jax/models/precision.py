"""The type of what must not be rounded to bfloat16."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def at_least_float32(dtype: DTypeLike) -> np.dtype:
  """Returns float32, or float64 for it: of statistics, softmax and heads."""
  return jnp.promote_types(dtype, jnp.float32)
