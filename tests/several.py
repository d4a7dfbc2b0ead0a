"""Several processes at once, as those of a run."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

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


def run(
  commands: list[list[str]], envs: list[dict[str, str]]
) -> list[tuple[int, str, str]]:
  """Runs all at once; returns the code, stdout and stderr of each."""
  processes = [
    subprocess.Popen(
      command,
      env=env,
      cwd=ROOT,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for command, env in zip(commands, envs, strict=True)
  ]
  try:
    texts = [p.communicate(timeout=900) for p in processes]
  finally:
    for p in processes:
      p.kill()
  return [(p.returncode, *t) for p, t in zip(processes, texts, strict=True)]


def outputs(commands: list[list[str]], env: dict[str, str]) -> list[str]:
  """Runs all at once, and returns what each prints; none may fail."""
  results = run(commands, [env] * len(commands))
  assert not any(code for code, *_ in results), results
  return [out for _, out, _ in results]


@contextlib.contextmanager
def program(code: str, *arguments: str, **variables: str) -> Iterator:
  """Starts a program, with pipes; in the end it is killed.

  Args:
    code: Python, which imports the package and what the tests share.
    arguments: Its command line.
    variables: Of its environment, beside this process's.
  """
  path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
  process = subprocess.Popen(
    [sys.executable, "-u", "-c", code, *arguments],
    env=env() | {"PYTHONPATH": path} | variables,
    cwd=ROOT,
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


def copied(folder: pathlib.Path, *names: str) -> pathlib.Path:
  """Copies files and folders of the checkout, by default what is packed."""
  packed = "vit_jax configs pyproject.toml setup.py README.md LICENSE"
  for name in names or packed.split():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if (ROOT / name).is_dir():
      ignored = shutil.ignore_patterns("__pycache__")
      shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    else:
      shutil.copy(ROOT / name, folder / name)
  return folder
