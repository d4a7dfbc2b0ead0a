"""Dropout whose noise depends on the record, not on its row in a batch.

The noise is a function of (key, layer, record). So a run draws the same noise
for any mesh, microbatch and number of processes.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from vit_jax.models.precision import at_least_float32

RECORDS = Int[Array, " b"] | None


class Draw(NamedTuple):
  """Random numbers for a batch, from which `bits` computes its noise.

  The arrays may have leading dimensions, such as one for the layers.

  rows: Two numbers for each row of each record, uint32 [b, 2, ...].
  columns: Two numbers for each column, uint32 [2, f].
  """

  rows: UInt32[Array, "..."]
  columns: UInt32[Array, "... 2 f"]


# What is drawn for a layer, by the place of use; nothing for what is off.
DRAWS = dict[str, Draw]


def draw(
  key: jax.Array, records: Int[Array, " b"], shape: tuple[int, ...]
) -> Draw:
  """Draws the random numbers for a batch; see `bits`.

  Args:
    key: A typed key of jax.random.
    records: Numbers of the records, which must differ within a batch.
    shape: Shape of one record; its last dimension is the column.
  """
  row_key, column_key = jax.random.split(key)

  def draw_rows(record):
    key = jax.random.fold_in(row_key, record)
    return jax.random.bits(key, (2, *shape[:-1]), jnp.uint32)

  columns = jax.random.bits(column_key, (2, shape[-1]), jnp.uint32)
  return Draw(jax.vmap(draw_rows)(records), columns)


def draw_all(
  keys: jax.Array,
  records: Int[Array, " b"],
  places: tuple[str, ...],
  shapes: dict[str, tuple[int, ...]],
) -> DRAWS:
  """Draws for all layers together; layers are the first dimension of results.

  For a TPU, compiling the draws of all layers takes as long as compiling those
  of one (benchmarks/notes/performance_log.md).

  Args:
    keys: A typed key of jax.random for each layer.
    records: Numbers of the records.
    places: Names of all places of a layer; each has its own key.
    shapes: Place -> shape of one record there, for the places with dropout.
  """
  split = functools.partial(jax.random.split, num=len(places))
  place_keys = dict(zip(places, jax.vmap(split, out_axes=1)(keys), strict=True))
  draws = {}
  for shape in dict.fromkeys(shapes.values()):
    names = [name for name in shapes if shapes[name] == shape]
    one = functools.partial(draw, records=records, shape=shape)
    drawn = jax.vmap(jax.vmap(one))(jnp.stack([place_keys[n] for n in names]))
    for i, name in enumerate(names):
      draws[name] = jax.tree.map(lambda a, i=i: a[i], drawn)
  return draws


def bits(drawn: Draw) -> UInt32[Array, "b ..."]:
  """Returns 32 random bits for every element of every record.

  Element (i, j), of row i of a record and column j, gets the lower half of

    (r_i + c_j) (s_i + d_j),

  where jax.random draws r and s for every row of every record, and c and d for
  every column, from separate keys. The number of draws is rows plus columns,
  and an element costs only two sums and a product; jax.random would take 20
  rounds for every two elements. A TPU's own generator is cheap, but its numbers
  depend on how the batch is split.

  Any two elements are independent: in another row, or in another column, both
  sums are shifted by independent numbers. No row is a shifted copy of another,
  because c and d do not follow the column's number. The upper bits are the
  better ones (a product is even three times in four), so compare and do not
  mask. This is enough for dropout, but it is not a general generator: the 25
  products of 5 rows and 5 columns are not independent together.

  Source: the product of two sums is that of NH, a universal hash (J. Black et
    al., "UMAC: fast and secure message authentication", CRYPTO 1999).
  """
  rows = drawn.rows[..., None]
  columns = drawn.columns.reshape(2, *(1,) * (rows.ndim - 2), -1)
  return (rows[:, 0] + columns[0]) * (rows[:, 1] + columns[1])


def threshold(rate: float | Float[Array, ""]) -> Int32[Array, ""]:
  """Returns the smallest signed number that is kept; exact to 2^-26."""
  return jnp.asarray(rate * 2.0**32 - 2.0**31).astype(jnp.int32)


def drop(
  x: Float[Array, "b ..."], drawn: Draw, rate: float | Float[Array, ""]
) -> Float[Array, "b ..."]:
  """Zeroes a share `rate` of the elements, and divides the rest by 1 - rate.

  The result is float32, so that the caller rounds once. In bfloat16, 1 - 0.1
  itself is 0.17 % too small, and every activation would be too large by as
  much.

  Args:
    x: A batch.
    drawn: Draws with the shape of an example, or one that broadcasts to it;
      elements with the same draw are dropped together.
    rate: Probability to drop, from 0 to below 1.
  """
  # A comparison of signed numbers, which a TPU does in one instruction.
  signed = jax.lax.bitcast_convert_type(bits(drawn), jnp.int32)
  survives: Bool[Array, "b ..."] = signed >= threshold(rate)
  x = x.astype(at_least_float32(x.dtype))
  return jnp.where(survives, x * (1.0 / (1.0 - rate)), 0)


def drop_at(
  place: str,
  x: Float[Array, "b ..."],
  draws: DRAWS,
  rate: float | Float[Array, ""] | None,
) -> Float[Array, "b ..."]:
  """Returns `drop` with the draws of a place; x itself if there are none."""
  return drop(x, draws[place], rate) if place in draws else x


class Dropout(nn.Module):
  """Zeroes a share `rate` of the elements, and divides the rest by 1 - rate.

  Source: arXiv:1207.0580, but scaled in training, not in inference.
  """

  rate: float

  @nn.compact
  def __call__(
    self, x: Float[Array, "b ..."], records: RECORDS
  ) -> Float[Array, "b ..."]:
    """Applies dropout.

    Args:
      x: A batch.
      records: The number of each record; None to drop nothing.
    """
    if records is None or self.rate == 0.0:
      return x
    drawn = draw(self.make_rng("dropout"), records, x.shape[1:])
    return drop(x, drawn, self.rate).astype(x.dtype)
