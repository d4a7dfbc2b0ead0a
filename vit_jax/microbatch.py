"""How many images a device computes at once: microbatches of a step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.config import Config
from vit_jax.data.preprocessing import image_size
from vit_jax.devices import (
  FORWARD_PIXELS,
  MAX_HIDDEN,
  MIN_MICROBATCH,
  generation,
)

Device = Any  # a jax.Device, or a description with its attributes


def microbatches_of(config: Config, mesh: Mesh) -> int:
  """Returns the number of microbatches of a step, on every device."""
  fast = fast_microbatch(config, mesh)
  return num_microbatches(rows_of(config, mesh), config.optim.microbatch, fast)


def rows_of(config: Config, mesh: Mesh) -> int:
  """Returns the images of a batch on one device."""
  return config.data.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])


def fast_microbatch(config: Config, mesh: Mesh) -> int | None:
  """Returns the images of a fast microbatch; None for all images of a device.

  This is config.optim.microbatch, or less on chips where small microbatches are
  faster, see `devices.MAX_HIDDEN`. Blocks in a scan are gathered once per
  microbatch, so their microbatches are never made smaller.
  """
  most = config.optim.microbatch
  limit = MAX_HIDDEN.get(generation(mesh.devices.flat[0].device_kind))
  hidden = _hidden_of_image(config)
  if None in (most, limit, hidden) or config.model.scan:
    return most
  return min(most, max(MIN_MICROBATCH, limit // hidden))


def _hidden_of_image(config: Config) -> int | None:
  """Returns an image's activations in the hidden layers of one MLP, or None.

  None if the family does not say. A SwiGLU has two such layers.
  """
  size = image_size(config.data.ops)
  tokens = config.objective.num_tokens(config.model, size)
  # A user's family may not state the width of its hidden layers.
  width = getattr(getattr(config.model, "size", None), "mlp_dim", None)
  if None in (tokens, width):
    return None
  is_gated = getattr(config.model, "mlp", None) == "swiglu"
  return tokens * width * (1 + is_gated)


def hidden_of_microbatch(config: Config, mesh: Mesh) -> int | None:
  """Returns a microbatch's activations in one MLP's hidden layers, or None."""
  hidden = _hidden_of_image(config)
  rows = rows_of(config, mesh) // microbatches_of(config, mesh)
  return None if hidden is None else hidden * rows


def num_microbatches(
  num_rows: int, most: int | None, fast: int | float | None = None
) -> int:
  """Returns the number of equal microbatches of a device.

  Args:
    num_rows: Rows of the device.
    most: Largest number of rows of a microbatch; None for no limit.
    fast: Fastest number of rows of a microbatch; None for `most`. The result is
      the nearest possible one by ratio, because half and twice as many were
      equally slow (benchmarks/notes/performance_log.md).

  Example:
    >>> [num_microbatches(24, n) for n in (16, 7, None)]
    [2, 4, 1]
    >>> [num_microbatches(n, 64, fast=16) for n in (32, 24, 31, 62)]
    [2, 2, 1, 2]
  """
  most = min(most or num_rows, num_rows)
  sizes = [n for n in range(1, most + 1) if num_rows % n == 0]
  fast = min(fast or most, most)
  return num_rows // min(sizes, key=lambda n: max(n / fast, fast / n))


def few_at_a_time(
  forward: Callable[[jax.Array], Any],
  images: jax.Array,
  devices: Sequence[Device],
) -> Any:
  """Returns forward(images), computed in small parts where that is faster.

  Args:
    forward: Maps images to a tree of arrays with a row for each image.
    images: [b, h, w, c], before they are split over devices.
    devices: All devices that compute. With several, there are no parts.
  """
  limit = FORWARD_PIXELS.get(generation(devices[0].device_kind))
  if limit is None or len(devices) > 1 or not len(images):
    return forward(images)
  num_images, height, width, _ = images.shape
  number = num_microbatches(num_images, None, fast=limit / (height * width))
  if number == 1:
    return forward(images)
  parts = images.reshape(number, -1, *images.shape[1:])
  results = jax.lax.map(forward, parts)
  return jax.tree.map(lambda x: x.reshape(num_images, *x.shape[2:]), results)
