"""Where the time of a run went, since the very first start of its command.

Each second is in one bucket, so they add up to the time on the clock: those of
`vit_jax.callbacks.phases`; `repeated`, waiting for input and steps after the
checkpoint that a later process went back to; and `restart`, from the last sign
of life of a process to the start of the next. The account goes with each
checkpoint, and with each beat of `vit_jax.callbacks.run_lock`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.callbacks import phases as phases_lib
from vit_jax.callbacks.progress import format_seconds
from vit_jax.config import json_file

KEY = "goodput"  # in the metadata of a checkpoint, and in a beat
BUCKETS = (*phases_lib.NAMES, "repeated", "restart")
REPEATED = ("input", "step")  # what is done again after a checkpoint
SHARE = "train/goodput"
NAMES = (SHARE, *(f"train/seconds/{b}" for b in BUCKETS))  # in metrics.jsonl


class Goodput:
  """Adds the seconds of this process to those of the processes before it.

  Args:
    phases: Of this process.
    kept: The account of the checkpoint from which it resumes, as `at` made it;
      None: it has none, or the run is new. What is no account is taken for
      None.
    last: The account in the last sign of life of the process before; None:
      there was none.
    clock: Seconds since the epoch, for tests.
  """

  def __init__(
    self,
    phases: phases_lib.Phases,
    kept: Any = None,
    last: Any = None,
    clock: Callable[[], float] = time.time,
  ):
    self._phases = phases
    now = clock() - sum(phases.seconds().values())  # the start of this process
    kept, last = _valid(kept), _valid(last)
    if kept and last and kept["began"] != last["began"]:
      last = None  # of another run
    start = kept or last
    self._began = start["began"] if start else now
    before = dict.fromkeys(BUCKETS, 0.0)
    done = kept["seconds"] if kept else before  # what the checkpoint holds
    if kept:
      before = dict(done)
    if last and sum(last["seconds"].values()) > sum(before.values()):
      before = dict(last["seconds"])
      for bucket in REPEATED:
        again = max(0.0, before[bucket] - done[bucket])
        before[bucket] -= again
        before["repeated"] += again
    # Two machines' clocks may differ by more than the restart took.
    gap = max(0.0, now - self._began - sum(before.values()))
    before["restart"] += gap
    self._before = before

  def at(self) -> dict[str, Any]:
    """Returns the account now, for JSON.

    Returns:
      began: First start of the run, seconds since the epoch.
      seconds: Those of each of `BUCKETS`; their sum is the time since then.
    """
    found = dict(self._before)
    for name, seconds in self._phases.seconds().items():
      found[name] += seconds
    return {"began": self._began, "seconds": found}

  def metrics(self) -> dict[str, float]:
    """Returns the account for metrics.jsonl: seconds to the millisecond, and
    the share of the steps, 0 to 1."""
    seconds = self.at()["seconds"]
    total = sum(seconds.values())
    found = {f"train/seconds/{k}": round(v, 3) for k, v in seconds.items()}
    return {SHARE: round(seconds["step"] / total, 4) if total else 0.0} | found

  def text(self) -> str:
    """Returns the line that ends a run."""
    return f"goodput     {text(self.at()['seconds'])}"


def of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Returns the seconds of each bucket in the last row that has them; {}: none
  has."""
  prefix = "train/seconds/"
  for row in reversed(rows):
    found = {b: row.get(prefix + b) for b in BUCKETS}
    if all(_is_seconds(v) for v in found.values()):
      return found
  return {}


def of_metadata(metadata: Mapping[str, Any]) -> dict[str, float]:
  """Returns the seconds of each bucket in the metadata of a run or of a
  checkpoint; {}: they have none."""
  account = _valid(metadata.get(KEY))
  return account["seconds"] if account else {}


def text(seconds: dict[str, float]) -> str:
  """Returns buckets in words, the longest first.

  Example:
    >>> text({"start": 30.0, "step": 90.0, "save": 0.0})
    '75 % of 2m00s in steps: step 1m30s, start 30s'
  """
  total = sum(seconds.values())
  share = 100 * seconds["step"] / total if total else 0.0
  parts = sorted(seconds.items(), key=lambda item: -item[1])
  told = ", ".join(f"{k} {in_words(v)}" for k, v in parts if v >= 0.05)
  return f"{share:.0f} % of {in_words(total)} in steps: {told}"


def in_words(value: float) -> str:
  """Returns seconds in words, below 10 with a decimal.

  Example:
    >>> in_words(3.14), in_words(61.0)
    ('3.1s', '1m01s')
  """
  return f"{value:.1f}s" if value < 10 else format_seconds(value)


def _is_seconds(value: Any) -> bool:
  return json_file.is_number(value) and value >= 0


def _valid(account: Any) -> dict[str, Any] | None:
  """Returns an account; None if a file holds none, or a damaged one."""
  try:
    seconds = {b: account["seconds"][b] for b in BUCKETS}
    began = account["began"]
  except (KeyError, TypeError, IndexError):
    return None
  if not all(map(_is_seconds, [began, *seconds.values()])):
    return None
  return {"began": began, "seconds": seconds}
