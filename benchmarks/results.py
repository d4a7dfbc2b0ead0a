"""What the comparisons share: files of results, photographs, other processes.

A file of results has a line of JSON for each run. A run that has a line is not
repeated.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from machine import machine

ROOT = pathlib.Path(__file__).resolve().parents[1]


def read(file: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of a file of results; [] if there is none."""
  text = file.read_text() if file.exists() else ""
  return [json.loads(line) for line in text.splitlines()]


def add(file: pathlib.Path, row: dict[str, Any]) -> None:
  """Adds a row, with the machine."""
  with file.open("a") as opened:
    opened.write(json.dumps({**row, "machine": machine()}) + "\n")


def photographs(cifar: pathlib.Path, part: str) -> list[tuple[str, bytes]]:
  """Returns the class and the JPEG file of each photograph.

  Args:
    cifar: Folder with cifar10_train.npz (20,000 photographs of CIFAR-10) and
      cifar10_test.npz (5,000), which have the bytes of the files.
    part: "train" or "test".
  """
  data = np.load(cifar / f"cifar10_{part}.npz")
  jpeg, ends, names = data["jpeg"], data["offsets"], data["names"]
  return [
    (str(names[label]), jpeg[ends[i] : ends[i + 1]].tobytes())
    for i, label in enumerate(data["label"])
  ]


def write(path: pathlib.Path, file: bytes) -> None:
  """Writes a file, and the folders above it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(file)


def call(command: Sequence[str | os.PathLike]) -> tuple[str, float]:
  """Runs a command of this Python; returns its output and its CPU minutes.

  The minutes are user and system time of the process and its children, which
  other programs on the machine disturb less than the clock.
  """
  paths = (ROOT, ROOT / "examples", os.environ.get("PYTHONPATH", ""))
  path = os.pathsep.join(map(str, paths))
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    [sys.executable, *map(str, command)],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONPATH": path},
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return done.stdout, seconds / 60


def train(config: str, workdir: pathlib.Path, *flags: str) -> float:
  """Trains as a user does; returns CPU minutes."""
  command = ["-m", "vit_jax", "train", f"--config={config}"]
  return call([*command, f"--workdir={workdir}", *flags])[1]


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of a run's metrics."""
  return read(workdir / "metrics.jsonl")


def origin(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns versions and commit with which a run was trained."""
  about = json.loads((workdir / "metadata.json").read_text())
  return {key: about[key] for key in ("versions", "commit")}
