"""Several processes at once, as those of a run."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# As the installed script: the current folder is not on sys.path.
_MAIN = "from vit_jax.__main__ import main; main()"
SCRIPT = (sys.executable, "-P", "-c", _MAIN)


def env(devices: int = 1) -> dict[str, str]:
  """Returns this process's environment, with so many devices.

  XLA optimises as little, or as much, as here (conftest.py).
  """
  flags = os.environ["XLA_FLAGS"].split()
  flags = [f for f in flags if "device_count" not in f]
  if devices > 1:
    flags.append(f"--xla_force_host_platform_device_count={devices}")
  return os.environ | {"XLA_FLAGS": " ".join(flags)}


def address() -> str:
  """Returns a free one of this machine, where processes can meet."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{s.getsockname()[1]}"


def outputs(commands: list[list[str]], env: dict[str, str]) -> list[str]:
  """Runs all at once, and returns what each prints; none may fail."""
  processes = [
    subprocess.Popen(
      command,
      env=env,
      cwd=ROOT,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for command in commands
  ]
  try:
    results = [p.communicate(timeout=400) for p in processes]
  finally:
    for p in processes:
      p.kill()
  assert not any(p.returncode for p in processes), results
  return [out for out, _ in results]
