"""The machine on which a number was measured."""

import os
import pathlib
import platform


def machine() -> str:
  """Returns the processor of this machine, and its number of cores."""
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [l.split(":")[1].strip() for l in lines if l.startswith("model name")]
  name = names[0] if names else platform.processor()
  return f"{name}, {os.cpu_count()} cores"
