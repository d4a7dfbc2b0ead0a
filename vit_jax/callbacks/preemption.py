"""Stops a run on SIGTERM or Ctrl-C, in all its processes at the same step.

jax is imported late, because `commands/train.py` receives signals before jax is
imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from vit_jax.callbacks.base import Callback, Stop
from vit_jax.distributed import exit_codes
from vit_jax.distributed.signals import ENDING, die_by, set_handlers

# Signals within so many seconds count as one: terminals and launchers send
# theirs to a process and again to its group.
REPEAT_SECONDS = 1.0
# Seconds after which the main thread is taken to be in C++.
MAIN_THREAD_SECONDS = 1.0


class StopSignals:
  """Receives SIGTERM and Ctrl-C in a thread, also while XLA compiles.

  Python calls its handlers in the main thread, between two instructions. But it
  writes the number of a signal to a socket as soon as the signal arrives
  (`signal.set_wakeup_fd`), and a thread reads it.

  If the run has a state to save (`action`), the first signal is only noted;
  otherwise it ends the process. A second signal ends the process at once: with
  status 143 for SIGTERM, by the signal itself for Ctrl-C, so that a shell loop
  also ends. A signal that is ignored, as in a shell's background jobs, stays
  ignored.

  Attributes:
    received: Name of the first signal, or None.
    action: Returns what the run does after the first signal, for the user, such
      as "the state is saved". None if there is nothing to save; the signal then
      ends the process with `EXIT_RESTART`.
    on_exit: Called with a text before a signal ends the process.
  """

  def __init__(self):
    self.received: str | None = None
    self.action: Callable[[], str | None] = lambda: None
    self.on_exit: Callable[[str], None] = lambda text: None
    self._first_at = 0.0
    self._is_ending = False
    self._read, self._write = socket.socketpair()
    self._write.setblocking(False)
    self.install()
    threading.Thread(target=self._listen, name="signals", daemon=True).start()

  def install(self) -> None:
    """Sets the handlers in the main thread; call it again after libtpu."""
    set_handlers(ENDING, self._handle)
    signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

  def close(self, numbers: Iterable[int] = ENDING) -> None:
    """Stops receiving, and restores Python's own handlers of these signals.

    Leave SIGTERM out if jax has set a handler in C++, which Python does not see
    and would replace.
    """
    signal.set_wakeup_fd(-1)
    for number in numbers:
      if signal.getsignal(number) == self._handle:
        is_term = number == signal.SIGTERM
        signal.signal(
          number, signal.SIG_DFL if is_term else signal.default_int_handler
        )
    self._write.close()

  def _listen(self) -> None:
    with self._read, contextlib.suppress(OSError):
      while numbers := self._read.recv(64):
        for number in numbers:
          if number in ENDING:
            self._receive(number)

  def _receive(self, number: int) -> None:
    """Acts on a signal, in the thread."""
    name, now = signal.Signals(number).name, time.monotonic()
    if self.received is None:
      action = self.action()
      if action is None:
        self._end(
          f"stopped by {name} before the first step; nothing is lost",
          exit_codes.EXIT_RESTART,
        )
      self.received, self._first_at = name, now
      exit_codes.say(  # it may block, if the terminal does not read
        f"{name}: received; {action}, then the run ends with exit code"
        f" {exit_codes.EXIT_RESTART}. A second signal ends it at once"
      )
    elif now - self._first_at > REPEAT_SECONDS and not self._is_ending:
      text = f"{name} again: ended at once, nothing more is saved"
      if number == signal.SIGTERM:
        self._end(text, 128 + number)
      self._end(text, 128 + number, lambda: self._interrupt(number))

  def _end(self, text: str, code: int, *more: Callable[[], None]) -> None:
    say = lambda: exit_codes.say(text)
    exit_codes.end(code, say, lambda: self.on_exit(text), *more)

  def _interrupt(self, number: int) -> None:
    """Ends the process by a signal, if the main thread can handle it.

    Only the main thread may set the default handler (`signal.signal`). While
    XLA occupies that thread, the process ends with the status 128 + number
    instead.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    self._is_ending = True
    os.kill(os.getpid(), number)
    time.sleep(MAIN_THREAD_SECONDS)

  def _handle(self, number: int, frame: object) -> None:
    """Python's handler; it does nothing, as the thread reads the socket."""
    if self._is_ending:
      die_by(number)


class Preemption(Callback):
  """Raises `Stop` after a step, or after a batch of an evaluation.

  A single process stops at the first such place after SIGTERM or Ctrl-C.
  Several processes stop only on SIGTERM, which jax's preemption service may
  receive in any of them. All stop at the first place that none of them has
  passed. A place is the number of checks so far, the same in all processes.

  Args:
    signals: Signals of this process; None if jax receives them, as in one of
      several processes, or if nothing does.
  """

  def __init__(self, signals: StopSignals | None = None):
    self._signals = signals
    self._phase, self._step, self._num_checks = "start", 0, 0
    if signals is not None:
      signals.action = self.action

  def on_phase(self, name: str) -> None:
    self._phase = name

  def on_step(self, step: int, batch: Mapping, metrics: Mapping) -> None:
    self._step = step

  def on_eval_batch(self) -> None:
    self._check()

  def check_stop(self, step: int) -> None:
    self._check()

  def stop_requested(self) -> bool:
    return self._signals is not None and self._signals.received is not None

  def action(self) -> str | None:
    """Returns what the run does after a first signal; None without a state."""
    if not self._step:
      return None
    what = {
      "evaluation": "the evaluation is given up (the same command does it"
      " again), the state is saved",
      "save": "the checkpoint is completed",
    }.get(self._phase, "the state is saved at the next step")
    return f"the run is at step {self._step:,}; {what}"

  def _check(self) -> None:
    from jax.experimental import multihost_utils

    self._num_checks += 1
    if self._signals is not None:
      if self._signals.received is not None:
        raise Stop(self._signals.received)
    elif multihost_utils.reached_preemption_sync_point(self._num_checks):
      raise Stop("SIGTERM")
