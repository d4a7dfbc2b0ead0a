"""Attention in a train step: less memory traffic, same results.

`attention` is `attention.dot_product_attention` up to rounding. On NVIDIA GPUs
cuDNN's kernel computes it if that works; otherwise XLA does, with a custom
gradient. `chip_choices` decides for each chip what is saved for the backward
pass, and how many images are computed at once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax.families import ModelConfig
from vit_jax.models import cudnn
from vit_jax.models.attention import attention_weights, dot_product_attention
from vit_jax.models.chip_choices import device_of_step
from vit_jax.models.noise import DRAWS
from vit_jax.models.precision import at_least_float32


def attention(
  query: Float[Array, "b q heads d"],
  key: Float[Array, "b k heads d"],
  value: Float[Array, "b k heads d"],
  offsets: Float[Array, "r heads d"] | None = None,
  bias: Float[Array, "*b heads q k"] | None = None,
) -> Float[Array, "b q heads d"]:
  """Returns `dot_product_attention`, as the step's device computes it best."""
  # The names are in `encoder.SAVED_NAMES`.
  query = checkpoint_name(query, "query")
  key = checkpoint_name(key, "key")
  value = checkpoint_name(value, "value")
  device = device_of_step()
  if device is None or offsets is not None or bias is not None:
    # A custom gradient allows neither forward mode nor second derivatives, and
    # ours has no offsets and no bias.
    plain = jax.checkpoint(
      functools.partial(dot_product_attention, offsets=offsets, bias=bias)
    )
    return checkpoint_name(plain(query, key, value), "attended")
  if query.shape == key.shape:  # self-attention
    name, _ = implementation(device.platform, *key.shape[1:], key.dtype)
    if name == "cudnn":
      return cudnn.attend(query, key, value)
  return attend(query, key, value, device.choices.save_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(
  query: Float[Array, "b q heads d"],
  key: Float[Array, "b k heads d"],
  value: Float[Array, "b k heads d"],
  save_weights: bool,
) -> Float[Array, "b q heads d"]:
  """Returns `dot_product_attention`; its backward pass moves fewer bytes.

  The gradient of the softmax needs, for every query, the sum over keys of
  weight times gradient. This sum equals the product of the output and its
  gradient, which are already in memory. So the gradient of the scores is one
  elementwise function of a matrix product, and XLA writes it once.

  Saved weights are exponentials that are not divided by their sums. The results
  computed from them are divided instead, which saves a pass over the weights.

  Args:
    query, key, value: Projected queries, keys and values.
    save_weights: Whether the weights are saved for the backward pass, in the
      type of the values, or recomputed there.

  Source: arXiv:2205.14135, appendix B.2, for the gradient.
  """
  return dot_product_attention(query, key, value)


def _attend_forward(query, key, value, save_weights):
  if save_weights:
    weights, inverse = saved = _exponentials(query, key, value.dtype)
    out = jnp.einsum(
      "bhqk,bkhd->bqhd", weights, value, preferred_element_type=inverse.dtype
    )
    out = (out * inverse).astype(value.dtype)
    out, saved = checkpoint_name((out, saved), "attended")
    return out, (query, key, value, out, saved)
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

  `attention_weights` is the product of the two.
  """
  scores = jnp.einsum(
    "bqhd,bkhd->bhqk",
    query / query.shape[-1] ** 0.5,
    key,
    preferred_element_type=at_least_float32(dtype),
  )
  weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
  # The barrier makes XLA fuse exp and the sum over keys into the product of
  # queries and keys; without it XLA computes exp twice.
  weights, total = jax.lax.optimization_barrier(
    (weights.astype(dtype), jnp.sum(weights, -1))
  )
  return weights, jnp.swapaxes(1 / total, 1, 2)[..., None]


def _attend_backward(save_weights, saved, grad):
  query, key, value, out, exponentials = saved
  precise = at_least_float32(value.dtype)
  mean = jnp.sum(grad.astype(precise) * out.astype(precise), -1, keepdims=True)
  if save_weights:
    weights, inverse = exponentials
    scaled = (grad * inverse).astype(grad.dtype)
  else:
    # Without the barrier XLA would recognise the weights of the forward pass,
    # and save them.
    query, key, grad = jax.lax.optimization_barrier((query, key, grad))
    weights = attention_weights(query, key, value.dtype)
    scaled = grad
  d_value = jnp.einsum("bhqk,bqhd->bkhd", weights, scaled)
  d_weights = jnp.einsum(
    "bqhd,bkhd->bhqk", grad, value, preferred_element_type=precise
  )
  d_scores = weights.astype(precise) * (d_weights - jnp.swapaxes(mean, 1, 2))
  if save_weights:
    d_scores = d_scores * jnp.swapaxes(inverse, 1, 2)
  d_scores = d_scores.astype(query.dtype)
  scale = query.shape[-1] ** 0.5
  d_query = jnp.einsum("bhqk,bkhd->bqhd", d_scores, key) / scale
  d_key = jnp.einsum("bhqk,bqhd->bkhd", d_scores, query / scale)
  return d_query, d_key, d_value


attend.defvjp(_attend_forward, _attend_backward)


def in_chunks(
  branch: Callable[[Array, DRAWS, Any], tuple[Array, ...]],
  num_heads: int,
  tokens: Float[Array, "b n d"],
  draws: DRAWS,
  positions: Any = None,
) -> tuple[Array, ...]:
  """Returns `branch(tokens, draws, positions)`, on few images at a time.

  All images are computed at once if that is not slower.

  Args:
    branch: Self-attention, with the norm and the projections before it and the
      sum after it, so that nothing in between is copied. Its results have a row
      for each image of `tokens`.
    num_heads: Number of heads.
    tokens: Tokens of all images.
    draws: Random numbers for the images.
    positions: Arrays with a row for each image; None if all have the same.
  """
  device, num_chunks = device_of_step(), 1
  if device and device.choices.max_scores:
    scores = num_heads * tokens.shape[1] ** 2
    num_chunks = count_chunks(len(tokens), scores, device.choices.max_scores)
  if num_chunks == 1:
    return branch(tokens, draws, positions)
  rows = {place: jnp.split(d.rows, num_chunks) for place, d in draws.items()}
  leaves, form = jax.tree.flatten(positions)
  parts = [jnp.split(leaf, num_chunks) for leaf in leaves]
  results = [
    branch(
      chunk,
      {k: draws[k]._replace(rows=rows[k][i]) for k in draws},
      jax.tree.unflatten(form, [part[i] for part in parts]),
    )
    for i, chunk in enumerate(jnp.split(tokens, num_chunks))
  ]
  return tuple(map(jnp.concatenate, zip(*results, strict=True)))


def count_chunks(num_images: int, scores: int, max_scores: int) -> int:
  """Returns the fewest equal chunks with at most `max_scores` scores each.

  Args:
    num_images: Number of all images.
    scores: Number of scores of one image; a chunk has at least one image.
    max_scores: See `chip_choices.Choices`.

  Example:
    >>> count_chunks(64, 16 * 197 * 197, 11_000_000)  # L/16 at 224 px
    4
  """
  return next(
    n
    for n in range(1, num_images + 1)
    if num_images % n == 0
    and (n == num_images or num_images // n * scores <= max_scores)
  )


def implementation(
  platform: str,
  num_tokens: int,
  num_heads: int,
  head_dim: int,
  dtype: DTypeLike,
) -> tuple[str, str]:
  """Returns which program computes self-attention in a train step, and why.

  Args:
    platform: Platform of the devices: "tpu", "cpu", "gpu" or "cuda".
    num_tokens: Number of tokens of an image.
    num_heads: Number of heads.
    head_dim: Width of a head.
    dtype: Type of the matrix products.

  Returns:
    "cudnn" or "xla"; on a GPU with "xla", why not cuDNN, otherwise "".
  """
  if platform not in cudnn.PLATFORMS:
    return "xla", ""
  dtype = jnp.dtype(dtype).name
  error = cudnn.why_not(num_tokens, num_heads, head_dim, dtype)
  return ("xla", error) if error else ("cudnn", "")


def describe_implementation(
  config: ModelConfig, image_size: tuple[int, int], platform: str
) -> str:
  """Returns "cuDNN" or "XLA (why)" on a GPU; "" if there is no choice.

  Args:
    config: The model.
    image_size: (height, width), pixels.
    platform: As for `implementation`.
  """
  sizes = config.attention(image_size)
  if sizes is None or platform not in cudnn.PLATFORMS:
    return ""
  name, error = implementation(platform, *sizes, config.dtype)
  return "cuDNN" if name == "cudnn" else f"XLA ({error})"
