"""Damaged and hostile files for every reader of files that others wrote.

`mutated` changes small valid files: at random, by what the format says, and by
Hypothesis. `attacks` are files that were thought of. One child process reads
them all within limits of memory and time, and writes what came of each:

  python tests/hostile.py FOLDER OUT.json --seed=1 --count=npz=100,timm=50

A reader either returns, or raises ValueError, FileNotFoundError or ConfigError,
in words that say what was got or expected, and are not long.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hostile_mutations as mutations
from hostile_attacks import attacks
from hostile_readers import READERS

MIB = 2**20
CONSTANT = 256 * MIB  # of memory, besides twice the files
SECONDS = 5.0  # of all CPUs, a file
MAX_WORDS = 5000  # characters of a message
HYPOTHESIS_SHARE = 0.25


class Outcome(NamedTuple):
  """What came of one file; `fault` is "" where it was read or refused well."""

  is_read: bool
  fault: str
  seconds: float
  memory: int


class TooSlow(BaseException):
  pass


def outcome(
  read: Callable[[], Any], num_bytes: int, folder: pathlib.Path
) -> Outcome:
  """Reads, and returns what came of it.

  Args:
    read: Reads the files.
    num_bytes: Their size.
    folder: Where they are, which a message must say.
  """
  before, start = _reset_peak(), time.process_time()
  is_read, fault = False, ""
  signal.setitimer(signal.ITIMER_PROF, SECONDS)
  try:
    read()
    is_read = True
  except TooSlow:
    fault = f"more than {SECONDS} s"
  except BaseException as e:  # PanicException of Rust is no Exception
    if isinstance(e, KeyboardInterrupt):
      raise
    fault = _fault(e, folder)
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
  seconds, memory = time.process_time() - start, max(0, _peak() - before)
  if memory > 2 * num_bytes + CONSTANT and not fault:
    fault = f"{memory // MIB} MiB for {num_bytes:,} bytes"
  return Outcome(is_read, fault, seconds, memory)


def _fault(error: BaseException, folder: pathlib.Path) -> str:
  """Returns what is wrong with an error; "": it is clean."""
  from vit_jax.checkpointing.checkpointer import DamagedError
  from vit_jax.config import ConfigError

  text = str(error)
  clean = (ValueError, FileNotFoundError, ConfigError, DamagedError)
  if type(error) in clean:
    is_clear = re.search(r"\b(got|expected|no such|is damaged)\b", text)
    # A config's faults name its options: who reads it says of which file.
    is_told = str(folder) in text or isinstance(error, ConfigError)
    if is_clear and is_told and len(text) <= MAX_WORDS:
      return ""
  frames = traceback.extract_tb(error.__traceback__)
  places = [f"{pathlib.Path(f.filename).name}:{f.lineno}" for f in frames[-5:]]
  return f"{type(error).__name__}: {text[:300]} ({' '.join(places)})"


def _peak() -> int:
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmHWM:"):
      return int(line.split()[1]) * 1024
  raise AssertionError("no VmHWM")


def _reset_peak() -> int:
  """Returns the memory in use; `_peak` counts from here on."""
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  return _peak()


def _size(path: pathlib.Path) -> int:
  files = path.rglob("*") if path.is_dir() else [path]
  return sum(f.lstat().st_size for f in files if f.is_file())


def mutated(
  folder: pathlib.Path, name: str, count: int, seed: int
) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields (what was done, path) of mutants of a reader's valid files.

  Each is gone when the next one is asked for.
  """
  reader = READERS[name]
  sample = folder / f"{name}.sample"
  if not sample.exists():
    sample.mkdir()
    reader.build(sample)
  targets = [f for f in sorted(sample.rglob("*")) if f.is_file()]
  targets = [f for f in targets if reader.is_target(f)]
  assert targets, f"{name}: nothing to change"
  num_hypothesis = round(HYPOTHESIS_SHARE * count)
  edits = mutations.drawn(num_hypothesis, seed) if num_hypothesis else []
  work = folder / f"{name}.work"
  for i in range(count):
    rng = random.Random(f"{seed} {name} {i}")
    target = rng.choice(targets)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(sample, work, symlinks=True)
    changed = work / target.relative_to(sample)
    if i < len(edits):
      data, what = mutations.edited(target.read_bytes(), target, edits[i])
    else:
      data, what = mutations.changed(target, rng)
    changed.write_bytes(data)
    yield f"{target.relative_to(sample)}: {what}", reader.path(work)
  shutil.rmtree(work, ignore_errors=True)


