"""What becomes of a run when a step is not a number.

The train step decides on the device, before its update, and returns whether it
was applied (`step.make_train_step`). Here the host learns of it, at the next
step of which metrics are written or a checkpoint is saved, and before either.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.batch import Batch, DataError
from vit_jax.callbacks.accounting import batches_seen
from vit_jax.callbacks.fingerprints import NEWEST, Fingerprints
from vit_jax.config import json_file
from vit_jax.writers import atomic_files, run_info

FILE = "nonfinite.json"
KEY = "counts"  # in the metadata of a checkpoint
SHOWN = 5  # steps before the bad one of which the loss is told
REPEAT = (
  'python -c "from vit_jax.callbacks import repeat; repeat.step({workdir!r},'
  ' {step})"'
)


class Guard:
  """Counts what was skipped, and stops a run as config.on_nonfinite says.

  Args:
    run: A `prepare.Run` that was checked.
    newest: Returns the step of the newest checkpoint, or None.
    note: Prints a line.
    check: See `atomic_files.open_records`.

  Attributes:
    skipped: Steps of the run whose update was not applied.
    undecodable: Rows of all batches that did not count.
    due, close: Of the `Fingerprints`.
  """

  def __init__(
    self,
    run: Any,
    newest: Callable[[], int | None],
    note: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
  ):
    self._config, self._workdir = run.config, run.workdir
    self._newest, self._note = newest, note
    before = run.resumed_metadata.get(KEY, {})
    self.skipped = int(before.get("skipped", 0))
    self.undecodable = int(before.get("undecodable", 0))
    self._start = run.start
    batches = batches_seen(
      run.resumed_metadata, run.start, run.config.data.batch_size
    )
    self._shift = batches - run.start  # not 0: batches had another size
    # Data of one's own may mask rows for reasons of their own.
    self._most_unusable = getattr(
      getattr(run, "data", None), "most_unusable", lambda step: math.inf
    )
    self._fingerprints = Fingerprints(run.workdir, run.start, note, check)
    self.due, self.close = self._fingerprints.due, self._fingerprints.close
    self._records: dict[int, np.ndarray] = {}  # of the steps not fetched yet
    self._shown = list(self._fingerprints.before[-SHOWN:])
    was = read(run.workdir)
    self._found = [e for e in was if e["step"] <= run.start]
    if len(self._found) < len(was):  # later steps come again
      self._write()

  def remembered(self, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches of this process, and keeps their record numbers until
    their steps are known to be good."""
    for step, batch in enumerate(batches, self._start + 1):
      self._records[step] = batch["index"]
      yield batch

  def add(self, step: int, of_step: jax.Array) -> None:
    """Takes the fingerprint of a step, without waiting for it.

    Raises:
      FloatingPointError: As `check`, of an earlier step.
    """
    self._fingerprints.add(step, of_step)
    if self._fingerprints.is_full:
      self._learn(self._fingerprints.fetch(leave=NEWEST))

  def check(self, step: int, values: dict[str, float]) -> dict[str, float]:
    """Returns metrics of a step that may be written, and the state saved.

    Args:
      step: The newest step.
      values: Its metrics.

    Returns:
      The metrics without those that are not finite, which a skipped step has;
      and `skipped` and `undecodable`, of the whole run so far.

    Raises:
      FloatingPointError: The run must stop; all processes raise it. What is
        known of the step is in `FILE`.
      DataError: Too many records of the batches cannot be used.
    """
    self._learn(self._fingerprints.fetch())
    most = self._most_unusable(step + self._shift)
    if self.undecodable > most:
      # Of all processes; each has named its own.
      raise DataError(
        f"got {self.undecodable:,} rows with records that cannot be used up to"
        f" step {step}, expected at most {most:,} (1% of"
        " the split in every epoch, or ten). What is wrong with each was said"
        " by the process that read it. Repair or remove them."
      )
    bad = [k for k, v in values.items() if not math.isfinite(v)]
    if bad and not any(e["step"] == step for e in self._found):
      self._stop(step, values, bad)
    counts = {k: float(v) for k, v in self.counts().items()}
    return {k: v for k, v in values.items() if k not in bad} | counts

  def counts(self) -> dict[str, int]:
    """Returns what a checkpoint's metadata keep under `KEY`."""
    return {"skipped": self.skipped, "undecodable": self.undecodable}

  def _learn(self, steps: np.ndarray) -> None:
    for found in steps:
      step = int(found["step"])
      records = self._records.pop(step, np.zeros(0, np.int64))
      self.undecodable += int(found["undecodable"])
      if not found["is_applied"]:
        self.skipped += 1
        self._bad(step, found, records)
      if not math.isfinite(found["param_norm"]):
        self._stop(step, {"param_norm": float(found["param_norm"])})
      self._shown = [*self._shown[1 - SHOWN :], found]

  def _bad(self, step: int, found: np.void, records: np.ndarray) -> None:
    """Writes what is known of a step, then stops or tells."""
    newest = self._newest()
    values = {k: float(found[k]) for k in ("loss", "grad_norm")}
    bad = [k for k, v in values.items() if not math.isfinite(v)]
    repeat = REPEAT.format(workdir=str(self._workdir), step=step)
    entry = {
      "step": step,
      # JSON has no NaN.
      "values": {k: str(v) for k, v in values.items()},
      "before": [_told(s) for s in self._shown],
      "seed": self._config.seed,
      "checkpoint": newest,
      "repeat": repeat,
      "records": multihost_utils.process_allgather(records)
      .reshape(jax.process_count(), -1)
      .tolist(),
    }
    self._found.append(entry)
    self._write()
    stops = self._config.on_nonfinite == "stop"
    what = f"{_values(values, bad)} at step {step}"
    if not stops and self.skipped <= self._config.max_skipped:
      self._note(
        f"skipped     {what}: its update was not applied; {self.skipped} of at"
        f" most {self._config.max_skipped}; records in {self._workdir}/{FILE}"
      )
      return
    reason = (
      ""
      if stops
      else (
        f" That makes {self.skipped} steps skipped, and config.max_skipped is"
        f" {self._config.max_skipped}."
      )
    )
    raise FloatingPointError(
      f"{what}: its update was not applied, and nothing was saved since."
      f"{reason} {self._checkpoint()}\nBefore it:"
      f" {'; '.join(entry['before']) or 'nothing that is known'}.\n"
      f"The records of its batch are in {self._workdir}/{FILE}. This repeats"
      f" the step, and names records and parameters at fault:\n  {repeat}\n"
      + ADVICE
      + (SKIP if stops else "")
    )

  def _stop(
    self, step: int, values: dict, bad: Iterable[str] = ("param_norm",)
  ):
    """Raises, where loss and gradient are finite, and what follows is not."""
    raise FloatingPointError(
      f"{_values(values, bad)} at step {step}, though loss and gradient are"
      f" finite: nothing was saved since. {self._checkpoint()} {ADVICE}"
    )

  def _write(self) -> None:
    found = {"steps": self._found}
    run_info.write_json(self._workdir, FILE, found, self._note)

  def _checkpoint(self) -> str:
    newest = self._newest()
    if newest is None:
      return (
        "There is no checkpoint yet: the same command begins again at step 0,"
        " and comes to the same step."
      )
    return (
      f"The newest checkpoint, of step {newest}, is from before, and finite:"
      " the same command goes on from there, and comes to the same step."
    )


ADVICE = (
  "If loss and grad_norm rose before, the run diverges: lower config.optim.lr,"
  " lengthen config.optim.warmup_steps, or set config.optim.clip_norm, in a new"
  " --workdir. If they did not, a record or a device is at fault."
)
SKIP = " --config.on_nonfinite=skip leaves the step out."


def read(workdir: str) -> list[dict[str, Any]]:
  """Returns the entries of `FILE`, by step; none where it is damaged.

  Raises:
    WriteError: It cannot be read, see `files.contents`.
  """
  path = epath.Path(workdir) / FILE
  data = atomic_files.contents(path)
  try:
    found = json_file.parse(data, str(path))["steps"]
    return [e for e in found if isinstance(e["step"], int)]
  except (KeyError, TypeError, ValueError):
    return []


def _told(found: np.void) -> str:
  return (
    f"step {found['step']}: loss {found['loss']:.6g},"
    f" grad_norm {found['grad_norm']:.4g}"
  )


def _values(values: dict[str, float], names: Iterable[str]) -> str:
  return ", ".join(f"{name} is {values[name]}" for name in names)
