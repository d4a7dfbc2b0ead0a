"""cuDNN's fused attention, for NVIDIA GPUs that support it."""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

PLATFORMS = ("gpu", "cuda")

# Largest error, relative to the largest number: a few roundings of bfloat16,
# 2^-9 each.
TOLERANCE = 0.03


def attend(
  query: Float[Array, "b n heads d"],
  key: Float[Array, "b n heads d"],
  value: Float[Array, "b n heads d"],
) -> Float[Array, "b n heads d"]:
  """Computes `attention.dot_product_attention` without storing the scores.

  Inside a `shard_map` that leaves an axis of the mesh to XLA, each device along
  that axis computes its share of the heads. If the devices do not divide the
  number of heads, each computes all heads.

  Args:
    query, key, value: Inputs of self-attention, bfloat16.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = {*mesh.axis_names} - {*mesh.manual_axes}
  if not axes:
    return _attend_here(query, key, value)
  # XLA cannot split cuDNN's call inside a mesh that is manual in part.
  by_heads = query.shape[2] % math.prod(mesh.shape[a] for a in axes) == 0
  spec = P(None, None, tuple(axes) if by_heads else None)
  return jax.shard_map(
    _attend_here,
    in_specs=spec,
    out_specs=spec,
    axis_names=axes,
    check_vma=False,
  )(query, key, value)


def _attend_here(query, key, value):
  fn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
  if query.shape[1] % 2 == 0:
    return fn(query, key, value)
  # jax has cuDNN's gradients for an even number of tokens only. So a token is
  # added that no other attends to, and is removed again.
  padded = (
    jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value)
  )
  lengths = jnp.full(len(key), key.shape[1], jnp.int32)
  return fn(*padded, key_value_seq_lengths=lengths)[:, :-1]


@functools.cache
def why_not(num_tokens: int, num_heads: int, head_dim: int, dtype: str) -> str:
  """Returns why cuDNN's attention does not work here, or "" if it does.

  It depends on the driver, the library, the chip and the sizes. Therefore
  cuDNN's attention and its gradients are computed once, on the first device of
  this process, and compared with XLA's. The processes of a run check that they
  have the same result (`distributed/agreement.py`).

  Args:
    num_tokens: Number of tokens of an image.
    num_heads: Number of heads.
    head_dim: Width of a head.
    dtype: Type of the matrix products.

  Returns:
    One line of text, or "".
  """
  if dtype != "bfloat16":
    return f"cuDNN's attention does not support {dtype}"
  # In another thread: this one may be tracing a step.
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(_try, (4, 2, num_tokens, num_heads, head_dim)).result()


def _try(shape: tuple[int, ...]) -> str:
  numbers = np.random.default_rng(0).normal(size=shape)
  *inputs, weights = jnp.asarray(numbers, jnp.bfloat16)
  try:
    got = output_and_gradients(attend, inputs, weights)
  except Exception as e:  # a driver or library may raise anything
    first_line = (str(e).strip().splitlines() or [""])[0]
    return f"{type(e).__name__}: {first_line[:200]}"
  plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")
  want = output_and_gradients(plain, inputs, weights)
  for g, w in zip(got, want, strict=True):
    error = np.max(np.abs(g - w)) / np.max(np.abs(w))
    if not error < TOLERANCE:  # true for NaN, too
      return (
        f"cuDNN's result differs by {error:.1%} from XLA's, expected less than"
        f" {TOLERANCE:.0%}"
      )
  return ""


def output_and_gradients(
  attention: Callable[..., Array],
  inputs: Sequence[Float[Array, "b n heads d"]],
  weights: Float[Array, "b n heads d"],
) -> list[Float[np.ndarray, "b n heads d"]]:
  """Returns attention, and the gradients of its weighted sum by each input.

  They are computed on one device, inside a `shard_map` as in a step.
  """

  def fn(inputs, weights):
    out, backward = jax.vjp(attention, *inputs)
    return [out, *backward(weights)]

  mesh = jax.make_mesh((1,), ("one",), devices=jax.local_devices()[:1])
  fn = jax.shard_map(
    fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  return [np.asarray(x, np.float32) for x in jax.jit(fn)(inputs, weights)]
