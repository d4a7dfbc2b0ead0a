"""When a checkpoint is saved, tried again and verified, and old ones removed.

A save runs in the background. It counts after its folder has been read again;
then older checkpoints are removed, for which only the next periodic save waits.
A failure is logged at the next step, and the save is tried again after 1, 2, 4
... steps, with the state of that step. At the end of a run, as after SIGTERM,
only what makes the checkpoint whole is done.

All processes agree on the outcome of a save by an all-gather 1, 2, 4 ... steps
after its start, and before the next save. If one of them fails, the others
learn it at their next barrier.
"""

import concurrent.futures
import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from vit_jax.checkpointing import layout, orbax_files, retention
from vit_jax.checkpointing.layout import DamagedError
from vit_jax.checkpointing.orbax_files import StepWriter
from vit_jax.config import CheckpointConfig
from vit_jax.paths import is_remote
from vit_jax.writers import console, run_info

MAX_STEPS = 1024  # between two attempts
WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds between attempts at the end of a run
_save_numbers = itertools.count()  # numbers of the saves of this process


class SaveError(Exception):
  """A checkpoint that a run needs could not be written."""


class AsyncSaver:
  """The saves of one run, one at a time.

  Args:
    folder: Its `checkpoints/`.
    config: What to keep.

  Attributes:
    newest: Step of the newest checkpoint that is known to be complete, 0 for
      none; the same in all processes.
  """

  def __init__(self, folder: epath.Path, config: CheckpointConfig):
    self.newest = 0
    self._folder, self._config = folder, config
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    self._running: concurrent.futures.Future | None = None
    self._removing: concurrent.futures.Future | None = None
    self._ends = False  # whether the run does, so that nothing is removed
    self._whole: set[int] = set()  # steps that process 0 has verified
    self._is_clean = False  # whether no failed save has left files
    self._step = 0  # of `_running`
    self._failures = 0  # since the last good one
    self._error = ""  # the last one
    self._retry_at: int | None = None

  def resume(self, step: int) -> None:
    """Notes the checkpoint that a run resumes from; removes older ones."""
    self.newest = step
    if jax.process_index() == 0:
      self._removing = self._worker.submit(self._remove_old)

  def start(
    self, step: int, items: dict[str, Any], metadata: dict[str, Any]
  ) -> None:
    """Waits for the previous save, and starts this one unless it exists."""
    self._settle(step)
    if step == self.newest:
      return
    if self._removing is not None and not self._ends:
      self._removing.result()
    self._step, self._retry_at = step, None
    error = writer = None
    barrier = FailFastBarrier(next(_save_numbers))
    try:
      self._make_room(step)
    except Exception as e:
      error = e
    if not retention.max_of_processes(error is not None):
      folder = self._folder / str(step)
      try:
        writer = StepWriter(folder, barrier.sync_fn)
        writer.start(items, metadata)
      except Exception as e:
        error = e
    elif error is None:
      error = OSError("process 0 cannot write files")
    self._running = self._worker.submit(
      self._complete, step, writer, barrier, error, metadata
    )

  def wait(self) -> None:
    """Waits for the running save, if any. Collective."""
    self._settle(self._step)

  def retry_due(self, step: int) -> bool:
    """Whether to try a failed save again, see `Checkpointer.due`."""
    if self._running is not None and self._is_check_due(step):
      if not retention.max_of_processes(not self.is_idle()):
        self._settle(step)
    return self._retry_at is not None and step >= self._retry_at

  def is_idle(self) -> bool:
    """Whether no save is running in this process."""
    return self._running is None or self._running.done()

  def _is_check_due(self, step: int) -> bool:
    """Whether to run the collective that checks if the save has ended.

    It runs 1, 2, 4, ... steps after the save began.
    """
    since = step - self._step
    return jax.process_count() == 1 or since & (since - 1) == 0

  def finish(
    self,
    step: int,
    items: Callable[[], dict[str, Any]],
    metadata: dict[str, Any],
  ) -> None:
    """Saves and waits, with several attempts; raises SaveError."""
    self._ends = True
    for seconds in (*WAITS, None):
      self.start(step, items(), metadata)
      again = "" if seconds is None else f"tried again in {seconds:g} s"
      self._settle(step, again)
      if self.newest == step:
        return
      if seconds is not None:
        time.sleep(seconds)
    raise SaveError(
      f"{self._folder}: the checkpoint of step {step:,} could not be written"
      f" ({self._error}); the newest is {self._last()}."
    )

  def close(self) -> None:
    """Waits for the running save; a failure is logged."""
    if self._running is not None:
      try:
        self._running.result()
      except Exception as e:
        self._report(_reason(e), "the run ends")
      self._running = None
    self._worker.shutdown()

  def _settle(self, step: int, again: str | None = None) -> None:
    """Waits for the running save, if any, and records its outcome.

    Args:
      step: The present step.
      again: When it is tried again, for the message; None for "after some
        steps".
    """
    if self._running is None:
      return
    error = None
    try:
      self._running.result()
    except Exception as e:
      error = _reason(e)
    self._running = None
    if not retention.max_of_processes(error is not None):
      self.newest, self._failures = self._step, 0
      return
    self._failures += 1
    self._is_clean = False
    wait = min(2 ** (self._failures - 1), MAX_STEPS)
    self._retry_at = step + wait
    self._error = error or "in another process"
    if error or jax.process_index() == 0:
      self._report(
        self._error,
        f"tried again after step {step + wait:,}" if again is None else again,
      )

  def _report(self, error: str, again: str) -> None:
    """Prints a failure."""
    console.write(
      sys.stderr,
      f"NOT SAVED   the checkpoint of step {self._step:,} ({error});"
      f" {again + '; ' if again else ''}the newest is {self._last()}\n",
    )

  def _last(self) -> str:
    return f"that of step {self.newest:,}" if self.newest else "none"

  def _make_room(self, step: int) -> None:
    """Removes what failed saves left; checks that files can be written.

    Only in process 0. A bucket is asked only in the first save, and after one
    that failed.
    """
    if jax.process_index() == 0:
      if not is_remote(self._folder):
        retention.probe(self._folder)
      elif self._is_clean:
        return
      retention.clean(self._folder)
      self._is_clean = True
      if (folder := self._folder / str(step)).exists():
        retention.set_aside(folder)  # written, but could not be read again

  def _complete(
    self,
    step: int,
    writer: "StepWriter | None",
    barrier: "FailFastBarrier",
    error: Exception | None,
    metadata: dict[str, Any],
  ) -> None:
    """The rest of a save, in the background; raises its errors."""
    is_first = jax.process_index() == 0
    folder = self._folder / str(step)
    try:
      if error is not None:
        raise error
      writer.wait()
      if is_first:
        if damage := layout.damage(folder):
          if folder.exists():
            retention.set_aside(folder)
          raise DamagedError(f"read again: {damage}")
        self._whole.add(step)
    except Exception:
      if writer is not None:  # None: no process has begun
        barrier.fail()
      raise
    barrier.arrive()
    if is_first:
      try:
        retention.note_newest(self._folder, step)
      except OSError as e:  # the checkpoint is whole nevertheless
        layout.log(f"note        {_reason(e)}")
      run_info.write_json(
        str(self._folder.parent), "metadata.json", metadata, layout.log
      )
      if not self._ends:
        self._removing = self._worker.submit(self._remove_old)

  def _remove_old(self) -> None:
    """Removes checkpoints that the run does not keep."""
    if self._ends:
      return
    try:
      there = layout.step_folders(self._folder)
      for step, folder in there.items():
        if step not in self._whole and not layout.damage(folder):
          self._whole.add(step)
      for step in retention.expired(
        [step for step in there if step in self._whole],
        there,
        self._config.keep_last,
        self._config.keep_every_steps,
      ):
        retention.remove(there[step])
    except Exception as e:
      layout.log(f"note        old checkpoints stay ({_reason(e)})")


