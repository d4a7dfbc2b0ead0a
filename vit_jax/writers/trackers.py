"""Metrics for W&B, MLflow and Trackio, beside the files of a run.

A tracker is told in a thread of its own, so that it can neither stop a run nor
hold up a step: what it raises is printed once, and the run goes on. Where it
writes is its own matter (WANDB_PROJECT, MLFLOW_TRACKING_URI and so on, see
docs/trackers.md). Its run's id, and which lines it was handed, stay in the
workdir for a run that resumes, see `handed`.
"""

import contextlib
import math
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from etils import epath

from vit_jax.config import Config, flat, to_dict
from vit_jax.options import not_installed
from vit_jax.writers import handed
from vit_jax.writers.handed import BESIDE

PROJECT = "vit_jax"  # where the environment names none
EXTRA = "trackers"
CLOSE_SECONDS = 60.0  # that the end of a run waits for a tracker
SAVE_SECONDS = 1.0  # that a tracker is behind what is noted of it, at most
# A line of metrics.jsonl: "step", "time" in seconds, and metrics.
Row = Mapping[str, int | float]
STATES = ("finished", "stopped", "failed")  # Ctrl-C stops a run


class About(NamedTuple):
  """What a tracker is told of a run.

  name: Name of the workdir's folder.
  workdir: Path of the workdir.
  config: Every option as "data.dataset" -> value.
  id: The tracker's own id of the run that resumes; None: a new one.
  """

  name: str
  workdir: str
  config: dict[str, Any]
  id: str | None


class Tracker(Protocol):
  """One service; everything but `faults` is called in a thread.

  Attributes:
    id: What finds the run again.
    where: Where to see it: an address, or a folder.
  """

  PACKAGE: str  # to import
  id: str
  where: str

  def __init__(self, about: About):
    """Opens or reopens the run."""

  @staticmethod
  def faults() -> str | None:
    """Returns why it could not write, found without the network."""

  def log(self, row: Row) -> None:
    """Writes the metrics of a row.

    Steps may come in any order: scores are written when they are known.
    """

  def finish(self, state: str) -> None:
    """Ends the run as one of `STATES`."""


class WandB:
  """Weights & Biases. The x axis is the metric "step"."""

  PACKAGE = "wandb"

  def __init__(self, about: About):
    import wandb

    is_local = "://" not in about.workdir
    folder = os.environ.get("WANDB_DIR") or (about.workdir if is_local else ".")
    self._run = wandb.init(
      id=about.id or secrets.token_hex(4),
      resume="allow",
      project=os.environ.get("WANDB_PROJECT") or PROJECT,
      name=os.environ.get("WANDB_NAME") or about.name,
      dir=folder,
      reinit="create_new",  # others may be open in this process
      settings=wandb.Settings(
        console="off",
        silent=True,
        # Its process may be killed with this one, and has 15 s of rows.
        x_transaction_log_flush_interval=SAVE_SECONDS,
      ),
    )
    # Options such as log_steps may differ in a run that resumes.
    self._run.config.update(about.config, allow_val_change=True)
    self._run.define_metric("*", step_metric="step")
    self.id = self._run.id
    self.where = (self._run.settings.mode == "online" and self._run.url) or (
      os.path.join(folder, "wandb")
    )

  @staticmethod
  def faults() -> str | None:
    import wandb

    if wandb.setup().settings.mode != "online" or wandb.login(
      prompt=False, verify=False
    ):
      return None
    return (
      "got no API key, expected one: run `wandb login`, or set WANDB_API_KEY,"
      " or WANDB_MODE=offline"
    )

  def log(self, row: Row) -> None:
    self._run.log({k: v for k, v in row.items() if k != "time"})

  def finish(self, state: str) -> None:
    self._run.finish(exit_code=int(state != "finished"))


