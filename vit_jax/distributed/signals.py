"""Ends a command at once on Ctrl-C or SIGTERM, also while XLA compiles."""

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
ENDING = (signal.SIGINT, signal.SIGTERM)


def end_at_once(last_words: Callable[[], str] = lambda: "") -> None:
  """Makes a signal end the process after one line on stderr, without a stack.

  The exit status is 143 for SIGTERM; Ctrl-C ends the process by its signal, as
  Python does (130 in a shell), so that a loop of the shell ends, too. A signal
  that is ignored, as under nohup, stays ignored.

  Call it in the main thread, and again after a library that installs its own
  handlers: libtpu prints a stack.

  Args:
    last_words: Text of the line after the signal's name; the function may
      print.
  """

  def end(number, _):
    sys.stdout.flush()
    text = last_words()
    name = signal.Signals(number).name
    print(f"{name}: ended{text and '; '}{text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if number == signal.SIGINT:
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
    # Nothing is cleaned up: a compiler in another thread cannot be stopped.
    os._exit(128 + number)

  for number in ENDING:
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, end)


@contextlib.contextmanager
def held() -> Iterator[None]:
  """Blocks the signals; inside, a library may replace the handlers."""
  before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_thread(work: Callable[[], T]) -> T:
  """Returns what `work` returns, or raises its error; runs it in a thread.

  Python calls handlers in its main thread, between two instructions, and so not
  while a compiler has that thread. Waiting for another thread is interrupted.
  """
  outcome = concurrent.futures.Future()

  def run():
    try:
      outcome.set_result(work())
    except BaseException as e:
      outcome.set_exception(e)

  threading.Thread(target=run, daemon=True).start()
  return outcome.result()