def _read_all(
  folder: pathlib.Path, counts: dict[str, int], seed: int, skip: int, note
) -> dict[str, Any]:
  """Reads all mutants, or attacks where the count is 0, and sums up."""
  found: dict[str, Any] = {"readers": {}, "faults": []}
  number = 0
  for name, count in counts.items():
    of = collections.Counter()
    most = {"seconds": 0.0, "memory": 0}
    if count:
      cases = mutated(folder, name, count, seed)
    else:
      cases = attacks(folder, name)
    for i, (what, path) in enumerate(cases):
      number += 1
      if number <= skip:
        continue
      rngs = [random.Random(f"{seed} {name} {i}")]
      rngs = rngs if count else [_Always(0.0), _Always(0.999)]
      note(number, f"{name}: {what}")
      read = lambda p, of=READERS[name], r=rngs: [of.read(p, x) for x in r]
      done = outcome(lambda: read(path), _size(path), folder)  # noqa: B023
      of["read" if done.is_read else "refused"] += 1
      most["seconds"] = max(most["seconds"], done.seconds)
      most["memory"] = max(most["memory"], done.memory)
      if done.is_read and what.endswith("a link out"):
        done = done._replace(fault="was read")
      if done.fault:
        found["faults"].append(f"{name}: {what}: {done.fault}")
    found["readers"][name] = {**of, **most}
  return found


def child(argv: list[str] | None = None) -> None:
  """Reads in this process, whose memory is limited, and writes JSON."""
  parser = argparse.ArgumentParser()
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("out", type=pathlib.Path)
  parser.add_argument("--seed", type=int, required=True)
  parser.add_argument("--counts", type=json.loads, required=True)
  parser.add_argument("--skip", type=int, default=0)
  args = parser.parse_args(argv)

  def too_slow(*_):
    raise TooSlow

  signal.signal(signal.SIGPROF, too_slow)
  args.folder.mkdir(parents=True, exist_ok=True)
  for name in args.counts:  # imports, compilations and threads come first
    list(mutated(args.folder, name, 1, -1))
    reader = READERS[name]
    sample = reader.path(args.folder / f"{name}.sample")
    for chance in (0.0, 0.999):
      is_refused = False
      try:
        reader.read(sample, _Always(chance))
      except ValueError:
        is_refused = True
        if not reader.is_refused:
          raise
      assert is_refused == reader.is_refused, name
  used = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
  limit = used * resource.getpagesize() + 4 * CONSTANT
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  current = args.out.with_suffix(".now")
  note = lambda number, what: current.write_text(f"{number}\n{what}")
  found = _read_all(args.folder, args.counts, args.seed, args.skip, note)
  args.out.write_text(json.dumps(found))


class _Always(random.Random):
  """A generator whose every number is the same."""

  def __new__(cls, value):
    return super().__new__(cls)

  def __init__(self, value: float):
    super().__init__(0)
    self._value = value

  def random(self) -> float:
    return self._value


def run(
  folder: pathlib.Path, counts: dict[str, int], seed: int, timeout: float
) -> dict[str, Any]:
  """Returns what came of all files, read in child processes.

  A child that dies (a crash, or too much memory) is followed by another one,
  which goes on behind the file that killed it.

  Args:
    folder: For the files.
    counts: Reader -> number of mutants; 0: its attacks instead.
    seed: Of the mutations.
    timeout: Seconds for each child.

  Returns:
    `readers`: per reader numbers read, refused, and the largest seconds and
    memory; `faults`: a line for each.
  """
  out, skip = folder / "out.json", 0
  faults: list[str] = []
  for _ in range(5):
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(folder), str(out)]
    command += [f"--seed={seed}", f"--skip={skip}"]
    command += [f"--counts={json.dumps(counts)}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    root = pathlib.Path(__file__).parents[1]
    paths = [str(root), str(root / "tests"), str(root / "tests/weights")]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    try:
      done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=timeout
      )
      end = f"the process ended with {done.returncode}: {done.stderr[-1500:]}"
    except subprocess.TimeoutExpired:
      end = f"the process took more than {timeout} s"
    if out.exists():
      found = json.loads(out.read_text())
      found["faults"] = faults + found["faults"]
      return found
    current = out.with_suffix(".now")
    if not current.exists():
      raise AssertionError(end)
    number, what = current.read_text().split("\n", 1)
    skip = int(number)
    faults.append(f"{what}: {end}")
  return {"readers": {}, "faults": faults}


if __name__ == "__main__":
  child()
