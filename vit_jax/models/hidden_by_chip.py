"""What a chip keeps of an MLP's hidden layer: GELU and dropout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.models.layers import chip_of_step
from vit_jax.models.noise import DRAWS, drop_at
from vit_jax.models.precision import at_least_float32

# TPUs whose matrix unit is so fast that GELU and noise, which XLA computes
# before and after each of the products that use them, take longer than the
# products. Estimated gains: docs/performance_log.md.
KEEP_SLOPE = ("v6e", "tpu7x")


def hidden(
  x: Float[Array, "b n f"], draws: DRAWS, rate: float, approximate: bool
) -> Float[Array, "b n f"]:
  """Returns dropout(gelu(x)) in the type of x, as the chip of this step does.

  Args:
    x: The first dense layer's output.
    draws: Of the block; without "hidden" nothing is dropped.
    rate: Probability to drop.
    approximate: Whether GELU is that with tanh, instead of erf.
  """
  keeps = chip_of_step()[1] in KEEP_SLOPE
  return (with_slope if keeps else _hidden)(x, draws, rate, approximate)


def _hidden(x, draws, rate, approximate):
  y = nn.gelu(x, approximate=approximate)
  return drop_at("hidden", y, draws, rate).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def with_slope(
  x: Float[Array, "b n f"], draws: DRAWS, rate: float, approximate: bool
) -> Float[Array, "b n f"]:
  """Returns what `hidden` does; the forward pass keeps result and derivative.

  Both are computed once in float32, and kept in the type of x: 2 bytes an
  element more than x alone in bfloat16.
  """
  return _hidden(x, draws, rate, approximate)


def _forward(x, draws, rate, approximate):
  precise = x.astype(at_least_float32(x.dtype))
  y, slope = jax.jvp(
    lambda x: _hidden(x, draws, rate, approximate),
    (precise,),
    (jnp.ones_like(precise),),
  )
  # The barrier keeps XLA from computing both anew in the backward pass.
  results = jax.lax.optimization_barrier(
    (y.astype(x.dtype), slope.astype(x.dtype))
  )
  return checkpoint_name(results, "hidden")


def _backward(rate, approximate, slope, grad):
  return grad * slope, None


with_slope.defvjp(_forward, _backward)
