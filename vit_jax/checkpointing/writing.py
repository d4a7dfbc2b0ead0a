"""Writes the folder of a checkpoint with Orbax, and its digests beside it."""

import contextlib
import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from vit_jax.checkpointing import digests as digests_lib
from vit_jax.checkpointing import layout

MAX_WAIT = 60.0  # seconds for the other parts of a save of which one has failed


class Writer:
  """Writes one step's folder, which gets its name when all is in it.

  Args:
    folder: `checkpoints/<step>`.
    barrier: Synchronises the processes; Orbax's keywords. None: Orbax's own.
  """

  def __init__(self, folder: epath.Path, barrier: Callable | None = None):
    self._folder = folder
    drop_echoes()
    options = ocp.AsyncOptions(
      post_finalization_callback=self._add_digests,
      barrier_sync_fn=barrier,
      # Else the rest waits 5 minutes for a folder that cannot be made.
      create_directories_asynchronously=barrier is not None,
    )
    items = ocp.CompositeCheckpointHandler(
      composite_options=ocp.CompositeOptions(async_options=options)
    )
    self._parts: list[ocp.future.Future] = []
    save = items.async_save

    async def async_save(*args: Any, **options: Any) -> list:
      self._parts = await save(*args, **options)
      return self._parts

    items.async_save = async_save
    self._orbax = ocp.AsyncCheckpointer(
      items,
      async_options=options,
      # Else each process looks for the folder, between two collectives; that
      # there is none is known.
      file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
    )

  def start(self, items: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Returns as soon as the arrays are copied, and may be donated."""
    self._metadata = {**metadata, layout.HAS_DIGESTS: layout.VERSION}
    # Before Orbax begins: numpy would take turns with its threads, and its
    # callback runs in one of them, where no collective may be.
    self._digests = {k: digests_lib.of_state(v) for k, v in items.items()}
    arrays = {k: ocp.args.StandardSave(v) for k, v in items.items()}
    self._orbax.save(
      self._folder,
      args=ocp.args.Composite(
        **arrays, metadata=ocp.args.JsonSave(self._metadata)
      ),
    )

  def wait(self) -> None:
    """Waits until the folder has its name; raises what went wrong."""
    try:
      self._orbax.wait_until_finished()
    except Exception:
      # Orbax does not wait for the other parts, which still write to the folder
      # that the next save removes.
      until = time.monotonic() + MAX_WAIT
      for part in self._parts:
        with contextlib.suppress(Exception):
          part.result(timeout=max(0.0, until - time.monotonic()))
      raise
    finally:
      self._orbax.close()

  def _add_digests(self) -> None:
    """Called in process 0 when the arrays are on disk."""
    unfinished = self._orbax.get_temporary_path(self._folder).get()
    found = {item: lazy.get() for item, lazy in self._digests.items()}
    layout.write_digests(unfinished, found, self._metadata)


@functools.cache
def drop_echoes() -> None:
  """Drops the stacks that Orbax's threads print, now or later, when one array
  of many cannot be read or written: that error is raised, and said in words."""

  def is_news(record: logging.LogRecord) -> bool:
    text = str(record.msg)
    is_left = "Task was destroyed" in text and "/orbax/" in text
    return record.levelno < logging.ERROR or not (
      "/orbax/" in record.pathname or "never retrieved" in text or is_left
    )

  before = sys.unraisablehook

  def hook(found: Any) -> None:
    frames = traceback.walk_tb(found.exc_traceback)
    files = [frame.f_code.co_filename for frame, _ in frames]
    if not any("/orbax/" in f or "/asyncio/" in f for f in files):
      before(found)

  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(is_news)
  sys.unraisablehook = hook
