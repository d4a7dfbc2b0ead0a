"""When a checkpoint is written, tried again, verified, and old ones removed.

A save runs in the background. It counts when its folder has been read again;
then older ones are removed. One that fails is told at the next step, and tried
again after 1, 2, 4 ... steps, with the state of that step.

Several processes decide alike: how a save ended is a collective of all of them,
1, 2, 4 ... steps after its start and before the next save. Where one of them
fails, the others learn it at their next barrier, and do not wait for it.
"""

import concurrent.futures
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax import digests as digests_lib
from vit_jax.checkpointing import layout, retention
from vit_jax.checkpointing.layout import DamagedError
from vit_jax.config import CheckpointConfig
from vit_jax.writers import console

MAX_STEPS = 1024  # between two tries
_count = itertools.count()  # saves of this process
WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds between those at the end of a run
MAX_WAIT = 60.0  # seconds for the other parts of a save of which one has failed


class SaveError(Exception):
  """A checkpoint that a run cannot go without could not be written."""


class AsyncSaver:
  """The saves of one run, one at a time.

  Args:
    folder: Its `checkpoints/`.
    config: What to keep.

  Attributes:
    newest: Step of the newest checkpoint that is known to be whole; 0: none.
      The same in all processes.
  """

  def __init__(self, folder: epath.Path, config: CheckpointConfig):
    self.newest = 0
    self._folder, self._config = folder, config
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    self._running: concurrent.futures.Future | None = None
    self._step = 0  # of `_running`
    self._failures = 0  # since the last good one
    self._error = ""  # the last one
    self._retry_at: int | None = None

  def start(
    self, step: int, items: dict[str, Any], metadata: dict[str, Any]
  ) -> None:
    """Waits for the save before, and starts this one, unless it is there."""
    self._settle(step)
    if step == self.newest:
      return
    self._step, self._retry_at = step, None
    error = writer = None
    barrier = FailFastBarrier(next(_count))
    try:
      self._make_room(step)
    except Exception as e:
      error = e
    if not retention.agreed(error is not None):
      folder = self._folder / str(step)
      try:
        writer = StepWriter(folder, barrier.sync_fn)
        writer.start(items, metadata)
      except Exception as e:
        error = e
    elif error is None:
      error = OSError("process 0 cannot write files")
    self._running = self._worker.submit(
      self._complete, step, writer, barrier, error
    )

  def wait(self) -> None:
    """Waits for the save that runs, if any; all processes must call it."""
    self._settle(self._step)

  def retry_due(self, step: int) -> bool:
    """See `checkpoint.Checkpointer.retry_due`."""
    if self._running is not None and self._asks(step):
      if not retention.agreed(not self.is_idle()):
        self._settle(step)
    return self._retry_at is not None and step >= self._retry_at

  def is_idle(self) -> bool:
    """Whether no save is running in this process."""
    return self._running is None or self._running.done()

  def _asks(self, step: int) -> bool:
    """Whether to ask how the save is going: a collective of the processes."""
    since = step - self._step
    return jax.process_count() == 1 or since & (since - 1) == 0

  def finish(
    self,
    step: int,
    items: Callable[[], dict[str, Any]],
    metadata: dict[str, Any],
  ) -> None:
    """Writes and waits, and tries again; raises SaveError."""
    for seconds in (*WAITS, None):
      self.start(step, items(), metadata)
      again = "" if seconds is None else f"tried again in {seconds:g} s"
      self._settle(step, again)
      if self.newest == step:
        return
      if seconds is not None:
        time.sleep(seconds)
    last = f"that of step {self.newest:,}" if self.newest else "none"
    raise SaveError(
      f"{self._folder}: the checkpoint of step {step:,} could not be written"
      f" ({self._error}), nor {len(WAITS)} times after that. The newest"
      f" checkpoint is {last}: make room, or mend what is named, and start the"
      " same command again."
    )

  def close(self) -> None:
    """Waits for the save that runs; a failure is told."""
    if self._running is not None:
      try:
        self._running.result()
      except Exception as e:
        self._report(_reason(e), "the run ends")
      self._running = None
    self._worker.shutdown()

  def _settle(self, step: int, again: str | None = None) -> None:
    """Waits for the save that runs, if any, and takes note of how it ended.

    Args:
      step: The present one.
      again: When it is tried again, for the message; None: after some steps.
    """
    if self._running is None:
      return
    error = None
    try:
      self._running.result()
    except Exception as e:
      error = _reason(e)
    self._running = None
    if not retention.agreed(error is not None):
      self.newest, self._failures = self._step, 0
      return
    self._failures += 1
    wait = min(2 ** (self._failures - 1), MAX_STEPS)
    self._retry_at = step + wait
    self._error = error or "in another process, which says why"
    if error or jax.process_index() == 0:
      self._report(
        self._error,
        f"tried again after step {step + wait:,}" if again is None else again,
      )

  def _report(self, error: str, again: str) -> None:
    """Prints a failure."""
    last = f"that of step {self.newest:,}" if self.newest else "none"
    console.write(
      sys.stderr,
      f"NOT SAVED   the checkpoint of step {self._step:,} ({error});"
      f" {again + '; ' if again else ''}the newest is {last}\n",
    )

  def _make_room(self, step: int) -> None:
    """Removes what failed saves left, and tries whether files can be written;
    process 0 does."""
    if jax.process_index() == 0:
      if self.newest and not self._folder.exists():
        layout.say(f"note        {self._folder} was removed; it is made again")
      retention.probe(self._folder)
      retention.clean(self._folder)
      if (folder := self._folder / str(step)).exists():
        retention.set_aside(folder)  # written, but could not be looked at

  def _complete(
    self,
    step: int,
    writer: "StepWriter | None",
    barrier: "FailFastBarrier",
    error: Exception | None,
  ) -> None:
    """The rest of a save, in the background; raises what went wrong."""
    is_first = jax.process_index() == 0
    folder = self._folder / str(step)
    try:
      if error is not None:
        raise error
      writer.wait()
      if is_first and (why := layout.damage(folder)):
        if folder.exists():
          retention.set_aside(folder)
        raise DamagedError(f"read again: {why}")
    except Exception as e:
      if writer is not None:  # else no process has begun
        barrier.fail(_reason(e))
      raise
    barrier.arrive()
    if is_first:
      try:
        retention.note_newest(self._folder, step)
        self._remove_old()
      except Exception as e:  # the checkpoint is whole nevertheless
        layout.say(f"note        old checkpoints stay ({_reason(e)})")

  def _remove_old(self) -> None:
    good, bad = layout.whole(self._folder)
    for step in retention.expired(
      good,
      [*good, *bad],
      self._config.keep_last,
      self._config.keep_every_steps,
    ):
      retention.remove(self._folder / str(step))


