"""Dropout whose noise depends on the record, not on its place in a batch.

The noise is a function of (key, layer, record), so a run draws the same one
whatever the mesh, the microbatch and the number of processes.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from vit_jax.models.precision import at_least_float32

RECORDS = Int[Array, " b"] | None


def bits(
  key: jax.Array, records: Int[Array, " b"], shape: tuple[int, ...]
) -> UInt32[Array, "b ..."]:
  """Returns 32 random bits for every element of every record.

  Element (i, j), of row i of a record and column j, gets the lower half of

    (r_i + c_j) (s_i + d_j),

  where jax.random draws r and s for every row of every record, and c and d for
  every column, from separate keys; the last dimension is the column. The draws
  cost rows plus columns, the elements only two sums and a product, where
  jax.random would take 20 rounds for every two of them; a TPU's own generator
  is cheap, but its numbers depend on how the batch is split.

  Any two elements are independent: in another row, or in another column, both
  sums are shifted by independent numbers. No row is a shifted copy of another,
  since c and d do not follow the column's number. The upper bits are the better
  ones (a product is even three times in four): compare, do not mask. This is
  plenty for dropout, but no general generator: the 25 products of 5 rows and 5
  columns are not independent together.

  Args:
    key: A typed key of jax.random.
    records: Numbers of the records, which must differ within a batch.
    shape: Shape of one record.

  Source: the product of two sums is that of NH, a universal hash (J. Black et
    al., "UMAC: fast and secure message authentication", CRYPTO 1999).
  """
  of_rows, of_columns = jax.random.split(key)

  def of_record(record):
    key = jax.random.fold_in(of_rows, record)
    return jax.random.bits(key, (2, *shape[:-1], 1), jnp.uint32)

  row = jax.vmap(of_record)(records)
  of_all = (2, *(1,) * len(shape), shape[-1])
  column = jax.random.bits(of_columns, of_all, jnp.uint32)
  return (row[:, 0] + column[0]) * (row[:, 1] + column[1])


def threshold(rate: float | Float[Array, ""]) -> Int32[Array, ""]:
  """Returns the least of the signed numbers that is kept; exact to 2^-26."""
  return jnp.asarray(rate * 2.0**32 - 2.0**31).astype(jnp.int32)


def drop(
  x: Float[Array, "b ..."],
  key: jax.Array,
  records: Int[Array, " b"],
  shape: tuple[int, ...],
  rate: float | Float[Array, ""],
) -> Float[Array, "b ..."]:
  """Zeroes a share `rate` of the elements, and divides the rest by 1 - rate.

  Computed and returned in float32, so that the caller rounds once: in bfloat16,
  1 - 0.1 itself is 0.17 % too small, and every activation would be too large by
  as much.

  Args:
    x: A batch.
    key: A typed key of jax.random.
    records: The number of each example.
    shape: Shape of an example, or one that broadcasts to it: elements with the
      same draw are dropped together.
    rate: Probability to drop, from 0 to below 1.
  """
  # A comparison of signed numbers, which a TPU does in one instruction.
  drawn = jax.lax.bitcast_convert_type(bits(key, records, shape), jnp.int32)
  kept: Bool[Array, "b ..."] = drawn >= threshold(rate)
  x = x.astype(at_least_float32(x.dtype))
  return jnp.where(kept, x * (1.0 / (1.0 - rate)), 0)


class Dropout(nn.Module):
  """Zeroes a share `rate` of the elements, and scales up the rest.

  Source: arXiv:1207.0580, with the scaling in training instead of in use.
  """

  rate: float

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "b ..."],
    records: RECORDS,
    key: jax.Array | None = None,
  ) -> Float[Array, "b ..."]:
    """Takes x; the number of each record, or None to drop nothing; and a key,
    or None for one of the rng "dropout", which depends on the module's path.
    """
    if records is None or self.rate == 0.0:
      return x
    key = self.make_rng("dropout") if key is None else key
    return drop(x, key, records, x.shape[1:], self.rate).astype(x.dtype)
