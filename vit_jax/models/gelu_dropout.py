"""GELU and dropout between the two dense layers of an MLP."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.models.chip_choices import device_of_step
from vit_jax.models.noise import DRAWS, drop_at
from vit_jax.models.precision import at_least_float32


def gelu_dropout(
  x: Float[Array, "b n f"], draws: DRAWS, rate: float, approximate: bool
) -> Float[Array, "b n f"]:
  """Returns dropout(gelu(x)) in the type of x.

  Args:
    x: The first dense layer's output.
    draws: Random numbers of the block; without "hidden" nothing is dropped.
    rate: Probability to drop.
    approximate: Whether GELU uses the tanh approximation instead of erf.
  """
  device = device_of_step()
  if device and device.choices.save_slope:
    return with_saved_slope(x, draws, rate, approximate)
  return _gelu_dropout(x, draws, rate, approximate)


def _gelu_dropout(x, draws, rate, approximate):
  y = nn.gelu(x, approximate=approximate)
  return drop_at("hidden", y, draws, rate).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def with_saved_slope(
  x: Float[Array, "b n f"], draws: DRAWS, rate: float, approximate: bool
) -> Float[Array, "b n f"]:
  """Returns `gelu_dropout`; its forward pass saves result and derivative.

  Both are computed once in float32, and saved in the type of x. For bfloat16
  this needs 2 bytes per element more than saving x alone.
  """
  return _gelu_dropout(x, draws, rate, approximate)


def _forward(x, draws, rate, approximate):
  precise = x.astype(at_least_float32(x.dtype))
  y, slope = jax.jvp(
    lambda x: _gelu_dropout(x, draws, rate, approximate),
    (precise,),
    (jnp.ones_like(precise),),
  )
  # Without the barrier XLA recomputes both in the backward pass.
  results = jax.lax.optimization_barrier(
    (y.astype(x.dtype), slope.astype(x.dtype))
  )
  return checkpoint_name(results, "hidden")


def _backward(rate, approximate, slope, grad):
  return grad * slope, None


with_saved_slope.defvjp(_forward, _backward)
