"""Exit codes of `train`, by which a scheduler knows whether to start it again.

docs/pods.md has them in a table, and a batch script that heeds them.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from vit_jax.config.output import write

ERROR = 1  # here or in another process; the same command would end so again
AGAIN = 75  # EX_TEMPFAIL of sysexits.h: nothing is lost; start it again
PEER = 76  # another process of the run ended, or cannot be reached
HUNG = 124  # no progress within a limit; that of timeout(1)

LAST_SECONDS = 2.0  # for the others to say what they have to
CLOSING_SECONDS = 8.0  # A disk or pipe that hangs must not keep the process.


def end(code: int, *closing: Callable[[], None]) -> NoReturn:
  """Ends the process now, from any thread, whatever the others do.

  Nothing is waited for that Python or jax would wait for at their end: threads
  that score, and the other processes of the run.

  Args:
    code: Exit status.
    closing: What is done before, for `CLOSING_SECONDS` in all.
  """

  def close() -> None:
    for act in (*closing, sys.stdout.flush, sys.stderr.flush):
      try:
        act()
      except Exception as e:  # e.g. the disk is full: it ends all the same
        write(sys.stderr, f"{type(e).__name__}: {e}\n")

  closer = threading.Thread(target=close, daemon=True)
  closer.start()
  closer.join(CLOSING_SECONDS)
  os._exit(code)


def refuse(text: str) -> NoReturn:
  """Ends a command with words and `ERROR`; one of several processes at once.

  jax would wait at its end for the others, which may wait for this process.
  """
  import jax

  if jax.distributed.is_initialized():
    say(text)
    if jax.process_index() == 0:  # jax ends the others when it is gone
      time.sleep(LAST_SECONDS)
    end(ERROR)
  sys.exit(text)


def say(text: str) -> None:
  """Prints lines to stderr, on a line of their own, from any thread."""
  # One write, so that lines of several processes do not mix.
  is_terminal = not sys.stderr.closed and sys.stderr.isatty()
  write(sys.stderr, f"\n{text}\n" if is_terminal else f"{text}\n")
