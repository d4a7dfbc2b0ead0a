"""Times each matrix product of a step of S/16 on one core of a CPU.

python benchmarks/cpu_products.py [jax or torch] [float32 or bfloat16]

Sizes are those of `cpu_step.py`: 224 px, batch 8. The line of a product has its
rate, and the seconds that all equal products take in a step. The last line has
the sum, which is a lower bound of a step. Numbers are medians of 15 calls.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"
if __name__ == "__main__":  # before threads start
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])

# ruff: noqa: E402
import numpy as np

BLOCKS, B, N, D, F, HEADS, HEAD = 12, 8, 197, 384, 1536, 6, 64
R = B * N  # tokens as rows
PROJECTED, WEIGHTS = (B, HEADS, N, HEAD), (B, HEADS, N, N)
# Product, shapes of its factors, how many there are in a block. Scores are
# computed again in the backward pass; their gradient is a product alike.
PRODUCTS = (
  ("nd,de->ne", (R, D), (D, D), 4),
  ("ne,de->nd", (R, D), (D, D), 4),
  ("nd,ne->de", (R, D), (R, D), 4),
  ("nd,df->nf", (R, D), (D, F), 1),
  ("nf,df->nd", (R, F), (D, F), 1),
  ("nd,nf->df", (R, D), (R, F), 1),
  ("nf,fd->nd", (R, F), (F, D), 1),
  ("nd,fd->nf", (R, D), (F, D), 1),
  ("nf,nd->fd", (R, F), (R, D), 1),
  ("bhqd,bhkd->bhqk", PROJECTED, PROJECTED, 3),
  ("bhqk,bhkd->bhqd", WEIGHTS, PROJECTED, 2),
  ("bhqk,bhqd->bhkd", WEIGHTS, PROJECTED, 2),
)


def of_jax(product: str, factors: list, dtype: str) -> Callable[[], None]:
  import jax
  import jax.numpy as jnp

  x, y = (jnp.asarray(f, dtype) for f in factors)
  fn = jax.jit(lambda x, y: jnp.einsum(product, x, y))
  return lambda: fn(x, y).block_until_ready()


def of_torch(product: str, factors: list, dtype: str) -> Callable[[], None]:
  import torch

  torch.set_num_threads(1)
  x, y = (torch.tensor(f).to(getattr(torch, dtype)) for f in factors)
  return lambda: torch.einsum(product, x, y)


def seconds(call: Callable[[], None]) -> float:
  """Returns the median of 15 calls, after two that are not timed."""
  seconds = []
  for _ in range(17):
    start = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds[2:])


def main(library: str = "jax", dtype: str = "float32") -> None:
  if library == "jax":
    from vit_jax import malloc

    malloc.reuse_freed_memory()
  rng, total, work = np.random.default_rng(0), 0.0, 0
  for product, *shapes, times in PRODUCTS:
    factors = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    letters = product.split("->")[0].replace(",", "")
    sizes = dict(zip(letters, (n for s in shapes for n in s), strict=True))
    flops = 2 * math.prod(sizes.values())
    took = seconds(
      {"jax": of_jax, "torch": of_torch}[library](product, factors, dtype)
    )
    total += BLOCKS * times * took
    work += BLOCKS * times * flops
    print(
      f"{product:18}{flops / took / 1e9:6.0f} GFLOP/s"
      f"{BLOCKS * times * took:8.3f} s a step"
    )
  print(f"{library} {dtype}: {total:.3f} s for {work / 1e9:.0f} GFLOP")


if __name__ == "__main__":
  main(*sys.argv[1:])
