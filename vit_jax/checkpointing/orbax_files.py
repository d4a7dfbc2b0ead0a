"""All that this package uses of Orbax: writing a step, reading an item.

The names are those of Orbax's API before its version 1.0, which moves them. Its
new API, `orbax.checkpoint.v1`, reads the checkpoints that are written here
(`load(STEP)`), but cannot write them yet: it has no barrier of the caller's
(`FailFastBarrier`), and no callback before the folder gets its final name
(digests).

Orbax reads arrays in tasks of an event loop. If one array cannot be read,
Orbax's own handlers raise at once, and the loop is closed while TensorStore
still reads the others. Each of these then prints a stack that ends in "Event
loop is closed". The handlers of this module end after all of their reads.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from vit_jax import digests as digests_lib
from vit_jax.checkpointing import layout

MAX_WAIT = 60.0  # seconds for the other parts of a save after one has failed
# Replicas share the writing of an array if each has so much of it.
MIN_SLICE_BYTES = 2**16
T = TypeVar("T")


def barrier() -> Callable[..., None]:
  """Returns a function of `key` and `timeout_ms` at which processes meet."""
  return ocp.multihost.get_barrier_sync_fn()


class _Items(ocp.CompositeCheckpointHandler):
  """Orbax's handler of several items, which also exposes the parts of a save.

  parts: Futures of the newest save, at least one for each item.
  """

  parts: Sequence[ocp.future.Future] = ()

  async def async_save(self, *args: Any, **kwargs: Any) -> Any:
    self.parts = await super().async_save(*args, **kwargs)
    return self.parts


@ocp.args.register_with_handler(_Items, for_save=True, for_restore=True)
class _ItemArgs(ocp.args.Composite):
  """The arguments by which Orbax finds `_Items`."""


def _tree_handler() -> ocp.PyTreeCheckpointHandler:
  """Returns Orbax's handler of a tree of jax arrays.

  Orbax's default would also write a file of shapes for each process, which
  process 0 would read, and which only arrays of random keys need. It would also
  compile programs that cut small arrays into a part for each replica.
  """
  arrays = type_handlers.ArrayHandler(
    min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES
  )
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=type_handlers.create_type_handler_registry(
      (jax.Array, arrays)
    )
  )


class StepWriter:
  """Writes one step's folder, which gets its name when it is complete.

  If a part of a save fails, threads of Orbax and asyncio may print their own
  stacks; no documented setting prevents it.

  Args:
    folder: `checkpoints/<step>`.
    barrier: Synchronises the processes, with Orbax's keywords; None for Orbax's
      own.
  """

  def __init__(self, folder: epath.Path, barrier: Callable | None = None):
    self._folder = folder
    options = ocp.AsyncOptions(
      post_finalization_callback=self._add_digests,
      barrier_sync_fn=barrier,
      # Orbax would wait 5 minutes for a folder that cannot be made.
      create_directories_asynchronously=barrier is not None,
    )
    self._items = _Items(
      composite_options=ocp.CompositeOptions(async_options=options),
      metadata=ocp.JsonCheckpointHandler(),
      **{item: _tree_handler() for item in layout.ITEMS},
    )
    self._orbax = ocp.AsyncCheckpointer(
      self._items,
      async_options=options,
      # There is no such folder yet. Looking for it, each process would do so
      # between two collectives.
      file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
    )

  def start(self, items: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Starts to write; returns when the arrays are copied (may be donated)."""
    self._metadata = {**metadata, layout.HAS_DIGESTS: layout.VERSION}
    # Before Orbax begins: numpy would compete with its threads, and its
    # callback runs in one of them, where collectives are not allowed.
    self._digests = {k: digests_lib.of_state(v) for k, v in items.items()}
    arrays = {k: ocp.args.PyTreeSave(v) for k, v in items.items()}
    self._orbax.save(
      self._folder,
      args=_ItemArgs(**arrays, metadata=ocp.args.JsonSave(self._metadata)),
    )

  def wait(self) -> None:
    """Waits until the folder is renamed to its final name.

    Raises:
      Exception: The errors of the save.
    """
    try:
      self._orbax.wait_until_finished()
    except Exception:
      # Orbax does not wait for the other parts, which still write to the folder
      # that the next save removes.
      until = time.monotonic() + MAX_WAIT
      for part in self._items.parts:
        with contextlib.suppress(Exception):
          part.result(timeout=max(0.0, until - time.monotonic()))
      raise
    finally:
      self._orbax.close()

  def _add_digests(self) -> None:
    """Called in process 0 when the arrays are on disk."""
    unfinished = self._orbax.get_temporary_path(self._folder).get()
    digests = {item: lazy.get() for item, lazy in self._digests.items()}
    layout.write_digests(unfinished, digests, self._metadata)


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
