"""The linear layers of a Transformer's blocks."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax

from vit_jax.models.chip import chip_of_step
from vit_jax.models.precision import bias_in_float32


def by_rows(
  x: jax.Array,
  kernel: jax.Array,
  dimensions: tuple[Any, Any],
  **options: Any,
) -> jax.Array:
  """Returns `jax.lax.dot_general`, of matrices in a train step on a CPU.

  There the tokens of all images are the rows of one matrix. In the forward pass
  XLA does so by itself. For the gradient of the kernel, a sum over images and
  tokens, it would copy both factors first: without, S/16's step takes 0.95 to
  0.97 of the time (docs/performance_log.md). A TPU copies nothing.

  Args:
    x: Inputs; the last dimensions are those of the sum.
    kernel: Its first dimensions are those of the sum.
    dimensions: As flax's layers give them: ((dimensions of the sum, of x and of
      the kernel), (none, none)).
    options: Other arguments of `jax.lax.dot_general`.
  """
  if chip_of_step()[0] != "cpu":
    return jax.lax.dot_general(x, kernel, dimensions, **options)
  num_summed = len(dimensions[0][0])
  rows, features = x.shape[:-num_summed], kernel.shape[num_summed:]
  size = math.prod(kernel.shape[:num_summed])
  out = jax.lax.dot_general(
    x.reshape(-1, size),
    kernel.reshape(size, -1),
    (((1,), (0,)), ((), ())),
    **options,
  )
  return out.reshape(*rows, *features)


# Biases are float32, and so are the results: cast them to the type of products.
Dense = functools.partial(
  nn.Dense, promote_dtype=bias_in_float32, dot_general=by_rows
)
DenseGeneral = functools.partial(
  nn.DenseGeneral, promote_dtype=bias_in_float32, dot_general=by_rows
)
