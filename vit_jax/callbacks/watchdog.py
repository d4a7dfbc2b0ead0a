"""Ends a process that makes no progress, and writes where it hangs."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

from vit_jax.callbacks.base import Callback
from vit_jax.distributed import exit_codes

CHECK_SECONDS = 1.0
# After a longer pause of the watchdog itself the process was suspended and
# continued, and gets the whole limit again.
SUSPENDED_SECONDS = 5.0
STACKS = "stacks-{}.txt"  # with the number of the process


class Watchdog(Callback):
  """Ends the process with code 124 after some time without a heartbeat.

  A new phase, a step and a batch of an evaluation are heartbeats. At the end,
  the stacks of all threads go to stderr and to `stacks-<process>.txt` in the
  run's folder. The watchdog runs from its construction on, so it also covers
  the start of the run.

  A process that waits for another one has no heartbeat either. So the limit
  must be longer than the slowest compilation of all processes.

  Args:
    seconds: Longest time without a heartbeat; 0 for no limit.
    workdir: Folder of the run.
    process_index: Number of this process.
    on_exit: Called with a text before the process ends.
    clock: Clock in seconds, for tests.
  """

  def __init__(
    self,
    seconds: float,
    workdir: str,
    process_index: int = 0,
    on_exit: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._limit, self._workdir = seconds, workdir
    self._process_index = process_index
    self._on_exit, self._clock = on_exit, clock
    self._phase, self._step = "start", 0
    self._last_heartbeat = self._last_look = clock()
    self._is_closed = threading.Event()
    if seconds:
      threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

  def on_phase(self, name: str) -> None:
    self._phase = name
    self.heartbeat()

  def on_step(self, step: int, batch: Mapping, metrics: Mapping) -> None:
    self._step = step
    self.heartbeat()

  def on_eval_batch(self) -> None:
    self.heartbeat()

  def close(self, error: BaseException | None) -> None:
    self._is_closed.set()

  def heartbeat(self) -> None:
    """Notes progress."""
    self._last_heartbeat = self._clock()

  def alarm(self) -> str | None:
    """Returns the text of the alarm; None if the limit has not passed.

    It is called every `CHECK_SECONDS`. A much later call means that the process
    was suspended.
    """
    now, before = self._clock(), self._last_look
    self._last_look = now
    if now - before > SUSPENDED_SECONDS:
      self.heartbeat()
    late = now - self._last_heartbeat
    if late <= self._limit:
      return None
    return (
      f"hung        phase {self._phase}, step {self._step:,}: no progress for"
      f" {late:,.0f} s; config.watchdog_seconds is {self._limit:g}"
    )

  def _watch(self) -> None:
    while not self._is_closed.wait(CHECK_SECONDS):
      if alarm := self.alarm():
        self._end(alarm)

  def _end(self, alarm: str) -> None:
    traces = stacks()
    name = STACKS.format(self._process_index)
    text = (
      f"{alarm}\nstacks      of all threads, also in {self._workdir}/{name}:\n"
      f"{traces}\nended       the same command resumes from the last complete"
      f" checkpoint (exit code {exit_codes.EXIT_HUNG})"
    )

    def write() -> None:
      from vit_jax.paths import run_path  # --help does not wait for it

      folder = run_path(self._workdir)
      folder.mkdir(parents=True, exist_ok=True)
      (folder / name).write_text(f"{alarm}\n\n{traces}\n")

    exit_codes.end(
      exit_codes.EXIT_HUNG,
      lambda: exit_codes.say(text),  # it waits if stderr is what hangs
      lambda: self._on_exit(" ".join(alarm.split())),
      write,
    )


def stacks() -> str:
  """Returns the Python stack of every thread of this process."""
  with tempfile.TemporaryFile("w+") as file:
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return file.read()
