"""Processes of a run that hang, die or fail; what the others do then."""

import concurrent.futures
import pathlib
import re
import signal
import time

from faults import runs
from faults.trial import trial

# Seconds without progress. Several trials may share two cores, where a start,
# with its imports, and a compilation take a minute.
WATCHDOG_SECONDS = 120
HEARTBEAT_SECONDS = 10
OPTIONS = [
  f"--config.watchdog_seconds={WATCHDOG_SECONDS}",
  f"--config.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}",
]
PLACES = ("start", "compile", "input", "step", "evaluation", "save")
MARGIN = 15.0  # for a check every second, and a busy machine
ABORTED = -signal.SIGABRT  # 134 in a shell


@trial(
  "A process without progress ends within `watchdog_seconds` with code 124"
  " and the stacks of its threads.",
  seconds=60,
)
def hung(folder: pathlib.Path, seed: int) -> str:
  """The only process hangs in an evaluation; returns what came of it."""
  del seed  # nothing is random
  config, workdir = runs.write_config(folder), folder / "hung"
  limit = 20
  options = [f"--config.watchdog_seconds={limit}"]
  runs.whole(config, folder / "whole")  # fills the cache
  acts = {0: ["evaluation", "hang"]}
  started = runs.start(config, workdir, options, acts=acts)
  try:
    began = runs.wait_for(workdir, "acts  ", started)
    code = started[0].wait(2 * limit + MARGIN)
    seconds = time.monotonic() - began
  finally:
    runs.kill(started)
  log = runs.log(workdir).read_text(errors="replace")
  alarm = re.search(r"hung +phase (\w+), .* for ([\d,]+) s;", log)
  assert code == 124 and alarm, f"ended with {code}:\n{log}"
  assert alarm[1] == "evaluation"
  assert limit <= int(alarm[2]) < limit + MARGIN, alarm[0]
  stacks = (workdir / "stacks-0.txt").read_text()
  assert "Thread 0x" in stacks and "most recent call first" in stacks
  return f"124 after {seconds:.0f} s (limit {limit})"


@trial(
  "Where one of two processes is suspended (SIGSTOP), in any phase, jax ends"
  " the other within `heartbeat_timeout_seconds` with code 134, and names the"
  " one that is suspended.",
  seconds=150,
)
def stopped(folder: pathlib.Path, seed: int) -> str:
  """One of two processes is suspended, at each place in turn."""
  del seed
  config = runs.write_config(folder)
  runs.whole(config, folder / "whole", processes=2)  # fills the cache
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    results = list(
      pool.map(
        lambda place: _ends_the_other(config, folder, 1, place, "SIGSTOP"),
        PLACES,
      )
    )
  return "; ".join(results)


@trial(
  "Where one of two processes is killed or fails, jax ends the other within"
  " `heartbeat_timeout_seconds` with code 134.",
  seconds=100,
)
def died(folder: pathlib.Path, seed: int) -> str:
  """One of two processes is killed, or raises an error."""
  del seed
  config = runs.write_config(folder)
  cases = (
    (1, "step", "SIGKILL"),
    (0, "evaluation", "SIGKILL"),
    (1, "save", "fail"),
    (0, "input", "fail"),
  )
  return "; ".join(_ends_the_other(config, folder, *case) for case in cases)


def _ends_the_other(config, folder, who, place, act) -> str:
  workdir = folder / f"{act}_{who}_{place}"
  started = runs.start(config, workdir, OPTIONS, 2, acts={who: [place, act]})
  other = 1 - who
  try:
    runs.wait_for(workdir, "acts  ", started, process=who)
    began = time.monotonic()
    code = started[other].wait(60)
    seconds = time.monotonic() - began
    own_code = started[who].wait(60) if act != "SIGSTOP" else None
  finally:
    runs.kill(started)
  log = runs.log(workdir, other).read_text(errors="replace")
  own = {"SIGSTOP": None, "SIGKILL": -signal.SIGKILL, "fail": 1}[act]
  assert (own_code, code) == (own, ABORTED), f"{own_code}, {code}:\n{log}"
  if who == 1:  # process 0 has jax's service, and names the other
    assert re.search(r"stopped sending heartbeats\):\n1\n", log), log
  if act == "fail":
    assert "an error on purpose" in runs.output(workdir, who)
  assert seconds < HEARTBEAT_SECONDS + MARGIN, f"{seconds:.0f} s:\n{log}"
  return f"{act} of process {who} in {place}: 134 after {seconds:.1f} s"
