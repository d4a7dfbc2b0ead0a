"""Metrics for W&B and MLflow, beside the files of a run.

Each tracker is a `MetricWriter` in a thread of its own, so that it can neither
stop a run nor hold up a step: what it raises is printed once, and the run goes
on. Where it writes is its own matter (WANDB_PROJECT, MLFLOW_TRACKING_URI and so
on, see docs/trackers.md). The id of its run stays in trackers/NAME.json of the
workdir, so that a run that resumes continues the same one.
"""

import json
import os
import queue
import re
import secrets
import threading
import time as time_lib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from etils import epath

from vit_jax.config import Config, flat, to_dict
from vit_jax.options import not_installed
from vit_jax.writers import atomic_files
from vit_jax.writers.atomic_files import Row

PROJECT = "vit_jax"  # where the environment names none
EXTRA = "trackers"
CLOSE_SECONDS = 60.0  # that the end of a run waits for a tracker
STATES = ("finished", "stopped", "failed")  # Ctrl-C stops a run


def state_of(error: BaseException | None) -> str:
  """Returns the one of `STATES` in which an error leaves a run."""
  finished, stopped, failed = STATES
  if error is None:
    return finished
  return failed if isinstance(error, Exception) else stopped


@runtime_checkable
class Tracker(Protocol):
  """A `MetricWriter` of one service; all but `errors` is called in a thread.

  Attributes:
    PACKAGE: What to import.
    id: What finds the run again.
    where: Where to see it: an address, or a folder.
  """

  PACKAGE: str
  id: str
  where: str

  def __init__(self, workdir: str, name: str, id: str | None):
    """Opens a run, or reopens one.

    Args:
      workdir: Folder of the run.
      name: A name for the run where the environment has none.
      id: The tracker's id of the run that resumes; None: a new one.
    """

  @staticmethod
  def errors() -> str | None:
    """Returns why it could not write, as far as that shows offline."""

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Writes every option of the run, as "data.dataset" -> value."""

  def write_scalars(
    self, step: int, scalars: Mapping[str, float], time: float
  ) -> None:
    """Writes a row; `time` is in seconds since the epoch."""

  def close(self, state: str) -> None:
    """Ends the run as one of `STATES`."""


class WandB:
  """Weights & Biases. The x axis is the metric "step"."""

  PACKAGE = "wandb"

  def __init__(self, workdir: str, name: str, id: str | None):
    import wandb

    is_local = "://" not in workdir
    folder = os.environ.get("WANDB_DIR") or (workdir if is_local else ".")
    self._run = wandb.init(
      id=id or secrets.token_hex(4),
      resume="allow",
      project=os.environ.get("WANDB_PROJECT") or PROJECT,
      name=os.environ.get("WANDB_NAME") or name,
      dir=folder,
      reinit="create_new",  # others may be open in this process
      settings=wandb.Settings(
        console="off",
        silent=True,
        # Its process may be killed with this one, and has 15 s of rows.
        x_transaction_log_flush_interval=1.0,
      ),
    )
    self._run.define_metric("*", step_metric="step")
    self.id = self._run.id
    self.where = (self._run.settings.mode == "online" and self._run.url) or (
      os.path.join(folder, "wandb")
    )

  @staticmethod
  def errors() -> str | None:
    import wandb

    if wandb.setup().settings.mode != "online" or wandb.login(
      prompt=False, verify=False
    ):
      return None
    return (
      "got no API key, expected one: run `wandb login`, or set WANDB_API_KEY,"
      " or WANDB_MODE=offline"
    )

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    # Options such as log_steps may differ in a run that resumes.
    self._run.config.update(dict(hparams), allow_val_change=True)

  def write_scalars(
    self, step: int, scalars: Mapping[str, float], time: float
  ) -> None:
    self._run.log({"step": step, **scalars})

  def close(self, state: str) -> None:
    self._run.finish(exit_code=int(state != STATES[0]))


class MLflow:
  """MLflow; of the names of metrics, what it refuses becomes "_"."""

  PACKAGE = "mlflow"
  STATUS = dict(zip(STATES, ("FINISHED", "KILLED", "FAILED"), strict=True))
  MAX_PARAMS = 100  # in a request
  MAX_CHARACTERS = 6000  # of a parameter

  def __init__(self, workdir: str, name: str, id: str | None):
    from mlflow import MlflowClient

    self._client = MlflowClient()
    self._is_new = id is None
    if id:
      self._client.update_run(id, status="RUNNING")
    else:
      run_name = os.environ.get("MLFLOW_RUN_NAME") or name
      run = self._client.create_run(self._experiment(), run_name=run_name)
      id = run.info.run_id
    self.id = id
    self.where = f"{self._client.tracking_uri}, run {id}"

  @staticmethod
  def errors() -> str | None:
    from mlflow import MlflowClient

    try:
      MlflowClient()
    except Exception as e:
      return f"{_sentence(e)} Set MLFLOW_TRACKING_URI to a server's address"
    return None

  def _experiment(self) -> str:
    """Returns the id of the experiment, which is made if it does not exist."""
    if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
      return number
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    experiment = self._client.get_experiment_by_name(name)
    if experiment:
      return experiment.experiment_id
    return self._client.create_experiment(name)

  @staticmethod
  def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    if not self._is_new:
      return  # a parameter cannot be changed
    params = [
      Param(self._allowed(k), str(v)[: self.MAX_CHARACTERS])
      for k, v in hparams.items()
    ]
    for i in range(0, len(params), self.MAX_PARAMS):
      some = params[i : i + self.MAX_PARAMS]
      self._client.log_batch(self.id, params=some)

  def write_scalars(
    self, step: int, scalars: Mapping[str, float], time: float
  ) -> None:
    from mlflow.entities import Metric

    milliseconds = int(time * 1000)
    metrics = [
      Metric(self._allowed(k), v, milliseconds, step)
      for k, v in scalars.items()
    ]
    self._client.log_batch(self.id, metrics=metrics)

  def close(self, state: str) -> None:
    self._client.set_terminated(self.id, self.STATUS[state])


# The choices of config.trackers.
TRACKERS: dict[str, type[Tracker]] = {"wandb": WandB, "mlflow": MLflow}


def errors(config: Config) -> list[str]:
  """Returns what keeps the trackers of a run from writing."""
  texts = []
  for name in config.trackers:
    kind = TRACKERS[name]
    try:
      error = not_installed([kind.PACKAGE], EXTRA) or kind.errors()
    except Exception as e:  # such as a key that cannot be one
      error = _sentence(e)
    if error:
      texts.append(f"config.trackers: {name}: {error.rstrip('.')}.")
  return texts


class AsyncTracker:
  """A `MetricWriter` that passes rows to one tracker, in a thread.

  A tracker without a run gets the rows before, too. One that goes on with its
  run gets only new rows: those of steps that are computed again after a kill
  come twice, and those that it refused, or that waited when the process was
  killed, do not come.

  Args:
    name: Its name in `TRACKERS`.
    workdir: Folder of the run.
    config: The run.
    rows: The rows that metrics.jsonl has at the start.
    is_resumed: Whether the run resumes; a new run is one of the tracker, too.
    note: Prints a line.
  """

  def __init__(
    self,
    name: str,
    workdir: str,
    config: Config,
    rows: Sequence[Row],
    is_resumed: bool,
    note: Callable[[str], None],
  ):
    self._name, self._workdir, self._config = name, workdir, config
    self._note = note
    self._file = epath.Path(workdir) / "trackers" / f"{name}.json"
    self._num_lost = 0
    self._has_failed = False
    self._state = STATES[0]
    id = self._read_id() if is_resumed else None
    # Rows as arguments of `write_scalars`; None: the end.
    self._queue: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
    if id is None:
      self._remove_id()  # of a run before this one
      for row in rows:
        self._queue.put(atomic_files.split_row(row))
    self._thread = threading.Thread(
      target=self._work, args=[id], name=f"tracker {name}", daemon=True
    )
    self._thread.start()

  def write_scalars(
    self, step: int, scalars: Mapping[str, float], time: float | None = None
  ) -> None:
    """Hands a row to the thread, and returns at once."""
    self._queue.put((step, scalars, time_lib.time() if time is None else time))

  def flush(self) -> None:
    """Does not wait: the thread writes as fast as it can."""

  def close(self, state: str = STATES[0]) -> None:
    """Waits until all is written, for at most `CLOSE_SECONDS`."""
    self._state = state
    self._queue.put(None)
    self._thread.join(CLOSE_SECONDS)
    if self._thread.is_alive():
      self._note(
        f"{self._name:<11} has not answered for {CLOSE_SECONDS:.0f} s; the last"
        " rows may be missing there. metrics.jsonl has them all."
      )
    elif self._num_lost:
      self._note(
        f"{self._name:<11} lacks {self._num_lost:,} rows; metrics.jsonl has"
        " them all."
      )

  def _read_id(self) -> str | None:
    """Returns the id of the tracker's run; None if it has none."""
    values, errors = atomic_files.read_json(self._file)
    id = values.get("id")
    if isinstance(id, str):
      return id
    if values or errors:
      self._note(
        f"{self._name:<11} {self._file} cannot be read"
        f" ({errors[0] if errors else 'no id'}). It gets a new run, with all"
        " rows of metrics.jsonl."
      )
    return None

  def _remove_id(self) -> None:
    try:
      with atomic_files.os_errors(self._file):
        self._file.unlink(missing_ok=True)
    except OSError as e:
      self._note_error(e)

  def _write_id(self, id: str) -> None:
    try:
      with atomic_files.os_errors(self._file):
        self._file.parent.mkdir(parents=True, exist_ok=True)
      atomic_files.replace_text(self._file, json.dumps({"id": id}) + "\n")
    except OSError as e:
      self._note_error(e)

  def _work(self, id: str | None) -> None:
    tracker = None
    try:
      name = epath.Path(os.path.abspath(self._workdir)).name or self._name
      tracker = TRACKERS[self._name](self._workdir, name, id)
      self._write_id(tracker.id)
      tracker.write_hparams(flat(to_dict(self._config)))
      self._note(f"{self._name:<11} {tracker.where}")
    except Exception as e:  # a service may raise anything
      self._note_error(e)
    while (row := self._queue.get()) is not None:
      try:
        if tracker is not None:
          tracker.write_scalars(*row)
        self._num_lost += tracker is None
      except Exception as e:
        self._num_lost += 1
        self._note_error(e)
    try:
      if tracker is not None:
        tracker.close(self._state)
    except Exception as e:
      self._note_error(e)

  def _note_error(self, error: Exception) -> None:
    """Prints the first error; a service that is away would fill the screen."""
    if not self._has_failed:
      self._note(
        f"{self._name:<11} failed: {_sentence(error)} The run goes on without"
        " it where it must; metrics.jsonl has every row."
      )
    self._has_failed = True


def _sentence(error: Exception) -> str:
  """Returns the first line of an error, as a sentence."""
  lines = str(error).strip().splitlines() or [""]
  text = f"{type(error).__name__}: {lines[0]}".strip(": ").rstrip(".")
  return f"{text}."
