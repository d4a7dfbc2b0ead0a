"""float32 and bfloat16 on one core of a CPU: `python benchmarks/cpu_types.py`.

Prints for each type the rate of a product of square matrices, in GFLOP/s, and
the processor time of a forward pass of S/16 on 16 images, in seconds. The types
take turns; numbers are medians over the turns. The difference is the largest
one between the features of the last layer, as a share of the largest feature.
"""

import os
import pathlib
import statistics
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
if __name__ == "__main__":  # before jax starts its threads
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import malloc
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build, precision

TYPES, SIDE, IMAGES, TURNS = ("float32", "bfloat16"), 1024, 16, 7


def seconds(fn, *args) -> float:
  """Returns the processor time of a call."""
  start = time.process_time()
  jax.block_until_ready(fn(*args))
  return time.process_time() - start


def measure() -> None:
  """Prints a line for each type, and the difference."""
  malloc.reuse_freed_memory()
  product = jax.jit(lambda a: a @ a)
  images = np.random.default_rng(0).uniform(-1, 1, (IMAGES, 224, 224, 3))
  images = images.astype(np.float32)
  calls, features = {}, {}
  for dtype in TYPES:
    model = build(ViTConfig(variant="S/16", dtype=dtype), 1000)
    params = jax.jit(model.init)(jax.random.key(0), images[:1])["params"]
    forward = jax.jit(
      lambda p, x, m=model: m.apply({"params": p}, x)[1]["pre_logits"]
    )
    features[dtype] = np.asarray(forward(params, images), np.float32)
    square = jnp.ones((SIDE, SIDE), dtype)
    jax.block_until_ready(product(square))
    calls[dtype] = (product, square), (forward, params, images)
  times = {dtype: ([], []) for dtype in TYPES}
  for _ in range(TURNS):
    for dtype in TYPES:
      for turns, call in zip(times[dtype], calls[dtype], strict=True):
        turns.append(seconds(*call))
  print(f"jax {jax.__version__}; fastest: {precision.fastest_dtype()}")
  for dtype, pair in times.items():
    of_product, of_model = map(statistics.median, pair)
    rate = 2 * SIDE**3 / of_product / 1e9
    print(f"{dtype:<10}{rate:6.0f} GFLOP/s{of_model:8.3f} s")
  exact = features["float32"]
  error = np.abs(features["bfloat16"] - exact).max() / np.abs(exact).max()
  print(f"difference {error:.2e}")


if __name__ == "__main__":
  measure()
