"""Whether a run is finished, still going, or stopped before its end."""

import math
import time
from typing import NamedTuple

from vit_jax.callbacks import run_record
from vit_jax.callbacks.progress import format_seconds
from vit_jax.reporting.runs import LOSS, METRICS, Run

FINISHED, GOING, STOPPED, UNKNOWN = "finished", "going", "stopped", "unknown"
# Seconds after its last heartbeat in which a run of another host counts as
# going; they come every 10 seconds.
PATIENCE = 60.0


class State(NamedTuple):
  """What became of a run.

  kind: "finished", "going", "stopped" or "unknown".
  text: One line, without the name of the run.
  seconds_left: Time until a run that is going ends, at the pace of its last
    rows; None: unknown.
  """

  kind: str
  text: str
  seconds_left: float | None = None


def state(run: Run, now: float | None = None) -> State:
  """Returns what became of a run, by its metrics and `process.json`.

  Args:
    run: The run.
    now: Seconds since the epoch; None: this moment.
  """
  now = time.time() if now is None else now
  total, record = run.total_steps, run.process
  is_complete = bool(total) and run.steps >= total
  done = f"all {run.steps:,} steps are done"
  where = _position_text(run, total, now)
  if not record:
    if is_complete:
      return State(FINISHED, f"finished: {run.steps:,} steps")
    return State(
      UNKNOWN, f"{where}; without {run_record.FILE} nothing tells its state"
    )
  if record.get("ended") is not None:
    error = record.get("how") or run_record.FINISHED
    if error == run_record.FINISHED:
      if not run.rows:
        text = f"{run_record.FILE} says that the run finished, but {METRICS}"
        return State(UNKNOWN, f"{text} has no line that can be read")
      steps = f": {run.steps:,} steps" if is_complete else f" {where}"
      return State(FINISHED, f"finished{steps}")
    error = error.rstrip(".")  # its last sentence goes on, or ends, here
    if is_complete:
      text = f"{done}, but then: {error}; the same command completes it"
      return State(STOPPED, f"stopped: {text}")
    # The error of a run that diverged says what to change.
    has_advice = error.startswith(FloatingPointError.__name__)
    more = "" if has_advice else _resumes(run)
    return State(STOPPED, f"stopped {where}: {error}{more}")
  alive, reason = run_record.is_alive(record), "its process is no longer there"
  if alive is None:  # the process is, or was, on another host
    alive = run.last_sign is not None and now - run.last_sign <= PATIENCE
    reason = f"no heartbeat since, from {record.get('host')}"
  if alive and is_complete:
    return State(GOING, f"still going: {done}, not all scores")
  if alive:
    left = _seconds_left(run, total)
    when = "" if left is None else f"; about {format_seconds(left)} left"
    return State(GOING, f"still going, {where}{when}", left)
  if is_complete:
    text = f"{done}, but the process ended before the run did"
    return State(STOPPED, f"stopped: {text}; the same command completes it")
  return State(STOPPED, f"stopped {where}; {reason}{_resumes(run)}")


def remarks(run: Run) -> str:
  """Returns steps skipped, images left out and values that were not finite.

  "": There are none.
  """
  parts = []
  if skipped := run.last("train/skipped"):
    parts.append(f"{_count_text(skipped, 'step')} skipped")
  if unusable := run.last("train/undecodable"):
    parts.append(f"{_count_text(unusable, 'image')} could not be decoded")
  for name, steps in _not_finite(run).items():
    what = name if name == LOSS else f"scores of {name}"
    many = _count_text(len(steps), "logged step")
    parts.append(f"{what} not finite at {many}, first at step {steps[0]:,}")
  return "; ".join(parts)


def _not_finite(run: Run) -> dict[str, list[int]]:
  """Returns the steps of values that were not finite.

  Returns:
    `LOSS` or the name of an evaluator -> steps; {}: all were finite.
  """
  steps_by_name: dict[str, dict[int, None]] = {}
  for row in run.rows:
    bad = [k for k, v in row.items() if not math.isfinite(v)]
    bad += [k for k in row if k.endswith("/not_finite")]
    if "train/skipped" in row and LOSS not in row:
      bad.append(LOSS)
    for name in bad:
      what = name.partition("/")[0]
      if name == LOSS or what != "train":
        key = LOSS if name == LOSS else what
        steps_by_name.setdefault(key, {})[row["step"]] = None
  return {key: list(steps) for key, steps in steps_by_name.items()}


def _count_text(count: int | float, what: str) -> str:
  return f"{count:,.0f} {what}{'s' * (count != 1)}"


def _position_text(run: Run, total: int | None, now: float) -> str:
  """Returns step, share and the age of the last line in words."""
  if not run.rows:
    text = "before its first line of metrics"
    if began := run.process.get("began"):
      text += f"; begun {format_seconds(now - began)} before this page"
    return text
  of = f" of {total:,} ({100 * run.steps / total:.1f} %)" if total else ""
  age = ""
  if (last := run.rows[-1].get("time")) is not None:
    ago = format_seconds(max(0.0, now - last))
    age = f", last line {ago} before this page was written"
  return f"at step {run.steps:,}{of}{age}"


def _resumes(run: Run) -> str:
  """Returns from which checkpoint the same command goes on."""
  folder = run.path / "checkpoints"
  names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
  steps = [int(name) for name in names if name.isdecimal()]
  at = f"resumes from step {max(steps):,}" if steps else "begins anew"
  return f". The same command {at}"


def _seconds_left(run: Run, total: int | None) -> float | None:
  """Returns the steps left times the seconds per step of the last lines."""
  began = run.process.get("began", -math.inf)
  points = [
    (r["step"], r["time"])
    for r in run.rows
    if "train/loss" in r and r.get("time", -math.inf) >= began
  ][-20:]
  if total is None or len(points) < 2 or points[0][0] >= points[-1][0]:
    return None
  (first, start), (last, end) = points[0], points[-1]
  return (end - start) / (last - first) * (total - run.steps)
