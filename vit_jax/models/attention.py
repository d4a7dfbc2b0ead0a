"""Attention: softmax(Q K^T / sqrt(d)) V, and its projections."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.models.precision import at_least_float32

# Of L/16, 16 images at 224 px or 2 at 384.
MAX_SCORES = 11_000_000


def dot_product_attention(
  query: Float[Array, "b q heads d"],
  key: Float[Array, "b k heads d"],
  value: Float[Array, "b k heads d"],
  offsets: Float[Array, "r heads d"] | None = None,
) -> Float[Array, "b q heads d"]:
  """Every query's average of the values, weighted by likeness to the keys.

  out = softmax_k(query . key / sqrt(d)) value, for each head by itself.
  Scores and softmax are at least float32, whatever the type of the inputs; the
  weights then take the type of the values.

  Args:
    query: Of the tokens that ask.
    key: Of the tokens that are looked at.
    value: Of the same.
    offsets: None, or a vector for every offset k - q of two tokens, from 1 - n
      to n - 1 (r = 2 n - 1, for n queries and n keys), to which the queries are
      likened as they are to the keys; the scores are added.

  Source: arXiv:2010.11929, appendix A, equations 5 to 7; appendix D.4 for
  relative positions.

  Example:
    >>> x = jnp.ones((1, 3, 1, 2))
    >>> dot_product_attention(x, x, x).shape
    (1, 3, 1, 2)
  """
  # On a CPU (6 layers, width 96, 17 tokens) jax.nn.dot_product_attention makes
  # a training step 1.06 to 1.11 times as long as these two products.
  query = query / query.shape[-1] ** 0.5
  precise = at_least_float32(query.dtype)
  scores = jnp.einsum(
    "bqhd,bkhd->bhqk", query, key, preferred_element_type=precise
  )
  if offsets is not None:
    by_offset = jnp.einsum(
      "bqhd,rhd->bhqr", query, offsets, preferred_element_type=precise
    )
    scores = scores + _offset_to_key(by_offset)
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def _offset_to_key(
  scores: Float[Array, "b heads n r"],
) -> Float[Array, "b heads n n"]:
  """Turns scores by offset, from 1 - n to n - 1, into scores by key.

  Row q wants the columns n - 1 - q to 2 n - 2 - q. Read as one row after the
  other, each begins one place earlier than in the row before: at n - 1 and then
  every 2 n - 2 places, which needs no gather.
  """
  num_tokens = scores.shape[2]
  flat = scores.reshape(*scores.shape[:2], -1)[..., num_tokens - 1 : -1]
  rows = flat.reshape(*scores.shape[:2], num_tokens, 2 * num_tokens - 2)
  return rows[..., :num_tokens]


def attend(
  query: Float[Array, "b q heads d"],
  key: Float[Array, "b k heads d"],
  value: Float[Array, "b k heads d"],
  offsets: Float[Array, "r heads d"] | None,
) -> Float[Array, "b q heads d"]:
  """Returns `dot_product_attention` in the way that is fast in training.

  Scores grow with the square of the number of tokens: to keep them for the
  backward pass costs more than to compute them again; and they are of so few
  images at once that a TPU need not write them to its main memory
  (docs/performance.md).
  """
  attention = jax.checkpoint(dot_product_attention)
  # In a step's shard_map the images are the device's own. Elsewhere they may be
  # spread over many, and a slice would make them travel.
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return attention(query, key, value, offsets)
  num_images = query.shape[0]
  of_image = key.shape[1] * math.prod(query.shape[1:3])
  at_once = max(
    n
    for n in range(1, num_images + 1)
    if num_images % n == 0 and (n == 1 or n * of_image <= MAX_SCORES)
  )
  if at_once == num_images:
    return attention(query, key, value, offsets)
  return jnp.concatenate(
    [
      attention(*(x[i : i + at_once] for x in (query, key, value)), offsets)
      for i in range(0, num_images, at_once)
    ]
  )


class MultiHeadDotProductAttention(nn.Module):
  """Attention of `queries` to `tokens`, between linear maps with biases.

  Attributes:
    num_heads: Heads; must divide the width of a token.
    dtype: Type of the matrix products; parameters and softmax are float32.
    has_relative_positions: Whether there is a table of offsets; only for
      attention of tokens to themselves.
  """

  num_heads: int
  dtype: DTypeLike = "float32"
  has_relative_positions: bool = False

  @nn.compact
  def __call__(
    self, queries: Float[Array, "b q d"], tokens: Float[Array, "b k d"]
  ) -> Float[Array, "b q d"]:
    width = tokens.shape[-1]

    def dense(name, features, axis=-1):
      return nn.DenseGeneral(
        features,
        axis,
        dtype=self.dtype,
        kernel_init=nn.initializers.xavier_uniform(),
        name=name,
      )

    heads = (self.num_heads, width // self.num_heads)
    offsets = None
    if self.has_relative_positions:
      offsets = self.param(
        "offsets",
        nn.initializers.normal(0.02),
        (2 * tokens.shape[1] - 1, *heads),
      ).astype(self.dtype)
    x = attend(
      dense("query", heads)(queries),
      dense("key", heads)(tokens),
      dense("value", heads)(tokens),
      offsets,
    )
    return dense("out", width, (-2, -1))(x)
