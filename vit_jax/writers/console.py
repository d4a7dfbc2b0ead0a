"""Text for people, also if the disk is full or the reader is gone."""

import contextlib
import errno
import io
import os
import sys


def write(stream: io.TextIOBase, text: str) -> None:
  """Writes text for people; the run goes on if nobody can read it.

  The connection that started a run may be closed, which closes the pipe or
  terminal behind stderr. Then nothing more is written there.
  """
  try:
    stream.write(text)
    stream.flush()
  except OSError as e:
    if e.errno in (errno.EPIPE, errno.EIO):
      with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
  except ValueError:  # the stream was closed
    pass


def note(text: str | None) -> None:
  """Prints lines to stderr, above the bar if there is one; only in process 0.

  Args:
    text: The lines; nothing is printed for None or "".
  """
  # Commands that only read runs import this module, not these.
  import jax
  from tqdm import tqdm

  is_first = not jax.distributed.is_initialized() or jax.process_index() == 0
  if text and is_first:
    with tqdm.external_write_mode(file=sys.stderr):
      write(sys.stderr, f"{text}\n")
