"""Notices that a run is to stop, and the point at which all its processes do.

A notice is a signal (SIGTERM, SIGINT), or a call of `Notices.notice` by the
program that trains. Every process calls `Notices.check` in the same places: in
each step and in each batch of an evaluation. So a number of calls names a place
in the run, and the processes agree on one that none of them has passed.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vit_jax.callbacks.base import Stop
from vit_jax.callbacks.phases import Phases
from vit_jax.distributed import exit_codes
from vit_jax.distributed.signals import ENDING

# Signals within so many seconds are one notice: terminals and launchers send
# theirs to a process and again to its group.
ONE_NOTICE = 1.0
SAY_SECONDS = 1.0  # A terminal that is held up does not hold up a notice.


class Place(NamedTuple):
  """Where a process is in its run.

  checks: Calls of `Notices.check` so far.
  step: Updates that it gave to the devices; 0: none since its start.
  """

  checks: int
  step: int


def agreed(places: Iterable[Place]) -> int | None:
  """Returns the call of `check` at which all processes stop.

  None where a process gave no update to the devices yet: so no update that all
  of them share can be complete, and all end at once and lose nothing.
  """
  places = list(places)
  if any(place.step == 0 for place in places):
    return None
  return 1 + max(place.checks for place in places)


class Notices:
  """Stops a run where its processes agree to.

  Args:
    phases: Where this process is; None: a new one.
    at_once: Ends the process where it has nothing to lose, given the reason;
      None: such a process raises `Stop` at its next check, too.

  Attributes:
    reason: Text of the notice that has come; None: none.
    checks: Calls of `check` so far.
    error: What ends this process, which may still be closing what it has
      opened; None: nothing yet.
  """

  def __init__(
    self,
    phases: Phases | None = None,
    at_once: Callable[[str], None] | None = None,
  ):
    self.phases = phases or Phases()
    self.reason: str | None = None
    self._at_once = at_once
    self._changed = threading.Condition()
    self.checks = 0
    self.error: BaseException | None = None
    self._stop_at: int | None = None
    self._is_held = False
    self._ask: Callable[[str], None] | None = self._alone

  def beat(self) -> None:
    """Records progress, and does what `check` does."""
    self.phases.beat()
    self.check()

  def check(self) -> None:
    """Raises `Stop` if all processes are to stop here.

    All call it in the same places. It waits while they agree on one.
    """
    with self._changed:
      self._changed.wait_for(lambda: not self._is_held)
      self.checks += 1
      is_here = self._stop_at is not None and self.checks >= self._stop_at
    if is_here:
      raise Stop(self.reason or "")

  def has_come(self) -> bool:
    """Whether this process knows of a notice; others may not yet."""
    return self.reason is not None

  def check_last(self) -> None:
    """Raises `Stop` in all processes if one of them knows of a notice.

    All call it, when there is no `check` to come.
    """
    from vit_jax.checkpointing import (
      retention,  # jax, which signals do not wait for
    )

    if retention.agreed(self.has_come()):
      raise Stop(self.reason or "another process")

  def ends(self, error: BaseException | None) -> bool:
    """Whether a run ends by `Stop`; notes the error."""
    self.error = error
    return isinstance(error, Stop)

  def notice(self, reason: str) -> None:
    """Asks all processes to stop; a later notice changes nothing.

    From any thread. A program that trains with several processes must `join`
    them first.

    Args:
      reason: What the run was stopped by, in words.
    """
    with self._changed:
      if self.reason is not None:
        return
      self.reason = reason
      ask = self._ask
    if ask is not None:
      ask(reason)

  def wait_to_join(self) -> None:
    """Lets notices wait until `join` says how the processes agree."""
    with self._changed:
      self._ask = None

  def join(self, ask: Callable[[str], None] | None = None) -> None:
    """Sets how the processes agree.

    Args:
      ask: Is given the reason of a notice; makes all processes `hold`, and then
        `release` with what they agreed on. None: there is but one process.
    """
    with self._changed:
      self._ask = ask or self._alone
      reason = self.reason
    if reason is not None:
      self._ask(reason)

  def hold(self, reason: str) -> Place:
    """Keeps the process from passing another check; returns where it is."""
    with self._changed:
      self.reason = self.reason or reason
      self._is_held = True
      return Place(self.checks, self.phases.now().step)

  def release(self, stop_at: int | None) -> None:
    """Lets the process go on to where all stop.

    Args:
      stop_at: As `agreed` returns it.
    """
    if stop_at is None and self._at_once is not None:
      self._at_once(self.reason or "")  # and no check is passed until it ends
      return
    with self._changed:
      self._stop_at = self.checks + 1 if stop_at is None else stop_at
      self._is_held = False
      self._changed.notify_all()

  def _alone(self, reason: str) -> None:
    self.release(agreed([self.hold(reason)]))


class Signals:
  """Hears SIGTERM and SIGINT in a thread, also while the main thread compiles.

  Python runs its handlers in the main thread, between two instructions. But a
  signal is written to a socket the moment that it arrives, and a thread reads.

  The first signal is answered in words at once and given to `Notices.notice`. A
  second ends the process at once: with status 143 for SIGTERM, by the signal
  itself for Ctrl-C, so that a loop of the shell ends, too. A signal that is
  ignored, as by a shell's background jobs, stays ignored.

  Attributes:
    notices: Told of the first signal. As long as it is None, a signal ends the
      process at once, with nothing to lose.
    last_acts: Done before a second signal ends the process; given its words.
  """

  def __init__(self, notices: Notices | None = None):
    self.notices = notices
    self.last_acts: Callable[[str], None] = lambda words: None
    self._read, self._write = socket.socketpair()
    self._write.setblocking(False)
    self._heard_at: float | None = None
    self.install()
    threading.Thread(target=self._listen, name="signals", daemon=True).start()

  def install(self) -> None:
    """Sets the handlers, in the main thread; again after a library that may set
    its own, as jax.distributed and libtpu do."""
    for number in ENDING:
      if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, _heard)
    signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

  def close(self) -> None:
    """Gives the signals back to Python."""
    signal.set_wakeup_fd(-1)
    for number in ENDING:
      if signal.getsignal(number) is _heard:
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
            self._hear(number)

  def _hear(self, number: int) -> None:
    name, now = signal.Signals(number).name, time.monotonic()
    notices = self.notices or Notices(
      at_once=lambda _: exit_codes.end(exit_codes.AGAIN)
    )
    if self._heard_at is None:
      self._heard_at = now
      said = f"{name}: {answer(notices.phases)}"
      saying = threading.Thread(target=exit_codes.say, args=[said], daemon=True)
      saying.start()
      saying.join(SAY_SECONDS)
      notices.notice(name)
    elif now - self._heard_at > ONE_NOTICE:
      words = f"{name} again: ended at once, nothing more is saved"
      end_by(
        number, lambda: exit_codes.say(words), lambda: self.last_acts(words)
      )


def _heard(number, frame) -> None:
  """Python's part: nothing. `Signals` has read the number."""


def answer(phases: Phases) -> str:
  """Returns what a notice in this phase does, in words."""
  name, _, step = phases.now()
  if step == 0:
    return (
      "received before the first step; nothing is lost, the run ends now with"
      f" exit code {exit_codes.AGAIN}"
    )
  act = {
    "evaluation": "the evaluation is given up (the same command does it again),"
    " the state is saved",
    "save": "the checkpoint is completed",
  }.get(name, "the state is saved at the next step")
  return (
    f"received at step {step:,}; {act}, then the run ends with exit code"
    f" {exit_codes.AGAIN}. A second signal ends it at once"
  )


def end_by(number: int, *acts: Callable[[], None]) -> None:
  """Ends this process as a signal would, after some acts, from any thread."""
  if number == signal.SIGINT:

    def kill() -> None:
      sys.stderr.flush()
      sys.stdout.flush()
      # signal.signal works in the main thread only, which may be in C++.
      ctypes.pythonapi.PyOS_setsig(number, ctypes.c_void_p(0))  # SIG_DFL
      os.kill(os.getpid(), number)

    exit_codes.end(128 + number, *acts, kill)
  exit_codes.end(128 + number, *acts)