class MLflow:
  """MLflow; of the names of metrics, what it refuses becomes "_"."""

  PACKAGE = "mlflow"
  STATUS = dict(zip(STATES, ("FINISHED", "KILLED", "FAILED"), strict=True))
  MOST_PARAMS = 100  # in a request
  MOST_CHARACTERS = 6000  # of a parameter

  def __init__(self, about: About):
    from mlflow import MlflowClient
    from mlflow.entities import Param

    self._client = MlflowClient()
    if about.id:
      self.id = about.id
      self._client.update_run(self.id, status="RUNNING")
    else:
      run = self._client.create_run(
        self._experiment(),
        run_name=os.environ.get("MLFLOW_RUN_NAME") or about.name,
      )
      self.id = run.info.run_id
      params = [
        Param(self._allowed(k), str(v)[: self.MOST_CHARACTERS])
        for k, v in about.config.items()
      ]
      for i in range(0, len(params), self.MOST_PARAMS):
        some = params[i : i + self.MOST_PARAMS]
        self._client.log_batch(self.id, params=some)
    self.where = f"{self._client.tracking_uri}, run {self.id}"

  @staticmethod
  def faults() -> str | None:
    from mlflow import MlflowClient

    try:
      MlflowClient()
    except Exception as e:
      return f"{_line(e)} Set MLFLOW_TRACKING_URI to a server's address"
    return None

  def _experiment(self) -> str:
    if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
      return number
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    found = self._client.get_experiment_by_name(name)
    return (
      found.experiment_id if found else self._client.create_experiment(name)
    )

  @staticmethod
  def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)

  def log(self, row: Row) -> None:
    from mlflow.entities import Metric

    at, step = int(row["time"] * 1000), int(row["step"])
    metrics = [
      Metric(self._allowed(k), v, at, step)
      for k, v in row.items()
      if k not in BESIDE
    ]
    self._client.log_batch(self.id, metrics=metrics)

  def finish(self, state: str) -> None:
    self._client.set_terminated(self.id, self.STATUS[state])


class Trackio:
  """Trackio, which knows no states; a run's name has an id of ours."""

  PACKAGE = "trackio"

  def __init__(self, about: About):
    with contextlib.redirect_stdout(sys.stderr):
      import trackio

      # It finds a run again by its name, which others may have as well.
      self.id = about.id or f"{about.name}-{secrets.token_hex(3)}"
      project = os.environ.get("TRACKIO_PROJECT") or PROJECT
      self._run = trackio.init(
        project=project,
        name=self.id,
        config=about.config,
        resume="must" if about.id else "never",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
      )
    self.where = f"trackio show --project {project}"

  @staticmethod
  def faults() -> str | None:
    return None  # it keeps what it cannot send

  def log(self, row: Row) -> None:
    values = {k: v for k, v in row.items() if k not in BESIDE}
    self._run.log(values, step=int(row["step"]))

  def finish(self, state: str) -> None:
    del state
    with contextlib.redirect_stdout(sys.stderr):
      self._run.finish()


# The choices of config.trackers.
TRACKERS: dict[str, type[Tracker]] = {
  "wandb": WandB,
  "mlflow": MLflow,
  "trackio": Trackio,
}


def faults(config: Config) -> list[str]:
  """Returns what keeps the trackers of a run from writing."""
  found = []
  for name in config.trackers:
    kind = TRACKERS[name]
    try:
      fault = not_installed([kind.PACKAGE], EXTRA) or kind.faults()
    except Exception as e:  # e.g. of a key that cannot be one
      fault = _line(e)
    if fault:
      found.append(f"config.trackers: {name}: {fault.rstrip('.')}.")
  return found


