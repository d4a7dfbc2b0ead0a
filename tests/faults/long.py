"""A run of many steps: nothing grows."""

import os
import pathlib
import time

import numpy as np

from faults import runs
from faults.trial import trial

STEPS, EVALUATIONS = 3000, 100
# The C library keeps what it was given, and fragments it a little.
GROWTH = 0.03  # of the memory, from a third of the run to its end


@trial(
  "A long run needs no more memory, threads or open files at its end than"
  " in its middle.",
  seconds=150,
)
def grows(folder: pathlib.Path, seed: int) -> str:
  """Samples a process while it trains; the last two thirds have no slope."""
  del seed  # nothing is random
  config, workdir = runs.write_config(folder, steps=STEPS), folder / "run"
  every = STEPS // EVALUATIONS
  options = [
    f"--config.evals.test.every_steps={every}",
    f"--config.evals.few.every_steps={every}",
    f"--config.checkpoint.every_steps={2 * every}",
  ]
  runs.whole(config, folder / "warm", ["--config.total_steps=15"])
  (process,) = started = runs.start(config, workdir, options)
  samples = []
  try:
    while process.poll() is None:
      step = _step(workdir)
      if step is not None:
        samples.append((step, *_used(process.pid)))
      time.sleep(0.2)
  finally:
    runs.kill(started)
  assert process.returncode == 0, runs.output(workdir)
  scored = sum("test/top1" in r for r in runs.rows(workdir))
  assert scored == EVALUATIONS, f"{scored} evaluations"
  used = np.array([s for s in samples if s[1]], float)
  late = used[used[:, 0] >= STEPS / 3]
  assert len(late) > 50, f"only {len(late)} samples"
  growth = _growth(late[:, 0], late[:, 1])
  assert abs(growth) < GROWTH, f"memory grows by {growth:.1%}"
  # Threads come and go with every save and evaluation: medians of thirds.
  results, saves = [], STEPS // every // 2
  for name, values in (("threads", late[:, 2]), ("open files", late[:, 3])):
    middle, end = (np.median(v) for v in np.array_split(values, 2))
    # One that each save leaves would make a third of them more.
    assert end - middle < saves / 6, f"{name} grow from {middle:g} to {end:g}"
    results.append(
      f"{middle:.0f} {name} in the middle third, {end:.0f} in the last"
    )
  memory = np.median(late[:, 1])
  return (
    f"{STEPS:,} steps, {EVALUATIONS} evaluations of each of two evaluators,"
    f" {saves} checkpoints: memory {memory:.0f} MB,"
    f" {growth:+.1%} from a third of the run to its end; {'; '.join(results)}"
  )


def _step(workdir) -> int | None:
  try:
    lines = (workdir / "metrics.jsonl").read_bytes().splitlines()
    return int(lines[-1].split(b",")[0].split(b":")[1])
  except (OSError, IndexError, ValueError):
    return None


def _used(pid: int) -> tuple[float, int, int]:
  """Returns megabytes, threads and open files; zeros if the process is gone."""
  try:
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    values = dict(
      line.split(":", 1) for line in text.splitlines() if ":" in line
    )
    files = len(os.listdir(f"/proc/{pid}/fd"))
    megabytes = int(values["VmRSS"].split()[0]) / 1024
    return megabytes, int(values["Threads"]), files
  except (OSError, KeyError):
    return 0.0, 0, 0


def _growth(steps: np.ndarray, values: np.ndarray) -> float:
  """Returns how much a line through the points rises, as a share."""
  slope, _ = np.polyfit(steps, values, 1)
  return float(slope * (steps[-1] - steps[0]) / values.mean())
