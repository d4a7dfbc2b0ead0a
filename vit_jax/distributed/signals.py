"""What Ctrl-C and SIGTERM do to a command or a run, also while XLA compiles.

This module imports no jax: `commands/train.py` receives signals before.
"""

import concurrent.futures
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from vit_jax.distributed import exit_codes

T = TypeVar("T")
ENDING = (signal.SIGINT, signal.SIGTERM)
# Two signals within this time count as one, because terminals and launchers
# signal both a process and its group.
REPEAT_SECONDS = 1.0
# Seconds after which the main thread is taken to be in C++.
MAIN_THREAD_SECONDS = 1.0


def end_at_once(
  last_line: Callable[[], str] = lambda: "",
  numbers: Iterable[signal.Signals] = ENDING,
) -> None:
  """Makes a signal end the process after one line on stderr, without a stack.

  The exit status is 143 for SIGTERM. Ctrl-C ends the process by its signal, as
  Python does (130 in a shell), so that a shell loop also ends. A signal that is
  ignored, as under nohup, stays ignored.

  Call it in the main thread, and again after a library that installs its own
  handlers; libtpu's would print a stack.

  Args:
    last_line: Returns the rest of the line after the signal's name; it may
      print.
    numbers: Signals that end the process.
  """

  def end(number, _):
    sys.stdout.flush()
    text = last_line()
    name = signal.Signals(number).name
    print(f"{name}: ended{text and '; '}{text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if number == signal.SIGINT:
      die_by(number)
    # Nothing is cleaned up: a compiler in another thread cannot be stopped.
    os._exit(128 + number)

  set_handlers(numbers, end)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
  """Blocks the signals while a library replaces the handlers."""
  before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_thread(work: Callable[[], T]) -> T:
  """Runs `work` in a thread, and returns its result or raises its error.

  Python calls signal handlers in its main thread, between two instructions, so
  not while a compiler runs there. Waiting for another thread can be
  interrupted.
  """
  outcome = concurrent.futures.Future()

  def run():
    try:
      outcome.set_result(work())
    except BaseException as e:
      outcome.set_exception(e)

  threading.Thread(target=run, daemon=True).start()
  return outcome.result()


def set_handlers(numbers: Iterable[int], handler: Callable) -> None:
  """Sets the handler of signals, except those that are ignored."""
  for number in numbers:
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, handler)


def die_by(number: int) -> None:
  """Ends this process by a signal, in the main thread."""
  signal.signal(number, signal.SIG_DFL)
  os.kill(os.getpid(), number)


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
