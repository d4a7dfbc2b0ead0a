"""Reads the arrays of a checkpoint's item with Orbax.

Orbax reads arrays in tasks of an event loop. If one array cannot be read,
Orbax's own handlers raise at once, and the loop is closed while TensorStore
still reads the others. Each of these then prints a stack that ends in "Event
loop is closed". The handlers of this module end after all of their reads.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

T = TypeVar("T")


def shapes(folder: epath.Path) -> Any:
  """Returns the tree of an item, with shapes and types in place of arrays."""
  return _handler().metadata(folder).tree


def read(folder: epath.Path, like: Any) -> Any:
  """Returns the arrays of an item on devices.

  Args:
    folder: Folder of the item.
    like: Tree of `jax.ShapeDtypeStruct` with shardings.
  """
  restore_args = ocp.checkpoint_utils.construct_restore_args(like)
  args = ocp.args.PyTreeRestore(item=like, restore_args=restore_args)
  return _handler().restore(folder, args=args)


def read_as_numpy(folder: epath.Path) -> dict[str, Any]:
  """Returns the arrays of an item as numpy."""
  as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
  restore_args = jax.tree.map(lambda _: as_numpy, shapes(folder))
  args = ocp.args.PyTreeRestore(restore_args=restore_args)
  return _handler().restore(folder, args=args)


def _handler() -> ocp.PyTreeCheckpointHandler:
  """Returns Orbax's handler of an item, for reading it."""
  scalar = type_handlers.ScalarHandler()  # in checkpoints of other programs
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=type_handlers.create_type_handler_registry(
      (int, scalar),
      (float, scalar),
      (np.number, scalar),
      (str, type_handlers.StringHandler()),
      (np.ndarray, _NumpyHandler()),
      (jax.Array, _ArrayHandler()),
    )
  )


class _ArrayHandler(type_handlers.ArrayHandler):
  """Orbax's handler of jax arrays."""

  async def metadata(self, *args, **kwargs):
    return await _with_all_tasks(super().metadata(*args, **kwargs))

  async def deserialize(self, *args, **kwargs):
    return await _with_all_tasks(super().deserialize(*args, **kwargs))


class _NumpyHandler(type_handlers.NumpyHandler):
  """Orbax's handler of numpy arrays."""

  async def metadata(self, *args, **kwargs):
    return await _with_all_tasks(super().metadata(*args, **kwargs))

  async def deserialize(self, *args, **kwargs):
    return await _with_all_tasks(super().deserialize(*args, **kwargs))


async def _with_all_tasks(reads: Awaitable[T]) -> T:
  """Awaits reads; if one fails, also all tasks that were started meanwhile."""
  before = asyncio.all_tasks()
  try:
    return await reads
  except Exception:
    while tasks := asyncio.all_tasks() - before:  # a task may begin others
      await asyncio.wait(tasks)
    raise
