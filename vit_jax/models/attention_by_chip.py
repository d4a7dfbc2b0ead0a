"""How a chip computes attention: which program, what it keeps, in what pieces.

All choices give the numbers of `attention.dot_product_attention` up to
rounding. Their measured or estimated gains: docs/performance_log.md.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.families import ModelConfig
from vit_jax.models import cudnn
from vit_jax.models.attention import attention_weights, dot_product_attention
from vit_jax.models.layers import chip_of_step
from vit_jax.models.noise import DRAWS
from vit_jax.models.precision import at_least_float32

# TPUs with a fast memory of 128 MiB, which holds the scores of a few images at
# a time: of L/16, 16 images at 224 px or 2 at 384.
FAST_MEMORY = ("v5e", "v6e")
MAX_SCORES = 11_000_000

# TPUs on which keeping the weights for the backward pass is faster than
# recomputing them.
KEEP_WEIGHTS = ("v4", "v5p", "tpu7x")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(
  query: Float[Array, "b q heads d"],
  key: Float[Array, "b k heads d"],
  value: Float[Array, "b k heads d"],
  keep_weights: bool,
) -> Float[Array, "b q heads d"]:
  """Returns `dot_product_attention`, with a backward pass of fewer bytes.

  The gradient of the softmax needs, for every query, the sum over keys of
  weight times gradient. It equals the product of the output and its gradient,
  which are already in memory; so the gradient of the scores is one elementwise
  function of a matrix product, which XLA writes once.

  Kept weights are exponentials, not divided by their sums: what is computed
  from them is divided instead, as that needs no pass over the weights.

  Args:
    query, key, value: Projected queries, keys and values.
    keep_weights: Whether the weights are kept for the backward pass, in the
      type of the values, or recomputed there.

  Source: arXiv:2205.14135, appendix B.2, for the gradient.
  """
  return dot_product_attention(query, key, value)


def _attend_forward(query, key, value, keep_weights):
  if keep_weights:
    weights, inverse = kept = _exponentials(query, key, value.dtype)
    out = jnp.einsum(
      "bhqk,bkhd->bqhd", weights, value, preferred_element_type=inverse.dtype
    )
    out = (out * inverse).astype(value.dtype)
    out, kept = checkpoint_name((out, kept), "attended")
    return out, (query, key, value, out, kept)
  weights = attention_weights(query, key, value.dtype)
  out = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
  out = checkpoint_name(out, "attended")
  return out, (query, key, value, out, None)


def _exponentials(
  query: Float[Array, "b q heads d"],
  key: Float[Array, "b k heads d"],
  dtype: DTypeLike,
) -> tuple[Float[Array, "b heads q k"], Float[Array, "b q heads 1"]]:
  """Returns exp(score - largest), cast to `dtype`; and 1 / the sum over keys.

  The weights of `attention_weights` are the product of the two.
  """
  scores = jnp.einsum(
    "bqhd,bkhd->bhqk",
    query / query.shape[-1] ** 0.5,
    key,
    preferred_element_type=at_least_float32(dtype),
  )
  weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
  # With the barrier, XLA writes both behind the product that gives the scores.
  # Without, it computes the exponentials once for the sum and again.
  weights, total = jax.lax.optimization_barrier(
    (weights.astype(dtype), jnp.sum(weights, -1))
  )
  return weights, jnp.swapaxes(1 / total, 1, 2)[..., None]


def _attend_backward(keep_weights, kept, grad):
  query, key, value, out, exponentials = kept
  precise = at_least_float32(value.dtype)
  mean = jnp.sum(grad.astype(precise) * out.astype(precise), -1, keepdims=True)
  if keep_weights:
    weights, inverse = exponentials
    scaled = (grad * inverse).astype(grad.dtype)
  else:
    # Without the barrier, XLA would find the same weights in the forward pass
    # and keep them.
    query, key, grad = jax.lax.optimization_barrier((query, key, grad))
    weights = attention_weights(query, key, value.dtype)
    scaled = grad
  d_value = jnp.einsum("bhqk,bqhd->bkhd", weights, scaled)
  d_weights = jnp.einsum(
    "bqhd,bkhd->bhqk", grad, value, preferred_element_type=precise
  )
  d_scores = weights.astype(precise) * (d_weights - jnp.swapaxes(mean, 1, 2))
  if keep_weights:
    d_scores = d_scores * jnp.swapaxes(inverse, 1, 2)
  d_scores = d_scores.astype(query.dtype)
  scale = query.shape[-1] ** 0.5
  d_query = jnp.einsum("bhqk,bkhd->bqhd", d_scores, key) / scale
  d_key = jnp.einsum("bhqk,bqhd->bkhd", d_scores, query / scale)
  return d_query, d_key, d_value


attend.defvjp(_attend_forward, _attend_backward)


def core(
  sizes: tuple[int, int, int, DTypeLike],
  is_self_attention: bool,
  offsets: Float[Array, "r heads d"] | None,
) -> Callable[..., Array]:
  """Returns the function of (query, key, value) for the chip of this step.

  Args:
    sizes: Number of tokens, number of heads, width of a head, and type of the
      matrix products.
    is_self_attention: Whether queries and keys come from the same tokens.
    offsets: See `dot_product_attention`.
  """
  fn = _program(sizes, is_self_attention, offsets)

  def named(query, key, value):
    # For `remat.KEPT`.
    projected = {"query": query, "key": key, "value": value}
    return fn(*(checkpoint_name(x, name) for name, x in projected.items()))

  return named


def _program(sizes, is_self_attention, offsets) -> Callable[..., Array]:
  platform, chip = chip_of_step()
  if offsets is not None or not chip:
    # The custom gradient can be differentiated neither forwards nor twice.
    plain = jax.checkpoint(
      functools.partial(dot_product_attention, offsets=offsets)
    )
    return lambda *projected: checkpoint_name(plain(*projected), "attended")
  if is_self_attention and implementation(platform, *sizes)[0] == "cudnn":
    return cudnn.attend
  return functools.partial(attend, keep_weights=chip in KEEP_WEIGHTS)


def in_pieces(
  branch: Callable[[Array, DRAWS], tuple[Array, ...]],
  num_heads: int,
  tokens: Float[Array, "b n d"],
  draws: DRAWS,
) -> tuple[Array, ...]:
  """Returns branch(tokens, draws), few images at a time where that pays.

  Args:
    branch: Self-attention, with the norm and the projections before it and the
      sum after it, so that nothing in between is copied. Its results have an
      image for each of `tokens`.
    num_heads: Number of heads.
    tokens: Of all images.
    draws: What is drawn for them.
  """
  pieces = 1
  if chip_of_step()[1] in FAST_MEMORY:
    scores = num_heads * tokens.shape[1] ** 2
    pieces = num_pieces(len(tokens), scores)
  if pieces == 1:
    return branch(tokens, draws)
  rows = {place: jnp.split(d.rows, pieces) for place, d in draws.items()}
  results = [
    branch(piece, {k: draws[k]._replace(rows=rows[k][i]) for k in draws})
    for i, piece in enumerate(jnp.split(tokens, pieces))
  ]
  return tuple(map(jnp.concatenate, zip(*results, strict=True)))


def num_pieces(num_images: int, scores: int) -> int:
  """Returns the fewest equal pieces of at most `MAX_SCORES` scores each.

  Args:
    num_images: Number of images in all.
    scores: Number of scores of one image.

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


