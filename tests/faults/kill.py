"""kill -9 at random instants; then the bits of a run that was never killed."""

import collections
import contextlib
import pathlib
import random
import subprocess
import time

from faults import runs
from faults.trial import trial

KILLS_A_RUN = 5
# What a process says when it comes to a phase, the newest first.
SIGNS = (
  ("after the last step", "\nstep 60/60"),
  ("training", "\nstart  "),
  ("restore and compilation", "\nresumes  "),
  ("initialisation and compilation", "\nfiles  "),
)


def _killed(folder: pathlib.Path, seed: int, processes: int, kills: int) -> str:
  """Runs until enough kills have struck; returns the figure."""
  rng = random.Random(seed)
  config, want = runs.write_config(folder), folder / "want"
  runs.whole(config, want, processes=processes)
  # The second start reads its programs from the cache, as most starts here.
  seconds = runs.whole(config, folder / "again", processes=processes)
  numbers = runs.assert_same(folder / "again", want)
  struck, where, done = 0, collections.Counter(), 0
  while struck < kills:
    workdir, in_a_row = folder / f"run{done}", 0
    while True:
      since = time.monotonic()
      started = runs.start(config, workdir, processes=processes)
      last = struck >= kills or in_a_row >= KILLS_A_RUN
      if last:
        codes = runs.finish(started, 300)
        assert not any(codes), f"ended with {codes}:\n{runs.output(workdir)}"
        break
      began = runs.log(workdir).stat().st_size
      if rng.random() < 0.6:  # else most would be killed while they import
        _wait_for(workdir, began, "\nfiles ", started, 4 * seconds)
        time.sleep(rng.uniform(0.0, seconds / 2))
      else:
        time.sleep(rng.uniform(0.0, seconds))
      if all(p.poll() is not None for p in started):
        codes = [p.returncode for p in started]
        assert not any(codes), f"ended with {codes}:\n{runs.output(workdir)}"
        seconds = min(seconds, time.monotonic() - since)
        break  # it was done before the kill
      where[_phase(workdir, began)] += 1
      struck, in_a_row = struck + 1, in_a_row + 1
      if processes > 1 and rng.random() < 0.5:  # one dies, the others by that
        runs.kill([rng.choice(started)])
        with contextlib.suppress(subprocess.TimeoutExpired):
          for p in started:  # it waits if the other never came
            p.wait(10)
      runs.kill(started)
    runs.assert_same(workdir, want)
    done += 1
  phases = ", ".join(f"{n} in {phase}" for phase, n in where.most_common())
  return (
    f"{struck} kills in {done} runs ({phases}): {numbers:,} numbers, all rows"
    f" and all events equal in bits; seed {seed}"
  )


def _wait_for(workdir, began, text, started, seconds):
  """Waits until a process has printed a text, or is gone."""
  end = time.monotonic() + seconds
  while time.monotonic() < end and all(p.poll() is None for p in started):
    if text in _output(workdir, began):
      return
    time.sleep(0.05)


def _output(workdir, began) -> str:
  return runs.log(workdir).read_bytes()[began:].decode(errors="replace")


def _phase(workdir, began) -> str:
  text = _output(workdir, began)
  for phase, sign in SIGNS:
    if sign in text:
      return phase
  return "imports and checks"


@trial(
  "A run that is killed (kill -9) at any instants goes on by the same command"
  " and ends in the bits of a run that was never killed: parameters, optimizer,"
  " average, and every row of metrics.jsonl and TensorBoard.",
  seconds=450,
  parts=3,
)
def one_process(folder: pathlib.Path, seed: int) -> str:
  return _killed(folder, seed, processes=1, kills=30)


@trial(
  "The same with two processes, of which one or both are killed.", seconds=450
)
def two_processes(folder: pathlib.Path, seed: int) -> str:
  return _killed(folder, seed, processes=2, kills=10)
