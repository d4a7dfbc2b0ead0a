"""Computes steps twice, to find a device that does not compute what it should.

A flipped bit that is finite is noticed by nothing else. Both results come from
the same compiled program, so that on devices that work they agree in every bit;
and all devices that hold the same part of an array must hold the same bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.batch import hashed
from vit_jax.sharding import AXES, path_of, replicated, shardings_of

Step = Callable[[Any, dict], tuple[Any, dict]]
MOST_TOLD = 4  # devices


class DeviceFault(RuntimeError):
  """A step computed twice had two results; the message says where."""


def checked(
  train_step: Step, state: Any, mesh: Mesh, start: int, every_steps: int
) -> Step:
  """Returns a step that is computed twice at multiples of `every_steps`.

  The state is copied for it, so the devices need room for two; the copy is gone
  before the second result is there. The host waits for both results, and only
  then is one of them the state of the run.

  Args:
    train_step: See `step.make_train_step`.
    state: Abstract, with shardings.
    mesh: Mesh of the run.
    start: Step from which this process trains.
    every_steps: config.checks.replay; 0: `train_step` is returned as it is.

  Returns:
    The step. It raises `DeviceFault`, in all processes alike.
  """
  if not every_steps:
    return train_step
  copied, digest = copies(state), digests(shardings_of(state), mesh)
  taken = start

  def step(state: Any, batch: dict) -> tuple[Any, dict]:
    nonlocal taken
    taken += 1
    if taken % every_steps:
      return train_step(state, batch)
    once, _ = train_step(copied(state), batch)
    first = digest(once)
    del once
    state, metrics = train_step(state, batch)
    found = [np.asarray(x) for x in jax.device_get((first, digest(state)))]
    if told := differences(*found, state, mesh):
      raise DeviceFault(
        f"step {taken} was computed twice, and the results differ: {told}."
        " Neither is kept. A device or its memory is at fault, or a program"
        " that does not repeat its bits: on GPUs, set"
        " XLA_FLAGS=--xla_gpu_deterministic_ops=true. The same command goes on"
        " from the newest checkpoint; a device that is named again is to be"
        " left out."
      )
    return state, metrics

  return step


def copies(state: Any) -> Callable[[Any], Any]:
  """Returns a jitted function: state -> a copy, split like `state`."""

  def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)

  return jax.jit(copied, out_shardings=shardings_of(state))


def digests(shardings: Any, mesh: Mesh) -> Callable[[Any], jax.Array]:
  """Returns a jitted function: state -> uint32 [devices, arrays].

  Each device hashes the part of each array that it holds.

  Args:
    shardings: Of the state, `NamedSharding`s of the mesh.
    mesh: The devices are in its order.
  """

  def local_digests(state: Any) -> jax.Array:
    return jnp.stack([_hash(x) for x in jax.tree.leaves(state)])[None]

  specs = jax.tree.map(lambda s: s.spec, shardings)
  each = jax.shard_map(
    local_digests,
    mesh=mesh,
    in_specs=(specs,),
    out_specs=P(AXES),
    check_vma=False,
  )
  return jax.jit(each, out_shardings=replicated(mesh))


def differences(
  first: np.ndarray, second: np.ndarray, state: Any, mesh: Mesh
) -> str:
  """Returns in which arrays, and on which devices, two results differ, or "".

  Args:
    first: Of `digests`.
    second: The same of the other result.
    state: The arrays, or shapes with shardings.
    mesh: Mesh of both.
  """
  leaves = jax.tree_util.tree_leaves_with_path(state)
  devices = list(mesh.devices.flat)
  found, where = [], set()
  for i, (path, leaf) in enumerate(leaves):
    off = set(np.flatnonzero(first[:, i] != second[:, i]))
    for part in _holders(leaf, devices) if not off else ():
      # Those that hold the same must agree; of more than two most are right.
      values, counts = np.unique(second[part, i], return_counts=True)
      usual = values[counts == counts.max()]
      off |= {d for d in part if len(usual) > 1 or second[d, i] != usual}
    if off:
      found.append(path_of(path))
      where |= off
  if not found:
    return ""
  told = f"{len(found)} of {len(leaves)} arrays, the first is {found[0]}"
  if len(where) == len(devices) > 1:
    return f"{told}, on all devices, so that the faulty one cannot be told"
  names = [str(devices[d]) for d in sorted(where)]
  more = len(names) - MOST_TOLD
  return f"{told}, on {', '.join(names[:MOST_TOLD])}" + (
    f" and {more} more" if more > 0 else ""
  )


def _holders(leaf: Any, devices: list) -> list[list[int]]:
  """Returns the devices, by number, that hold the same part, for every part."""
  parts: dict[str, list[int]] = {}
  held = leaf.sharding.devices_indices_map(leaf.shape)
  for number, device in enumerate(devices):
    parts.setdefault(str(held[device]), []).append(number)
  return list(parts.values())


def _hash(x: jax.Array) -> jax.Array:
  if x.dtype != jnp.bool_:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    x = jax.lax.bitcast_convert_type(x, unsigned)
  x = x.astype(jnp.uint32)
  return hashed(x if x.ndim else x[None])
