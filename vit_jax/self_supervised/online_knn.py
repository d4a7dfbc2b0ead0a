"""Nearest neighbours within a training batch, without a forward pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from vit_jax.self_supervised.heads import unit


def right_neighbours(
  queries: Float[Array, "b d"],
  others: Float[Array, "b d"],
  labels: Integer[Array, " b"],
  mask: Bool[Array, " b"],
  over,
) -> tuple[Float[Array, " b"], Float[Array, " b"]]:
  """Finds each image's nearest other image in the whole batch, by the cosine.

  Args:
    queries: Vectors of the images of this device.
    others: Vectors of another crop of the same images. The neighbour is one of
      those of all devices, but not of the same row.
    labels: Classes; less than 0 for an image without, which is left out.
    mask: Rows that count.
    over: Gathers the rows of all devices, see `collectives.Over`.

  Returns:
    1 where the neighbour has the same class, otherwise 0; 1 for the images that
    count, otherwise 0.
  """
  counts = mask & (labels >= 0)
  all_others, all_labels, all_count = map(
    over.gather, (unit(others), labels, counts)
  )
  similarity = jnp.matmul(
    unit(queries), all_others.T, precision=jax.lax.Precision.HIGHEST
  )
  own = over.rows(len(queries))[:, None] == jnp.arange(len(all_labels))[None]
  allowed = all_count[None] & ~own
  nearest = jnp.where(allowed, similarity, -jnp.inf).argmax(-1)
  is_right = all_labels[nearest] == labels
  counts &= allowed.any(-1)
  return is_right.astype(jnp.float32), counts.astype(jnp.float32)
