"""Steps whose loss or gradient is not finite: skipped, counted and recorded.

The train step does not apply such an update, and returns `skipped` (see
`step.make_train_step`). The host reads it before it writes metrics or saves a
checkpoint.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from vit_jax.batch import Data, DataError, batches_seen
from vit_jax.callbacks.base import Callback
from vit_jax.config import Config, json_file
from vit_jax.paths import run_path
from vit_jax.step import METRICS, TrainState
from vit_jax.writers import atomic_files, run_info

FILE = "nonfinite.json"
NUM_SHOWN = 5  # steps before the bad one whose losses are shown
MAX_PENDING = 1024  # steps whose metrics wait on the device
NUM_NEWEST = 8  # newest steps, not fetched because the devices may compute them
ADVICE = (
  "If loss and grad_norm rose before, lower config.optim.lr or set"
  " config.optim.clip_norm, in a new --workdir; if not, check the records."
)
SKIP = " --config.on_nonfinite=skip leaves the step out."


class NonFinite(Callback):
  """Counts skipped steps, and stops a run as config.on_nonfinite says.

  Args:
    config: The run.
    workdir: Its folder.
    data: Its training data.
    newest: Returns the step of the newest checkpoint, or None.
    note: Prints a line.

  Attributes:
    name: Key of the counts in a checkpoint's metadata.
    skipped: Steps of the run whose update was not applied.
    undecodable: Rows of all batches that did not count.
  """

  name = "counts"

  def __init__(
    self,
    config: Config,
    workdir: str,
    data: Data,
    newest: Callable[[], int | None],
    note: Callable[[str], None],
  ):
    self._config, self._workdir = config, workdir
    self._newest, self._note = newest, note
    # Users' own data may mask rows for other reasons.
    self._most_unusable = getattr(data, "most_unusable", lambda step: math.inf)
    self._data = data
    self.skipped = self.undecodable = 0
    self._shift = 0  # batches seen beyond the number of steps
    # Step, metrics and record numbers that were not fetched yet.
    self._pending: list[tuple[int, dict[str, jax.Array], jax.Array]] = []
    self._shown: list[str] = []  # texts of the newest steps
    self._noted: set[str] = set()  # metrics that were once not finite
    self._entries: list[dict[str, Any]] = []  # entries of `FILE`

  def on_start(self, start: int, state: TrainState, saved: Mapping) -> None:
    """Reads the counts from the metadata of the checkpoint."""
    counts = saved.get(self.name, {})
    self.skipped = int(counts.get("skipped", 0))
    self.undecodable = int(counts.get("undecodable", 0))
    batches = batches_seen(saved, start, self._config.data.batch_size)
    self._shift = batches - start  # not 0: batches had another size
    entries = read(self._workdir)
    self._entries = [e for e in entries if e["step"] <= start]
    if len(self._entries) < len(entries):  # later steps are computed again
      self._write()

  def on_step(
    self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping
  ) -> None:
    """Stores metrics and record numbers of a step, on the devices.

    Raises:
      FloatingPointError: As `on_log`, because of an earlier step.
    """
    values = {name: metrics[name] for name in METRICS}
    self._pending.append((step, values, batch["index"]))
    if len(self._pending) >= MAX_PENDING:
      self._fetch(leave=NUM_NEWEST)

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    """Returns the metrics that may be written.

    Returns:
      The metrics without `METRICS` that are not finite, as in a skipped step.
      `skipped` and `undecodable` are counts over the whole run so far.

    Raises:
      FloatingPointError: The run must stop; all processes raise it. `FILE` has
        the details of the step.
      DataError: Too many records of the batches cannot be used.
    """
    self._fetch()
    most = self._most_unusable(step + self._shift)
    if self.undecodable > most:
      raise DataError(
        f"got {self.undecodable:,} rows of unusable records up to step {step},"
        f" expected at most {most:,}: see above what is wrong with a record."
      )
    nonfinite = {k: v for k, v in values.items() if not math.isfinite(v)}
    bad = [k for k in nonfinite if k in METRICS]
    if bad and not any(e["step"] == step for e in self._entries):
      self._stop(step, {k: values[k] for k in bad})
    if new := nonfinite.keys() - {*METRICS} - self._noted:
      self._noted |= new
      texts = ", ".join(f"{k} is {nonfinite[k]}" for k in sorted(new))
      self._note(f"not finite  {texts} at step {step}; the run continues")
    counts = {k: float(v) for k, v in self.state_dict(step).items()}
    return {k: v for k, v in values.items() if k not in bad} | counts

  def before_save(self, step: int) -> None:
    """Raises as `on_log`: a state that is not finite is never saved."""
    self.on_log(step, {})

  def state_dict(self, step: int) -> dict[str, int]:
    """Returns the counts up to now."""
    return {"skipped": self.skipped, "undecodable": self.undecodable}

  def _fetch(self, leave: int = 0) -> None:
    """Fetches the waiting metrics, except of the newest `leave` steps."""
    number = max(0, len(self._pending) - leave)
    fetched, self._pending = self._pending[:number], self._pending[number:]
    metrics = jax.device_get([values for _, values, _ in fetched])
    for (step, _, index), values in zip(fetched, metrics, strict=True):
      values = {name: float(value) for name, value in values.items()}
      self.undecodable += int(values["undecodable"])
      if values["skipped"]:
        self.skipped += 1
        self._skip(step, values, index)
      if not math.isfinite(values["param_norm"]):
        self._stop(step, {"param_norm": values["param_norm"]})
      self._shown = [*self._shown[1 - NUM_SHOWN :], _shown(step, values)]

  def _skip(
    self, step: int, values: dict[str, float], index: jax.Array
  ) -> None:
    """Records a skipped step; then stops the run or prints a line."""
    bad = {k: values[k] for k in ("loss", "grad_norm")}
    newest = self._newest()
    with jax.transfer_guard("allow"):
      records = multihost_utils.process_allgather(index, tiled=True)
    if self._config.data.repeats > 1:  # see `TrainingData.row_numbers`
      records = records % self._data.num_examples
    entry = {
      "step": step,
      "values": {k: str(v) for k, v in bad.items()},  # JSON has no NaN
      "before": self._shown,
      "checkpoint": newest,
      # A list for each process.
      "records": records.reshape(jax.process_count(), -1).tolist(),
    }
    self._entries.append(entry)
    self._write()
    what = f"{_bad(bad)} at step {step}: its update was not applied"
    where = f"in {self._workdir}/{FILE}"
    if self._config.on_nonfinite == "skip":
      self._note(f"skipped     {what}; {self.skipped} so far; records {where}")
      return
    raise FloatingPointError(
      f"{what}, and nothing was saved since. {_checkpoint(newest)}\n"
      f"Before it: {'; '.join(self._shown) or 'unknown'}.\n"
      f"The records of its batch are {where}.\n{ADVICE}{SKIP}"
    )

  def _stop(self, step: int, values: dict[str, float]) -> None:
    """Raises if a metric other than loss and gradient is not finite."""
    raise FloatingPointError(
      f"{_bad(values)} at step {step}, although loss and gradient are finite:"
      f" nothing was saved since. {_checkpoint(self._newest())} {ADVICE}"
    )

  def _write(self) -> None:
    steps = {"steps": self._entries}
    run_info.write_json(self._workdir, FILE, steps, self._note)


def read(workdir: str) -> list[dict[str, Any]]:
  """Returns the entries of `FILE`, by step; none if it is damaged.

  Raises:
    WriteError: It cannot be read, see `atomic_files.contents`.
  """
  path = run_path(workdir) / FILE
  data = atomic_files.contents(path)
  try:
    entries = json_file.parse(data, str(path))["steps"]
    return [e for e in entries if isinstance(e["step"], int)]
  except (KeyError, TypeError, ValueError):
    return []


def _checkpoint(newest: int | None) -> str:
  if newest is None:
    return "There is no checkpoint yet: the same command starts at step 0."
  return (
    f"The newest checkpoint, of step {newest}, is finite: the same command"
    " resumes from it."
  )


def _shown(step: int, values: Mapping[str, float]) -> str:
  return (
    f"step {step}: loss {values['loss']:.6g},"
    f" grad_norm {values['grad_norm']:.4g}"
  )


def _bad(values: Mapping[str, float]) -> str:
  return ", ".join(
    f"{k} is {v}" for k, v in values.items() if not math.isfinite(v)
  )
