"""SIGTERM and Ctrl-C wherever a run is; then the bits of one left alone."""

import pathlib
import random
import re
import signal
import time

from faults import runs
from faults.trial import trial

STEPS = 60
BITS = " The same command then ends in the bits of a run that was left alone."
STEPS_OF_TWO = 400  # jax looks for a signal once a second
# In this order a run comes to all of them before it is done.
PLACES = (
  "start",
  "compile",
  "step",
  "restore",
  "evaluation",
  "scoring",
  "save",
  "input",
)


@trial(
  "After SIGTERM or Ctrl-C, wherever a run is, it saves within a step and"
  " ends with code 75; no step is done twice." + BITS,
  seconds=200,
)
def one_process(folder: pathlib.Path, seed: int) -> str:
  rng = random.Random(seed)
  config, want = runs.write_config(folder, STEPS), folder / "want"
  seconds = runs.whole(config, want)
  workdir, results, step = folder / "run", [], 0
  for place in PLACES:
    name = rng.choice(["SIGTERM", "SIGINT"])
    started = runs.start(config, workdir, acts={0: [place, name]})
    codes = runs.finish(started, 200)
    step, lead = stops(workdir, codes, step, name)
    results.append(f"{place} {name} step {step} (+{lead})")
  for _ in range(3):  # at any instant, the imports included
    started = runs.start(config, workdir)
    time.sleep(rng.uniform(0.3, seconds))
    began = runs.log(workdir).stat().st_size
    started[0].send_signal(signal.SIGTERM)
    codes = runs.finish(started, 200)
    output = runs.log(workdir).read_text(errors="replace")[began:]
    if codes == [0]:
      break
    # Python itself takes a moment before it runs a line of ours.
    assert codes in ([75], [-signal.SIGTERM] if not output else []), codes
  assert runs.finish(runs.start(config, workdir), 200) == [0]
  numbers = runs.assert_same(workdir, want)
  return (
    f"{'; '.join(results)}; then {numbers:,} numbers, all rows and all events"
    f" equal in bits; seed {seed}"
  )


@trial(
  "A signal to one of two processes stops both at the same step, with code"
  " 75." + BITS,
  seconds=140,
)
def two_processes(folder: pathlib.Path, seed: int) -> str:
  rng = random.Random(seed)
  config, want = runs.write_config(folder, STEPS_OF_TWO), folder / "want"
  runs.whole(config, want, processes=2)
  workdir, results, step = folder / "run", [], 0
  for place in ("compile", "step", "evaluation", "save"):
    who = rng.randrange(2)
    started = runs.start(config, workdir, (), 2, acts={who: [place, "SIGTERM"]})
    codes = runs.finish(started, 200)
    step, lead = stops(workdir, codes, step, "SIGTERM", who)
    results.append(f"{place} of process {who}: step {step} (+{lead})")
  codes = runs.finish(runs.start(config, workdir, processes=2), 200)
  assert codes == [0, 0], runs.output(workdir)
  numbers = runs.assert_same(workdir, want)
  return (
    f"{'; '.join(results)}; then {numbers:,} numbers, all rows and all events"
    f" equal in bits; seed {seed}"
  )


def stops(workdir, codes, before, name, who=0) -> tuple[int, int]:
  """Checks how processes ended that got a signal.

  Args:
    workdir: Folder of the run.
    codes: Exit codes of the processes.
    before: Step of the newest checkpoint at their start.
    name: Name of the signal.
    who: Process that got it.

  Returns:
    The step of the newest checkpoint, and how many after the signal it is.
  """
  output = runs.log(workdir).read_text(errors="replace")
  heard = runs.log(workdir, who).read_text(errors="replace")
  assert set(codes) == {75}, f"ended with {codes}:\n{runs.output(workdir)}"
  if before:
    resumed = re.findall(r"^resumes +step ([\d,]+)", output, re.M)[-1:]
    assert resumed in ([], [f"{before:,}"]), f"{resumed} after {before}"
  newest = max(
    (
      int(p.name)
      for p in (workdir / "checkpoints").glob("*")
      if p.name.isdigit()
    ),
    default=0,
  )
  end = re.findall(r"^stopped +by .*", output, re.M)[-1]
  if "before the first step" in end:
    assert newest == before, f"{newest} after {before}:\n{heard[-2000:]}"
    return newest, 0
  step = re.search(r" at step ([\d,]+), which is saved", end)
  assert step and int(step[1].replace(",", "")) == newest, f"{end}: {newest}"
  at = re.findall(rf"^{name}: received; .* at step ([\d,]+);", heard, re.M)
  if not at:  # jax received it
    assert len(codes) > 1, heard[-2000:]
    return newest, 0
  lead = newest - int(at[-1].replace(",", ""))
  assert 0 <= lead <= 3, f"{lead} steps after the signal"
  return newest, lead
