"""The rate of matrix products that a device reaches, measured on it."""

import statistics
import time

import jax

# Sides of the matrices whose product is the ceiling, and the number of products
# that follow each other without the host.
SIDES = {"cpu": ((512, 1024, 2048), 1)}
ELSEWHERE = ((4096, 8192, 16384), 16)


def ceiling(dtype: str, device: jax.Device) -> tuple[int, float]:
  """Returns the fastest rate of square matrix products on one device.

  Sums are at least float32, as in the model. The numbers are random, since a
  GPU multiplies zeros faster than other data.

  Args:
    dtype: Type of the matrices.
    device: A device of this process.

  Returns:
    The side of the matrices that were fastest; FLOP/s, 2 per multiply-add.
  """
  sides, times = SIDES.get(device.platform, ELSEWHERE)

  @jax.jit
  def chain(x, w):
    return jax.lax.fori_loop(0, times, lambda _, x: x @ w, x)

  def rate(side: int) -> float:
    keys = jax.random.split(jax.device_put(jax.random.key(0), device))
    x, w = (jax.random.normal(k, (side, side)) for k in keys)
    # Keeps the numbers of one size, however many products follow.
    x, w = x.astype(dtype), (w / side**0.5).astype(dtype)
    jax.block_until_ready(chain(x, w))
    seconds = []
    for _ in range(5):
      start = time.perf_counter()
      jax.block_until_ready(chain(x, w))
      seconds.append(time.perf_counter() - start)
    return times * 2 * side**3 / statistics.median(seconds)

  rates = {side: rate(side) for side in sides}
  return max(rates.items(), key=lambda item: item[1])
