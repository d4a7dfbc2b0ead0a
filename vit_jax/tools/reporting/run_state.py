"""Finds out whether a run is finished, going on, or stopped early."""

import math
import time
from typing import NamedTuple

from etils import epath

from vit_jax.callbacks import run_record
from vit_jax.callbacks.progress import format_seconds
from vit_jax.checkpointing import checkpointer, retention
from vit_jax.tools.reporting.runs import LOSS, Run

FINISHED, GOING, STOPPED, UNKNOWN = "finished", "going", "stopped", "unknown"
# A run on another host counts as going if its last heartbeat is at most this
# number of seconds old. Heartbeats come every 10 seconds.
PATIENCE = 60.0


class State(NamedTuple):
  """The state of a run.

  kind: "finished", "going", "stopped" or "unknown".
  text: One line, without the name of the run.
  seconds_left: Estimated seconds until a running run ends, from its last rows;
    None: unknown.
  """

  kind: str
  text: str
  seconds_left: float | None = None


def state(run: Run, now: float | None = None) -> State:
  """Returns the state of a run, from its metrics and `process.json`.

  Args:
    run: The run.
    now: Time, seconds since the epoch; None: the current time.
  """
  now = time.time() if now is None else now
  kind, reason = _kind(run, now)
  is_complete = bool(run.total_steps) and run.steps >= run.total_steps
  where = _position_text(run, now)
  if is_complete:
    where = f"after all {run.steps:,} steps"
  if kind == FINISHED:
    steps = f": {run.steps:,} steps" if is_complete else f" {where}"
    return State(kind, f"finished{steps}")
  if kind == GOING:
    left = None if is_complete else _seconds_left(run)
    when = "" if left is None else f"; about {format_seconds(left)} left"
    return State(kind, f"still going, {where}{when}", left)
  if kind == UNKNOWN:
    return State(kind, f"{where}; {reason}")
  text = f"stopped {where}: {reason}"
  if is_complete:
    text += ". The same command completes it"
  elif not reason.startswith(FloatingPointError.__name__):
    # The error of a diverged run says what to change.
    text += _resumes(run)
  return State(kind, text)


def _kind(run: Run, now: float) -> tuple[str, str]:
  """Returns the kind of the state, and the reason of "stopped" or "unknown"."""
  record = run.process
  if not record:
    if run.total_steps and run.steps >= run.total_steps:
      return FINISHED, ""
    return UNKNOWN, f"without {run_record.FILE} nothing tells its state"
  if record.get("ended") is not None:
    error = record.get("how") or run_record.FINISHED
    if error == run_record.FINISHED:
      return FINISHED, ""
    return STOPPED, error.rstrip(".")
  alive, reason = run_record.is_alive(record), "its process is no longer there"
  if alive is None:  # the process is, or was, on another host
    alive = run.last_sign is not None and now - run.last_sign <= PATIENCE
    reason = f"no heartbeat since, from {record.get('host')}"
  return (GOING, "") if alive else (STOPPED, reason)


def remarks(run: Run) -> str:
  """Returns a text about skipped steps, broken images and non-finite values.

  Returns "" if there are none.
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
  """Returns the steps with values that were not finite.

  Returns:
    `LOSS` or the name of an evaluator -> steps; {}: all values were finite.
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


def _position_text(run: Run, now: float) -> str:
  """Returns a text with step, share of the run and age of the last line."""
  if not run.rows:
    text = "before its first line of metrics"
    if began := run.process.get("began"):
      text += f"; begun {format_seconds(now - began)} before this page"
    return text
  total = run.total_steps
  of = f" of {total:,} ({100 * run.steps / total:.1f} %)" if total else ""
  age = ""
  if (last := run.rows[-1].get("time")) is not None:
    ago = format_seconds(max(0.0, now - last))
    age = f", last line {ago} before this page was written"
  return f"at step {run.steps:,}{of}{age}"


def _resumes(run: Run) -> str:
  """Returns a text about the checkpoint from which the run can be resumed."""
  folder = run.path / checkpointer.FOLDER
  names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
  steps = [int(name) for name in names if name.isdecimal()]
  if not steps and (noted := retention.noted_newest(epath.Path(folder))):
    return f". The checkpoint of step {noted:,} is not in this folder"
  at = f"resumes from step {max(steps):,}" if steps else "begins anew"
  return f". The same command {at}"


def _seconds_left(run: Run) -> float | None:
  """Returns remaining steps x seconds per step of the last lines."""
  began = run.process.get("began", -math.inf)
  points = [
    (r["step"], r["time"])
    for r in run.rows
    if "train/loss" in r and r.get("time", -math.inf) >= began
  ][-20:]
  total = run.total_steps
  if total is None or len(points) < 2 or points[0][0] >= points[-1][0]:
    return None
  (first, start), (last, end) = points[0], points[-1]
  return (end - start) / (last - first) * (total - run.steps)
