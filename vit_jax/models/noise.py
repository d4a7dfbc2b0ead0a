"""Dropout whose noise belongs to the record, not to its place in a batch.

What is dropped is a function of (key, layer, record), so a run draws the same
noise whatever the mesh, the microbatch and the number of processes.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

RECORDS = Int[Array, " b"] | None


def random_bits(
  key: jax.Array, records: Int[Array, " b"], shape: tuple[int, ...]
) -> UInt32[Array, "b ..."]:
  """Returns 32 random bits for every element of every record.

  A hash of (key, record, position). jax.random's threefry gives the same
  property at some five times the work, which is felt (see
  docs/performance.md); a TPU's own generator would be cheap, but what it draws
  depends on how the batch is split.

  Args:
    key: Of jax.random, typed.
    records: Numbers, which two examples of a batch should not share.
    shape: Of one record.

  Source: the finaliser is C. Wellons' "lowbias32".
  """
  first, second = jax.random.key_data(key).astype(jnp.uint32).ravel()[-2:]
  of_record = _mix(records.astype(jnp.uint32) ^ first) ^ second
  position = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(1, *shape)
  return _mix(of_record.reshape(-1, *(1,) * len(shape)) + position)


def keeps(
  key: jax.Array,
  records: Int[Array, " b"],
  shape: tuple[int, ...],
  rate: float | Float[Array, ""],
) -> Array:
  """True with chance 1 - rate, for every element of every record."""
  threshold = jnp.asarray(rate * 2.0**32).astype(jnp.uint32)
  return random_bits(key, records, shape) >= threshold


class Dropout(nn.Module):
  """Zeroes a share `rate` of the elements, and scales up the rest.

  Source: arXiv:1207.0580, scaled in training instead of in use.
  """

  rate: float

  @nn.compact
  def __call__(
    self, x: Float[Array, "b ..."], records: RECORDS
  ) -> Float[Array, "b ..."]:
    """Args: x; and the number of each record, or None to drop nothing."""
    if records is None or self.rate == 0.0:
      return x
    kept = keeps(self.make_rng("dropout"), records, x.shape[1:], self.rate)
    return jnp.where(kept, x / (1.0 - self.rate), 0)


def _mix(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
  x = x ^ (x >> 16)
  x = x * jnp.uint32(0x7FEB352D)
  x = x ^ (x >> 15)
  x = x * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