def _reason(e: Exception) -> str:
  return layout.reason(e) or f"{type(e).__name__}: {e}"


class FailFastBarrier:
  """Barriers of one save, at which each process says whether it has failed.

  Orbax's own barriers let the others wait 20 minutes for one that has failed.
  They go through jax's coordination service, in threads, without the devices.

  Args:
    number: Counts the saves of this program, in all processes alike.
  """

  TIMEOUT = 1200.0  # seconds

  def __init__(self, number: int):
    self._name = f"vit_jax/save/{number}"
    self._round = 0
    self._has_ended = jax.process_count() == 1

  @property
  def sync_fn(self) -> Callable | None:
    """Orbax's function of (key, timeout_ms); None: there is one process."""
    if self._has_ended:
      return None
    return lambda key, timeout_ms: self.arrive(timeout=timeout_ms / 1000)

  def arrive(self, error: str = "", timeout: float = TIMEOUT) -> None:
    """Waits for all processes at the next barrier.

    Args:
      error: Why this process does not go on; "": it does.
      timeout: Seconds.

    Raises:
      OSError: Another process has failed.
    """
    if self._has_ended:
      return
    # jax has no public way to this service. With Orbax's own barriers, which
    # were tried, the others wait for minutes after a failure of one process.
    from jax._src import distributed

    client = distributed.global_state.client
    self._round += 1
    name = f"{self._name}/{self._round}"
    if error:
      self._has_ended = True
      client.key_value_set(f"{name}/{jax.process_index()}", error)
    client.wait_at_barrier(f"{name}/all", int(1000 * timeout))
    failed = client.key_value_dir_get(f"{name}/")
    if failed and not error:
      self._has_ended = True
      texts = (f"process {key.split('/')[-1]}: {why}" for key, why in failed)
      raise OSError("; ".join(sorted(texts)))

  def fail(self, error: str) -> None:
    """Tells the others, who wait for this process, that it has failed."""
    try:
      self.arrive(error or "failed")
    except Exception:  # they have ended, too
      pass


class _Items(ocp.CompositeCheckpointHandler):
  """Orbax's handler of several items, which also gives the parts of a save.

  parts: Futures of the newest save, one for each item or more.
  """

  parts: Sequence[ocp.future.Future] = ()

  async def async_save(self, *args: Any, **kwargs: Any) -> Any:
    self.parts = await super().async_save(*args, **kwargs)
    return self.parts


@ocp.args.register_with_handler(_Items, for_save=True, for_restore=True)
class _ItemArgs(ocp.args.Composite):
  """The arguments by which Orbax finds `_Items`."""


class StepWriter:
  """Writes one step's folder, which gets its name when all is in it.

  Where a part of a save fails, threads of Orbax and asyncio may print their own
  stacks beside the message of `AsyncSaver`: no documented setting turns that
  off.

  Args:
    folder: `checkpoints/<step>`.
    barrier: Synchronises the processes; Orbax's keywords. None: Orbax's own.
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
      composite_options=ocp.CompositeOptions(async_options=options)
    )
    self._orbax = ocp.AsyncCheckpointer(
      self._items,
      async_options=options,
      # There is no such folder yet. Looking for it, each process would do so
      # between two collectives.
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
      args=_ItemArgs(**arrays, metadata=ocp.args.JsonSave(self._metadata)),
    )

  def wait(self) -> None:
    """Waits until the folder has its name; raises what went wrong."""
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
    found = {item: lazy.get() for item, lazy in self._digests.items()}
    layout.write_digests(unfinished, found, self._metadata)