class Sender:
  """A thread that passes rows on to one tracker, in their order.

  A tracker that goes on with its run gets the rows that stay and did not arrive
  there before. Of those that will be written again, the values that it has are
  not passed on a second time.

  Args:
    name: Its name in `TRACKERS`.
    workdir: Folder of the run.
    config: The run.
    rows: The lines that metrics.jsonl had at the start, in their order.
    resumed_at: Step from which the run goes on: rows of later ones will be
      written again; 0: a new run, also of the tracker.
    note: Prints a line.
  """

  def __init__(
    self,
    name: str,
    workdir: str,
    config: Config,
    *,
    rows: Sequence[Row],
    resumed_at: int,
    note: Callable[[str], None],
  ):
    self._name = name
    self._note = note
    self._file = epath.Path(workdir) / "trackers" / f"{name}.json"
    before = self._read(rows) if resumed_at else handed.Handed()
    self._about = About(
      epath.Path(os.path.abspath(workdir)).name or name,
      workdir,
      flat(to_dict(config)),
      before.id,
    )
    kept = [n for n, row in enumerate(rows) if row["step"] <= resumed_at]
    self._handed = before.cut(kept, rows)
    self._rows: queue.SimpleQueue = queue.SimpleQueue()
    self._lost = 0
    self._has_failed = False
    self._state = STATES[0]
    self._saved_at = -math.inf
    for n, old in enumerate(kept):
      if not self._handed.has(n):
        self._rows.put((n, rows[old]))
    self._next = len(kept)
    self._save_now()  # before lines follow those that stay
    self._thread = threading.Thread(
      target=self._work, name=f"tracker {name}", daemon=True
    )
    self._thread.start()

  def put(self, row: Row) -> None:
    """Hands over the next line of metrics.jsonl; returns at once."""
    self._rows.put((self._next, row))
    self._next += 1

  def close(self, state: str) -> None:
    """Waits until all is written, for at most `CLOSE_SECONDS`."""
    self._state = state
    self._rows.put(None)
    self._thread.join(CLOSE_SECONDS)
    if self._thread.is_alive():
      self._note(
        f"{self._name:<11} has not answered for {CLOSE_SECONDS:.0f} s; the last"
        " rows may be missing there. metrics.jsonl has them all."
      )
    elif self._lost:
      self._note(
        f"{self._name:<11} lacks {self._lost:,} rows; metrics.jsonl has them"
        " all."
      )

  def _read(self, rows: Sequence[Row]) -> handed.Handed:
    """Returns what the tracker of the run that resumes was handed."""
    try:
      return handed.read(self._file, rows)
    except (OSError, ValueError, KeyError, TypeError) as e:
      self._note(
        f"{self._name:<11} {self._file} cannot be read: {_line(e)} It gets a"
        " new run, with all lines of metrics.jsonl."
      )
    return handed.Handed()

  def _work(self) -> None:
    try:
      tracker = TRACKERS[self._name](self._about)
      self._handed.id = tracker.id
      self._save()
      self._note(f"{self._name:<11} {tracker.where}")
    except Exception as e:  # a service may raise anything
      self._told(e)
      tracker = None
    while (item := self._rows.get()) is not None:
      number, row = item
      left = self._handed.left(row)
      if tracker is None:
        self._lost += bool(left)
        continue
      arrived = True
      try:
        if left:
          tracker.log({k: row[k] for k in row if k in BESIDE or k in left})
      except Exception as e:
        arrived = False
        self._lost += 1
        self._told(e)
      self._handed.note(number, row, arrived)
      self._save()
    try:
      if tracker is not None:
        self._save()
        tracker.finish(self._state)
    except Exception as e:
      self._told(e)

  def _save(self) -> None:
    """Keeps what was handed over; once a second where many rows wait."""
    now = time.monotonic()
    if not self._rows.empty() and now < self._saved_at + SAVE_SECONDS:
      return
    self._saved_at = now
    self._save_now()

  def _save_now(self) -> None:
    try:
      handed.write(self._file, self._handed)
    except Exception as e:  # a bucket may, too
      self._told(e)

  def _told(self, error: Exception) -> None:
    """Says it once; a service that is away would fill the screen."""
    if not self._has_failed:
      self._note(
        f"{self._name:<11} failed: {_line(error)} The run goes on without it"
        " where it must; metrics.jsonl has every row."
      )
    self._has_failed = True


def _line(error: Exception) -> str:
  """Returns the first line of an error, as a sentence."""
  lines = str(error).strip().splitlines() or [""]
  text = f"{type(error).__name__}: {lines[0]}".strip(": ").rstrip(".")
  return f"{text}."


def senders(
  config: Config | None,
  workdir: str,
  rows: Sequence[Row],
  resumed_at: int,
  note: Callable[[str], None],
) -> list[Sender]:
  """Starts the trackers of a run; none if there is no config. See `Sender`."""
  return [
    Sender(name, workdir, config, rows=rows, resumed_at=resumed_at, note=note)
    for name in (config.trackers if config else ())
  ]
