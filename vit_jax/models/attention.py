"""Attention: softmax(Q K^T / sqrt(d)) V, and its projections."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.models import cudnn
from vit_jax.models.precision import at_least_float32

# Kinds of TPU (v5e, v6e) with a fast memory of 128 MiB, in which the scores of
# few images stay if there are no more: of L/16, 16 at 224 px or 2 at 384.
FAST_MEMORY = ("TPU v5 lite", "TPU v6 lite")
MAX_SCORES = 11_000_000

# Those (v4, v5p) on which to keep the weights is faster than to compute them
# again. For all of this: docs/performance.md.
KEEP_WEIGHTS = ("TPU v4", "TPU v5")


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
  weights = _weights(query, key, value.dtype, offsets)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def _weights(query, key, dtype, offsets=None) -> Float[Array, "b heads q k"]:
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
  return jax.nn.softmax(scores, axis=-1).astype(dtype)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(
  query: Float[Array, "b q heads d"],
  key: Float[Array, "b k heads d"],
  value: Float[Array, "b k heads d"],
  keep_weights: bool,
) -> Float[Array, "b q heads d"]:
  """Returns `dot_product_attention`, with a backward pass of fewer bytes.

  The softmax's gradient needs, for every query, the sum over keys of weight
  times gradient. That is the product of the output and its gradient, which are
  at hand; so the gradient of the scores is one elementwise function of a
  product, which XLA writes once.

  Args:
    query: Of the tokens that ask.
    key: Of the tokens that are looked at.
    value: Of the same.
    keep_weights: Whether the backward pass finds the weights, in the type of
      the values, or computes them again.

  Source: arXiv:2205.14135, appendix B.2, for the gradient.
  """
  return dot_product_attention(query, key, value)


def _attend_forward(query, key, value, keep_weights):
  weights = _weights(query, key, value.dtype)
  out = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
  return out, (query, key, value, out, weights if keep_weights else None)


def _attend_backward(keep_weights, kept, grad):
  query, key, value, out, weights = kept
  if not keep_weights:
    # Or else XLA finds that it had them before, and keeps them.
    query, key, grad = jax.lax.optimization_barrier((query, key, grad))
    weights = _weights(query, key, value.dtype)
  precise = at_least_float32(value.dtype)
  d_value = jnp.einsum("bhqk,bqhd->bkhd", weights, grad)
  d_weights = jnp.einsum(
    "bqhd,bkhd->bhqk", grad, value, preferred_element_type=precise
  )
  mean = jnp.sum(grad.astype(precise) * out.astype(precise), -1, keepdims=True)
  d_scores = weights.astype(precise) * (d_weights - jnp.swapaxes(mean, 1, 2))
  d_scores = d_scores.astype(query.dtype)
  scale = query.shape[-1] ** 0.5
  d_query = jnp.einsum("bhqk,bkhd->bqhd", d_scores, key) / scale
  d_key = jnp.einsum("bhqk,bqhd->bkhd", d_scores, query / scale)
  return d_query, d_key, d_value


attend.defvjp(_attend_forward, _attend_backward)


def _chip() -> tuple[str, str]:
  """Returns platform and kind of chip of a train step, "" outside of one."""
  mesh = jax.sharding.get_abstract_mesh()
  # In a step's shard_map the images are the device's own. Elsewhere they may be
  # spread over many, and a piece of them would have to travel.
  device = mesh.abstract_device if mesh.manual_axes else None
  return (device.platform, device.device_kind) if device else ("", "")


def implementation(
  platform: str,
  num_tokens: int,
  num_heads: int,
  head_dim: int,
  dtype: DTypeLike,
) -> tuple[str, str]:
  """Returns what computes attention of tokens to themselves, and why.

  Args:
    platform: Of the devices: "tpu", "cpu", "gpu" or "cuda".
    num_tokens: Of an image.
    num_heads: Heads.
    head_dim: Width of each.
    dtype: Of the matrix products.

  Returns:
    "cudnn" or "xla"; and on a GPU, why it is not cuDNN.
  """
  if platform not in cudnn.PLATFORMS:
    return "xla", ""
  dtype = jnp.dtype(dtype).name
  fault = cudnn.fault(num_tokens, num_heads, head_dim, dtype)
  return ("xla", fault) if fault else ("cudnn", "")


def num_pieces(num_images: int, scores: int) -> int:
  """Returns in how few equal pieces at most `MAX_SCORES` are at hand at once.

  Args:
    num_images: All of them.
    scores: Of one image.

  Example:
    >>> num_pieces(64, 16 * 197 * 197)  # L/16 at 224 px
    4
  """
  return next(
    n
    for n in range(1, num_images + 1)
    if num_images % n == 0
    and (n == num_images or num_images // n * scores <= MAX_SCORES)
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
    query, key, value = (dense(n, heads) for n in ("query", "key", "value"))
    out = dense("out", width, (-2, -1))
    offsets = None
    if self.has_relative_positions:
      offsets = self.param(
        "offsets",
        nn.initializers.normal(0.02),
        (2 * tokens.shape[1] - 1, *heads),
      ).astype(self.dtype)
    core = self._core(queries is tokens, tokens.shape[1], heads, offsets)

    def attention(queries, tokens):
      return out(core(query(queries), key(tokens), value(tokens)))

    if _chip()[1] not in FAST_MEMORY:
      return attention(queries, tokens)
    num_images, num_queries, _ = queries.shape
    scores = self.num_heads * num_queries * tokens.shape[1]
    pieces = num_pieces(num_images, scores)
    return jnp.concatenate(
      [
        attention(*piece)
        for piece in zip(
          jnp.split(queries, pieces), jnp.split(tokens, pieces), strict=True
        )
      ]
    )

  def _core(self, to_itself: bool, num_tokens: int, heads, offsets):
    platform, kind = _chip()
    if offsets is not None or not kind:
      # As anyone may differentiate it, forwards and twice, too.
      return jax.checkpoint(
        functools.partial(dot_product_attention, offsets=offsets)
      )
    sizes = (num_tokens, *heads, self.dtype)
    if to_itself and implementation(platform, *sizes)[0] == "cudnn":
      return cudnn.attend
    return functools.partial(attend, keep_weights=kind in KEEP_WEIGHTS)
