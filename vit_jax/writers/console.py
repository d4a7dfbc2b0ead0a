"""Text for people, where the disk may be full or the reader gone."""

import contextlib
import errno
import io
import os


def write(stream: io.TextIOBase, text: str) -> None:
  """Writes text for people to read; a run goes on where nobody can read it.

  So it does after the connection that started it was closed, which closes the
  pipe or terminal behind stderr: then nothing more is written there.
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
  except ValueError:  # it was closed
    pass
