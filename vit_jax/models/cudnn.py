"""cuDNN's fused attention, on NVIDIA GPUs on which it works."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

PLATFORMS = ("gpu", "cuda")

# Largest error, relative to the largest number: a few roundings of bfloat16,
# 2^-9 each.
TOLERANCE = 0.03


def attend(query, key, value):
  """Computes `attention.dot_product_attention` without storing the scores.

  Args:
    query: [b, q, heads, d], bfloat16; key and value alike.
  """
  return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


@functools.cache
def fault(num_tokens: int, num_heads: int, head_dim: int, dtype: str) -> str:
  """Returns why cuDNN's attention does not work here, or "" if it does.

  Whether it works depends on the driver, the library, the chip and the sizes,
  so it is run, with its gradients, on the first device of this process, inside
  a `shard_map` as in a step. All processes of a run are taken to be alike.

  Args:
    num_tokens: Number of tokens of an image.
    num_heads: Number of heads.
    head_dim: Width of a head.
    dtype: Type of the matrix products.

  Returns:
    One line of text, or "".
  """
  if dtype != "bfloat16":
    return f"cuDNN's attention has no {dtype}"
  # A step may be being traced; the trace does not reach into another thread.
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(_try, (4, 2, num_tokens, num_heads, head_dim)).result()


def _try(shape: tuple[int, ...]) -> str:
  numbers = np.random.default_rng(0).normal(size=shape)
  *inputs, weights = jnp.asarray(numbers, jnp.bfloat16)
  try:
    got = _results(attend, inputs, weights)
  except Exception as e:  # a driver or library may raise anything
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}"
  plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")
  want = _results(plain, inputs, weights)
  for g, w in zip(got, want, strict=True):
    error = np.max(np.abs(g - w)) / np.max(np.abs(w))
    if not error < TOLERANCE:  # true for NaN, too
      return f"cuDNN's numbers are off by {error:.1%}, expected {TOLERANCE:.0%}"
  return ""


def _results(attention, inputs, weights) -> list[np.ndarray]:
  """Returns the output, and the gradients of its weighted sum."""

  def fn(inputs, weights):
    out, backward = jax.vjp(attention, *inputs)
    return [out, *backward(weights)]

  mesh = jax.make_mesh((1,), ("one",), devices=jax.local_devices()[:1])
  fn = jax.shard_map(
    fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  return [np.asarray(x, np.float32) for x in jax.jit(fn)(inputs, weights)]
