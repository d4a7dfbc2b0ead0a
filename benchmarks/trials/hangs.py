"""Processes of a run that stop, die or fail; what the others do then."""

import concurrent.futures
import os
import pathlib
import re
import signal
import time

from trials import runs
from trials.trial import Trial
from vit_jax.distributed.hub import QUIET_SECONDS

# Seconds without progress. Several trials may share two cores, where a start,
# with its imports, and a compilation take a minute.
LIMITS = {
  "start": 120.0,
  "compile": 120.0,
  "step": 20.0,
  "evaluation": 20.0,
  "save": 20.0,
}
WORDS = [f"--config.limits.{k}_seconds={v}" for k, v in LIMITS.items()]
PLACES = ("start", "compile", "input", "step", "evaluation", "save")
MARGIN = 15.0  # for a look a second, and a machine that does other things, too


def stopped(folder: pathlib.Path, seed: int) -> str:
  del seed  # nothing is random
  config = runs.write_config(folder)
  runs.whole(config, folder / "whole", processes=2)  # fills the cache
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    told = list(pool.map(lambda p: _stopped_in(config, folder, p), PLACES))
  return "; ".join(told)


def _stopped_in(config, folder, place) -> str:
  """One of two processes is stopped at a place; returns what came of it."""
  workdir = folder / f"stopped_{place}"
  started = runs.start(config, workdir, WORDS, 2, acts={1: [place, "SIGSTOP"]})
  try:
    began = _wait_for(workdir, 1, "acts  ", started)
    code = started[0].wait(sum(LIMITS.values()))
    seconds = time.monotonic() - began
  finally:
    runs.kill(started)
  said = runs.log(workdir).read_text(errors="replace")
  alarm = re.search(r"hung +phase (\w+), .* for ([\d,]+) s;.*\n(.*)", said)
  assert code == 124 and alarm, f"{place}: ended with {code}:\n{said}"
  name, late, behind = alarm[1], int(alarm[2]), alarm[3]
  pid = started[1].pid
  assert re.match(rf"process 1 \(host .*, pid {pid}\) is behind: ", behind), (
    said
  )
  limit = LIMITS["step" if name == "input" else name]
  # After QUIET_SECONDS it ends in any case: jax would abort it a little later.
  limit = min(limit, QUIET_SECONDS)
  assert limit <= late < limit + MARGIN, f"{place}: {alarm[0]}"
  stacks = (workdir / "stacks-0.txt").read_text()
  assert "Thread 0x" in stacks and "most recent call first" in stacks
  return (
    f"{place}: 124 after {seconds:.0f} s, {late} of them without progress in"
    f" {name} (limit {limit:g})"
  )


def died(folder: pathlib.Path, seed: int) -> str:
  del seed
  config = runs.write_config(folder)
  told = []
  for who, place, act in (
    (1, "step", "SIGKILL"),
    (0, "evaluation", "SIGKILL"),
    (1, "save", "fail"),
    (0, "input", "fail"),
  ):
    workdir = folder / f"{act}_{who}"
    started = runs.start(config, workdir, (), 2, acts={who: [place, act]})
    other = 1 - who
    try:
      _wait_for(workdir, who, "acts  ", started)
      began = time.monotonic()
      codes = [p.wait(60) for p in started]
      seconds = time.monotonic() - began
    finally:
      runs.kill(started)
    said = runs.said(workdir, other)
    ends = (1, 1) if act == "fail" else (-signal.SIGKILL, 76)
    assert (codes[who], codes[other]) == ends, f"{codes}\n{said}"
    assert re.search(
      rf"lost +process {who} \(.*, pid {started[who].pid}\)", said
    )
    assert "stopped " not in said and "an error on purpose" in said * (
      act == "fail"
    ) + "an error on purpose" * (act != "fail")
    assert seconds < 15, f"it took {seconds:.0f} s:\n{said}"
    told.append(
      f"{act} of process {who} in {place}: {codes[other]} after {seconds:.1f} s"
    )
  return "; ".join(told)


def slow_compile(folder: pathlib.Path, seed: int) -> str:
  """One process compiles for longer than the limit of the other's phase."""
  del seed
  config, workdir = runs.write_config(folder), folder / "slow"
  words = ["--config.limits.step_seconds=20", "--config.total_steps=10"]
  acts = {1: ["compile", "slow"]}
  codes = runs.finish(runs.start(config, workdir, words, 2, acts=acts), 200)
  assert codes == [0, 0], f"{codes}\n{runs.said(workdir)}"
  words = ["--config.limits.step_seconds=8", "--config.total_steps=4000"]
  workdir = folder / "continued"
  started = runs.start(config, workdir, words)
  try:
    _wait_for(workdir, 0, "step 5/", started)
    os.kill(started[0].pid, signal.SIGSTOP)
    time.sleep(16.0)
    os.kill(started[0].pid, signal.SIGCONT)
    time.sleep(4.0)
    assert started[0].poll() is None, runs.said(workdir)
  finally:
    runs.kill(started)
  return (
    "a compilation that took 35 s longer than the other's, whose limit is 20 s;"
    " a process stopped for 16 s and continued, whose limit is 8 s"
  )


def _wait_for(workdir, process, words, started, seconds=240.0) -> float:
  """Waits until a process has said something; returns when, monotonic."""
  end = time.monotonic() + seconds
  path = runs.log(workdir, process)
  while words not in path.read_text(errors="replace"):
    assert time.monotonic() < end, f"no {words!r}:\n{runs.said(workdir)}"
    if all(p.poll() is not None for p in started):
      assert words in path.read_text(errors="replace"), runs.said(workdir)
    time.sleep(0.05)
  return time.monotonic()


TRIALS = (
  Trial(
    "hangs.stopped",
    "Where one of two processes is stopped (SIGSTOP), in any phase, the other"
    " ends within the limit of its phase with code 124, the stacks of its"
    " threads, and the name of the one that is behind.",
    stopped,
    "tests/callbacks/test_watchdog.py",
    seconds=230,
  ),
  Trial(
    "hangs.died",
    "Where one of two processes is killed or fails, the other ends within 15 s"
    " with code 76, or 1 after an error, and says which one, and how.",
    died,
    "tests/distributed/test_peers.py",
    seconds=80,
  ),
  Trial(
    "hangs.no_false_alarm",
    "A slow first compilation of one process raises no alarm in any, nor does"
    " a process that was itself stopped and goes on.",
    slow_compile,
    "tests/callbacks/test_watchdog.py",
    seconds=80,
  ),
)
