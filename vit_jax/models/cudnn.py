"""cuDNN's fused attention, on NVIDIA GPUs on which it works."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

PLATFORMS = ("gpu", "cuda")

# Shares of the largest number: a few roundings of bfloat16, 2^-9 each.
TOLERANCE = 0.03


def attend(query, key, value):
  """As `attention.dot_product_attention`, fused: scores never leave the chip.

  Args:
    query: [b, q, heads, d], bfloat16; key and value alike.
  """
  return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")


@functools.cache
def fault(num_tokens: int, num_heads: int, head_dim: int, dtype: str) -> str:
  """Tries it on the first of this process's devices, gradients included.

  It depends on the driver, the library, the chip and the sizes, so nothing but
  a try tells; as in a step, inside a `shard_map`. The processes of a run are
  taken to be alike.

  Args:
    num_tokens: Of an image.
    num_heads: Heads.
    head_dim: Width of each.
    dtype: Of the matrix products.

  Returns:
    "" if it works, else in a line why not.
  """
  if dtype != "bfloat16":
    return f"cuDNN's attention has no {dtype}"
  # It may be asked for while a step is traced, of which a thread knows nothing.
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(_try, (4, 2, num_tokens, num_heads, head_dim)).result()


def _try(shape: tuple[int, ...]) -> str:
  numbers = np.random.default_rng(0).normal(size=shape)
  *inputs, weights = jnp.asarray(numbers, jnp.bfloat16)
  try:
    got = _results(attend, inputs, weights)
  except Exception as e:  # whatever a driver, or a library, comes up with
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}"
  plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")
  want = _results(plain, inputs, weights)
  for g, w in zip(got, want, strict=True):
    error = np.max(np.abs(g - w)) / np.max(np.abs(w))
    if not error < TOLERANCE:  # not a number, either
      return f"cuDNN's numbers are off by {error:.1%}, expected {TOLERANCE:.0%}"
  return ""


def _results(attention, inputs, weights) -> list[np.ndarray]:
  """The output, and the gradients of its weighted sum."""

  def fn(inputs, weights):
    out, backward = jax.vjp(attention, *inputs)
    return [out, *backward(weights)]

  mesh = jax.make_mesh((1,), ("one",), devices=jax.local_devices()[:1])
  fn = jax.shard_map(
    fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  return [np.asarray(x, np.float32) for x in jax.jit(fn)(inputs, weights)]