def implementation(
  platform: str,
  num_tokens: int,
  num_heads: int,
  head_dim: int,
  dtype: DTypeLike,
) -> tuple[str, str]:
  """Returns what computes self-attention, and why.

  Args:
    platform: Platform of the devices: "tpu", "cpu", "gpu" or "cuda".
    num_tokens: Number of tokens of an image.
    num_heads: Number of heads.
    head_dim: Width of a head.
    dtype: Type of the matrix products.

  Returns:
    "cudnn" or "xla"; and on a GPU, why it is not cuDNN.
  """
  if platform not in cudnn.PLATFORMS:
    return "xla", ""
  dtype = jnp.dtype(dtype).name
  error = cudnn.why_not(num_tokens, num_heads, head_dim, dtype)
  return ("xla", error) if error else ("cudnn", "")


def choice(
  config: ModelConfig, image_size: tuple[int, int], platform: str
) -> str:
  """Returns what computes attention where there is a choice, on GPUs; or "".

  Args:
    config: The model.
    image_size: (height, width), pixels.
    platform: As for `implementation`.

  Returns:
    "cuDNN", or "XLA (why)".
  """
  sizes = config.attention(image_size)
  if sizes is None or platform not in cudnn.PLATFORMS:
    return ""
  found, error = implementation(platform, *sizes, config.dtype)
  return "cuDNN" if found == "cudnn" else f"XLA ({error})"
