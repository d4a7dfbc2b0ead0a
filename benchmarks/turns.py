"""Processes that are measured in turns, each when it is asked."""

import os
import subprocess
from collections.abc import Sequence


def start(command: Sequence[str | os.PathLike]) -> subprocess.Popen:
  """Starts a process that answers each line with the times of a turn."""
  return subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )


def ask(server: subprocess.Popen) -> list[float]:
  """Returns the times of one more turn of a process."""
  server.stdin.write("\n")
  server.stdin.flush()
  return [float(word) for word in server.stdout.readline().split()]