def _reason(e: Exception) -> str:
  return layout.damage_of(e) or f"{type(e).__name__}: {e}"


class FailFastBarrier:
  """The barriers of one save; after a failure no process waits at them.

  At each barrier the processes wait for each other, and then once more, for
  `CONFIRM_SECONDS`. A process that has failed comes only to the first, so the
  others learn of it at the second. With Orbax's own barriers, which were tried,
  they would wait for 20 minutes. Like those, these use jax's coordination
  service, in threads, without the devices.

  Args:
    number: Number of the save in this program, the same in all processes.
  """

  CONFIRM_SECONDS = 15.0
  TIMEOUT = 1200.0  # seconds

  def __init__(self, number: int):
    self._name = f"vit_jax/save/{number}"
    self._round = 0
    self._has_ended = jax.process_count() == 1
    self._wait = orbax_files.barrier()

  @property
  def sync_fn(self) -> Callable | None:
    """Orbax's function of (key, timeout_ms); None for a single process."""
    if self._has_ended:
      return None
    return lambda key, timeout_ms: self.arrive(timeout_ms)

  def arrive(self, timeout_ms: int = int(1000 * TIMEOUT)) -> None:
    """Waits for all processes at the next barrier.

    Raises:
      OSError: Another process has failed.
    """
    if self._has_ended:
      return
    self._round += 1
    name = f"{self._name}/{self._round}"
    self._wait(key=name, timeout_ms=timeout_ms)
    try:
      self._wait(
        key=f"{name}/confirm", timeout_ms=int(1000 * self.CONFIRM_SECONDS)
      )
    except Exception:  # jax's error; its class is not documented
      self._has_ended = True
      raise OSError("another process failed") from None

  def fail(self) -> None:
    """Releases the processes at the barrier after a failure in this one."""
    if self._has_ended:
      return
    self._has_ended = True
    with contextlib.suppress(Exception):
      self._wait(
        key=f"{self._name}/{self._round + 1}",
        timeout_ms=int(1000 * self.TIMEOUT),
      )
