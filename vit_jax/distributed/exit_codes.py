"""Exit codes of `train`, which tell a scheduler whether to start it again.

docs/tasks/pod.md has them in a table, and a batch script that uses them. jax is
imported late, because signals are received before.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from vit_jax.writers.console import write

EXIT_ERROR = 1  # the same command would fail again
EXIT_RESTART = 75  # EX_TEMPFAIL of sysexits.h: nothing is lost, start it again
EXIT_HUNG = 124  # no progress within the limit; the code of timeout(1)

# jax aborts the other processes when process 0 ends. So it ends last, and the
# others can print their own errors.
LAST_SECONDS = 2.0
# jax checks for missing heartbeats at intervals.
HEARTBEAT_MARGIN_SECONDS = 10.0
CLOSING_SECONDS = 8.0  # A disk or pipe that hangs must not keep the process.


def end(code: int, *closing: Callable[[], None]) -> NoReturn:
  """Ends the process now, from any thread, whatever the others do.

  It does not wait for threads or for the other processes of the run, as the
  normal exit of Python and jax does.

  Args:
    code: Exit status.
    closing: Functions to call before, for `CLOSING_SECONDS` in all.
  """

  def close() -> None:
    for act in (*closing, sys.stdout.flush, sys.stderr.flush):
      try:
        act()
      except Exception as e:  # such as a full disk
        write(sys.stderr, f"{type(e).__name__}: {e}\n")

  closer = threading.Thread(target=close, daemon=True)
  closer.start()
  closer.join(CLOSING_SECONDS)
  os._exit(code)


def refuse(text: str) -> NoReturn:
  """Ends a command with an error message, no stack, and `EXIT_ERROR`."""
  _end_if_joined(lambda: say(text))
  sys.exit(text)


def is_late(error: BaseException) -> bool:
  """Whether an error says that other processes did not come in time."""
  text = str(error)
  is_of_jax = isinstance(error, RuntimeError)  # a bucket's is a ValueError
  return (is_of_jax and "DEADLINE_EXCEEDED" in text) or (
    "Gloo context initialization failed" in text
  )


def end_if_joined(
  error: BaseException, heartbeat_timeout_seconds: float
) -> None:
  """Ends one of several processes after an unexpected error, with its stack.

  Otherwise jax would wait at the exit for the others, which may wait for this
  process. A single process returns from here, to raise the error.

  A collective fails if another process has died. Then this process waits until
  jax notices the missing heartbeats, aborts it, and names the other process.
  If the others came late, it ends with `EXIT_RESTART`, without a stack, and
  waits as long for the others to fail in the same way. If jax has no device, it
  returns, and `__main__` words the error.
  """
  import jax

  if str(error).startswith("Unable to initialize backend"):
    return
  if is_late(error) and jax.distributed.is_initialized():
    reason = str(error).partition("\n")[0][:200]
    say(
      f"the processes of the run did not meet in time ({reason}); start the"
      f" same command again on every host (exit code {EXIT_RESTART})"
    )
    _end_together(heartbeat_timeout_seconds + HEARTBEAT_MARGIN_SECONDS)

  def report() -> None:
    traceback.print_exception(error)
    sys.stderr.flush()
    # On CPUs a collective that fails as it is dispatched raises ValueError.
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
      time.sleep(heartbeat_timeout_seconds + HEARTBEAT_MARGIN_SECONDS)

  _end_if_joined(report)


def restart(text: str) -> NoReturn:
  """Ends a stopped run with `EXIT_RESTART`, in all processes together."""
  import jax

  if jax.process_index() == 0:
    say(f"{text} (exit code {EXIT_RESTART})")
  _end_together()


def _end_together(most_seconds: float | None = None) -> NoReturn:
  """Ends with `EXIT_RESTART` when the other processes end, too."""
  import jax

  def leave() -> None:
    with contextlib.suppress(Exception):  # another process did not come
      jax.distributed.shutdown()  # waits for the others

  if jax.distributed.is_initialized():
    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(most_seconds)
  end(EXIT_RESTART)


def say(text: str) -> None:
  """Prints lines to stderr, from any thread, starting on a new line."""
  # One write, so that lines of several processes do not mix.
  is_terminal = not sys.stderr.closed and sys.stderr.isatty()
  write(sys.stderr, f"\n{text}\n" if is_terminal else f"{text}\n")


def _end_if_joined(report: Callable[[], None]) -> None:
  import jax

  if not jax.distributed.is_initialized():
    return
  report()
  if jax.process_index() == 0:
    time.sleep(LAST_SECONDS)
  end(EXIT_ERROR)
