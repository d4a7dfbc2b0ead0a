"""Ends a command at once on Ctrl-C or SIGTERM, also while XLA compiles."""

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
ENDING = (signal.SIGINT, signal.SIGTERM)


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
