"""Collectives of a step: all-gather of parameters, sum of gradients.

The devices along `data` and `fsdp` compute separately, inside one `shard_map`;
XLA partitions only along `tensor`. Parameters and gradients are communicated
once a step. The exception is a scan over blocks: along `fsdp` it communicates
one block at a time, its parameters in the forward and the backward pass of
every microbatch, its gradients in the backward pass. Along `data`, which may
join TPU slices, gradients are always communicated once a step.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from vit_jax.families import ModelConfig
from vit_jax.models.stacking import Part
from vit_jax.param_groups import path_of
from vit_jax.sharding import AXES, BATCH_AXES


def manual_axes(mesh: Mesh) -> set[str]:
  """Returns the axes along which devices compute separately."""
  # All axes, where XLA has nothing to split.
  return set(BATCH_AXES if mesh.shape["tensor"] > 1 else AXES)


def manual_specs(shardings):
  """Keeps the part of every sharding that concerns the axes data and fsdp."""

  def keep(axes):
    names = (axes,) if isinstance(axes, str) else axes or ()
    return next((a for a in names if a in BATCH_AXES), None)

  return jax.tree.map(lambda s: P(*map(keep, s.spec)), shardings)


def gather(params, specs, model: ModelConfig):
  """All-gathers parameters from their parts; call it inside `shard_map`.

  Kernels of matrix products, `model.CAST`, are cast to its dtype before the
  all-gather, not after it.

  Args:
    params: The parts on this device.
    specs: Their specs, from `manual_specs`.
    model: config.model.

  Returns:
    The whole parameters. A split parameter of blocks in a scan becomes a
    `Part`, which the body of the scan gathers.
  """

  def whole(path, x, spec):
    name, dim = path_of(path), _split_dim(spec)
    is_cast = model.CAST is not None and re.search(model.CAST, name)
    kind = model.dtype if is_cast else x.dtype
    if dim is None:
      return x.astype(kind)
    if model.is_scanned(name):
      return Part(x, Gather(dim - 1, kind))
    return Gather(dim, kind)(x)

  return jax.tree_util.tree_map_with_path(whole, params, specs)


def reduce(grads, specs):
  """Sums gradients over the devices; each keeps its part, in float32.

  Call it inside `shard_map`, with gradients with respect to the result of
  `gather`. The gradients of a `Part` are already summed along `fsdp`.
  """

  def part(g, spec):
    if isinstance(g, Part):
      if jax.lax.axis_size("data") == 1:
        return g.array
      g = _as_sent(g.array.astype(g.gather.dtype))
      return total(g, ("data",)).astype(jnp.float32)
    dim = _split_dim(spec)
    if dim is None:
      return total(_as_sent(g)).astype(jnp.float32)
    return _scattered(g, dim, ("data",))

  return jax.tree.map(part, grads, specs, is_leaf=is_part)


def is_part(x: Any) -> bool:
  """Whether a node of the result of `gather` is a `Part`."""
  return isinstance(x, Part)


@dataclasses.dataclass(frozen=True)
class Gather:
  """All-gathers a parameter from its parts on the devices along `fsdp`.

  The backward pass sums the gradient along `fsdp`, and gives each device its
  part in float32.

  Attributes:
    dim: Dimension that is split.
    dtype: Type in which the parts are sent.
  """

  dim: int
  dtype: DTypeLike

  def __call__(self, x: jax.Array) -> jax.Array:
    return _gathered(x, self.dim, self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, dim: int, dtype: DTypeLike) -> jax.Array:
  shape = [*x.shape]
  shape[dim] *= jax.lax.axis_size("fsdp")
  x, axis = _flat(x.astype(dtype), dim)
  x = jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True)
  return x.reshape(shape)


_gathered.defvjp(
  lambda x, dim, dtype: (_gathered(x, dim, dtype), None),
  lambda dim, dtype, residuals, grad: (_scattered(grad, dim, ()),),
)


def _scattered(g: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
  """Sums along `fsdp` and `axes`; returns a device's part along `dim`."""
  shape = [*g.shape]
  g, axis = _flat(g, dim)
  g = _as_sent(g)
  # The parts get a dimension of their own. Otherwise a TPU reduces whole
  # arrays where a part is no multiple of its tiles: twice the bytes.
  parts = jax.lax.axis_size("fsdp")
  shape[dim] //= parts
  before, size, after = g.shape[:axis], g.shape[axis], g.shape[axis + 1 :]
  g = g.reshape(*before, parts, size // parts, *after)
  g = jax.lax.psum_scatter(g, "fsdp", scatter_dimension=axis)
  return total(g, axes).astype(jnp.float32).reshape(shape)


def _as_sent(g: jax.Array) -> jax.Array:
  """Casts a gradient to the dtype used for communication."""
  if "tensor" not in jax.sharding.get_abstract_mesh().manual_axes:
    # XLA for CPUs fails on bfloat16 beside an axis that it splits itself.
    return g.astype(jnp.float32)
  # They are sent in the type that they have: without the barrier XLA may cast
  # them to float32 first. Those of the head are float32; a barrier would make
  # XLA copy them.
  return g if g.dtype == jnp.float32 else jax.lax.optimization_barrier(g)


def total(x: jax.Array, axes: tuple[str, ...] = BATCH_AXES) -> jax.Array:
  """Sums over the devices along these axes; inside `shard_map`."""
  # XLA refuses a sum over only axes of one device beside a tensor axis.
  axes = tuple(a for a in axes if jax.lax.axis_size(a) > 1)
  return jax.lax.psum(x, axes) if axes else x


class Over:
  """Operations over the rows of all devices, for objectives.

  The results are those of the whole batch on one device, up to rounding. They
  have gradients: of the sum of all devices' losses.
  """

  def sum(self, x: jax.Array) -> jax.Array:
    """Returns the sum along the first dimension, over all rows."""
    return total(x.sum(0))

  def mean(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns the mean along the first dimension, over all rows.

    Args:
      x: [b, ...], the rows of this device.
      weights: [b], such as the mask of the batch; None for 1.
    """
    if weights is None:
      weights = jnp.ones(len(x))
    weights = weights.astype(jnp.float32)
    weighted = x * weights.reshape(-1, *(1,) * (x.ndim - 1))
    return self.sum(weighted) / jnp.maximum(self.sum(weights), 1e-12)

  def gather(self, x: jax.Array) -> jax.Array:
    """Returns all rows [B, ...] of an array of which a device has [b, ...]."""
    for axis in reversed(BATCH_AXES):
      if jax.lax.axis_size(axis) > 1:
        x = jax.lax.all_gather(x, axis, axis=0, tiled=True)
    return x

  def rows(self, number: int) -> jax.Array:
    """Returns the places of a device's rows in the result of `gather`.

    Args:
      number: Rows of the device.
    """
    device = 0
    for axis in BATCH_AXES:
      if (size := jax.lax.axis_size(axis)) > 1:
        device = device * size + jax.lax.axis_index(axis)
    return device * number + jnp.arange(number)


def _flat(x: jax.Array, dim: int) -> tuple[jax.Array, int]:
  """Returns x as a matrix whose parts along `dim` are rows or columns.

  Collectives get matrices, because a TPU would pad and copy heads of 64 to its
  tiles of 128.

  Returns:
    The matrix; the dimension of the matrix that `dim` became: 0 if it was the
    first, otherwise 1, merged with the dimensions after it.
  """
  if x.ndim == 1:
    return x, 0
  if dim == 0:
    return x.reshape(len(x), -1), 0
  return x.reshape(math.prod(x.shape[:dim]), -1), 1


def _split_dim(spec: P) -> int | None:
  return next((i for i, axis in enumerate(spec) if axis == "fsdp"), None)
