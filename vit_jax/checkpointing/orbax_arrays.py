"""Handlers by which Orbax reads arrays, which end after all of their reads.

Orbax reads the arrays of a checkpoint in tasks of an event loop. When one array
cannot be read, its own handlers raise at once, and the loop is closed while
TensorStore still reads the others; each of these then prints a stack that ends
in "Event loop is closed".
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

T = TypeVar("T")


def reader() -> ocp.PyTreeCheckpointHandler:
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
  """Awaits reads; if one fails, also all tasks that were begun meanwhile."""
  before = asyncio.all_tasks()
  try:
    return await reads
  except Exception:
    while tasks := asyncio.all_tasks() - before:  # a task may begin others
      await asyncio.wait(tasks)
    raise
