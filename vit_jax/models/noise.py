"""Dropout whose noise belongs to the record, not to its place in a batch.

What is dropped is a function of (key, layer, record), so a run draws the same
noise whatever the mesh, the microbatch and the number of processes.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

RECORDS = Int[Array, " b"] | None


def keeps(
  key: jax.Array,
  records: Int[Array, " b"],
  shape: tuple[int, ...],
  rate: float | Float[Array, ""],
) -> Bool[Array, "b ..."]:
  """True with chance 1 - rate, for every element of every record.

  A hash of (key, record, position), of which the upper bits are compared with
  the rate; they resolve it to 2^-16. jax.random's threefry, with a key for each
  record, would do as well at several times the arithmetic (20 rounds for two
  numbers); a TPU's own generator is cheap, but what it draws depends on how the
  batch is split.

  Args:
    key: Of jax.random, typed.
    records: Numbers, which two examples of a batch should not share.
    shape: Of one record.
    rate: Chance to drop, 0 to 1.

  Source: the mixing is that of C. Wellons' "lowbias32", but for its last step,
  which changes the lower bits alone.
  """
  first, second = jax.random.key_data(key).astype(jnp.uint32).ravel()[-2:]
  of_record = _mix(records.astype(jnp.uint32) ^ first) ^ second
  position = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(1, *shape)
  bits = _mix(of_record.reshape(-1, *(1,) * len(shape)) + position)
  # Compared with a sign, which a TPU does in one instruction.
  threshold = jnp.asarray(rate * 2.0**32 - 2.0**31).astype(jnp.int32)
  return jax.lax.bitcast_convert_type(bits, jnp.int32) >= threshold


def _mix(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  return (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)


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
