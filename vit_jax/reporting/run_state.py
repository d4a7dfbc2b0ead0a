"""Whether a run is finished, still going, or stopped before its end."""

import math
import statistics
import time
from typing import NamedTuple

from vit_jax.callbacks import run_record
from vit_jax.callbacks.progress import format_seconds
from vit_jax.config.json_file import is_number
from vit_jax.reporting.runs import LOSS, METRICS, Run

FINISHED, GOING, STOPPED, UNKNOWN = "finished", "going", "stopped", "unknown"
# A run whose process cannot be seen, as it is or was on another host, counts as
# going for so many seconds after its last line, or for as many times as long
# as its lines come apart.
PATIENCE = 600.0
GAPS = 20


class State(NamedTuple):
  """What became of a run.

  kind: "finished", "going", "stopped" or "unknown".
  text: One line, without the name of the run.
  seconds_left: Of a run that is going, at the pace of its last lines; None:
    unknown.
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
  has_ended = record.get("ended") is not None
  alive = run_record.is_alive(record) if record and not has_ended else False
  error = record.get("how") if has_ended else None
  # Its last sentence goes on, or ends, with this one.
  error = None if error in (None, run_record.FINISHED) else error.rstrip(".")
  if total and run.steps >= total:
    return _state_of_complete(run, alive, bool(record) and not has_ended, error)
  where = _position_text(run, total, now)
  if error is not None:
    # Of a run that diverged, the error says what to change.
    is_in_error = error.startswith(FloatingPointError.__name__)
    more = "" if is_in_error else _resumes(run)
    return State(STOPPED, f"stopped {where}: {error}{more}")
  if has_ended and not run.rows:
    return State(UNKNOWN, _without_metrics(run, total))
  if has_ended:  # the config was shortened, or total_steps is unknown
    return State(FINISHED, f"finished {where}")
  silent = _seconds_silent(run, now)
  if alive is None or not record:  # only the lines can tell
    if silent is None and total is None:
      return State(UNKNOWN, "nothing tells whether it is finished")
    alive = silent is not None and silent <= _patience(run)
    if not alive and total is None:
      return State(UNKNOWN, f"{where}; its length is not recorded")
    reason = "no sign of it since"
    if record:
      reason += f"; its process is, or was, on another host, {record['host']}"
  else:
    reason = "its process is no longer there"
  if not alive:
    return State(STOPPED, f"stopped {where}; {reason}{_resumes(run)}")
  left = _seconds_left(run, total)
  when = "" if left is None else f"; about {format_seconds(left)} left"
  return State(GOING, f"still going, {where}{when}", left)


def _without_metrics(run: Run, total: int | None) -> str:
  """Returns what is known of a run that says it finished, without a line."""
  is_there = (run.path / METRICS).exists()
  what = "has no line that can be read" if is_there else "is missing"
  known = f"{METRICS} {what}; {run_record.FILE} says that the run finished"
  if step := run.metadata.get("step"):
    of = f" of {total:,}" if total else ""
    known += f", and metadata.json that step {step:,}{of} was saved"
  return known


def remarks(run: Run) -> str:
  """Returns what was skipped, did not count or was not finite; "": nothing."""
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
    bad = [k for k, v in row.items() if not is_number(v)]
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


def _state_of_complete(
  run: Run, alive: bool | None, is_open: bool, error: str | None
) -> State:
  """Returns the state of a run whose last step is done."""
  steps = f"{run.steps:,} steps"
  if error is not None:
    text = f"all {steps} are done, but then: {error}"
    return State(STOPPED, f"stopped: {text}; the same command completes it")
  if is_open and alive:
    return State(GOING, f"still going: all {steps} are done, not all scores")
  if is_open and alive is False:
    text = f"all {steps} are done, but the process ended before the run did"
    return State(STOPPED, f"stopped: {text}; the same command completes it")
  return State(FINISHED, f"finished: {steps}")


def _position_text(run: Run, total: int | None, now: float) -> str:
  """Returns step, share and the age of the last line in words."""
  if not run.rows:
    began = run.process.get("began")
    ago = f"; begun {format_seconds(now - began)} before" if began else ""
    return f"before its first line of metrics{ago}{' this page' * bool(ago)}"
  of = f" of {total:,} ({100 * run.steps / total:.1f} %)" if total else ""
  last = run.rows[-1].get("time")
  age = "" if last is None else f", last line {_ago(now - last)}"
  return f"at step {run.steps:,}{of}{age}"


def _ago(seconds: float) -> str:
  return f"{format_seconds(max(0.0, seconds))} before this page was written"


def _resumes(run: Run) -> str:
  """Returns from which checkpoint the same command goes on."""
  folder = run.path / "checkpoints"
  names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
  steps = [int(name) for name in names if name.isdecimal()]
  at = f"resumes from step {max(steps):,}" if steps else "begins anew"
  return f". The same command {at}"


def _times(run: Run) -> list[float]:
  """Returns the times of the lines that the last process wrote."""
  began = run.process.get("began", -math.inf)
  times = [r["time"] for r in run.rows if "time" in r]
  return [t for t in times if t >= began]


def _seconds_silent(run: Run, now: float) -> float | None:
  """Returns the seconds since the last sign of a run; None: no sign at all."""
  signs = [*_times(run), *filter(None, [run.process.get("began")])]
  return now - max(signs) if signs else None


def _patience(run: Run) -> float:
  times = _times(run)
  gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
  return max(PATIENCE, GAPS * statistics.median(gaps) if gaps else 0.0)


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
