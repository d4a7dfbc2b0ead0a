"""Metrics for W&B or a tracker of one's own, beside the files of a run.

Each tracker writes in a thread of its own, so that it cannot stop a run or
delay a step. Its first exception is printed, and the run goes on. Environment
variables (docs/tasks/extend.md) say where it writes. The id of its run is in
trackers/NAME.json of the workdir, so that a resumed run continues the same
tracker run.
"""

import json
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from etils import epath

from vit_jax import names
from vit_jax.config import Config, flat, json_file, to_dict
from vit_jax.options import not_installed
from vit_jax.paths import is_remote, run_path
from vit_jax.writers import atomic_files
from vit_jax.writers.atomic_files import Row

PROJECT = "vit_jax"  # project if the environment names none
EXTRA = "trackers"
CLOSE_SECONDS = 60.0  # seconds that the end of a run waits for a tracker
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


@runtime_checkable
class Tracker(Protocol):
  """The interface of one service, used in a thread of its own.

  Attributes:
    PACKAGE: The package to import.
    id: Identifies the tracker's run.
    where: Where to see it: an address, or a folder.
  """

  PACKAGE: str
  id: str
  where: str

  def __init__(self, workdir: str, name: str, id: str | None):
    """Opens a run, or reopens one.

    Args:
      workdir: Folder of the run.
      name: A name for the run if the environment has none.
      id: The tracker's id of the run that resumes; None for a new one.
    """

  @staticmethod
  def error() -> str | None:
    """Returns why it could not write, as far as can be checked offline."""

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Writes every option of the run, as "data.dataset" -> value."""

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes metrics of a step."""

  def close(self, state: str = FINISHED) -> None:
    """Ends the run as finished, stopped (by Ctrl-C) or failed."""


class WandB:
  """Weights & Biases. The x axis is the metric "step"."""

  PACKAGE = "wandb"

  def __init__(self, workdir: str, name: str, id: str | None):
    import wandb

    own = "." if is_remote(workdir) else workdir
    folder = os.environ.get("WANDB_DIR") or own
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
  def error() -> str | None:
    import wandb

    if wandb.setup().settings.mode != "online" or wandb.login(
      prompt=False, verify=False
    ):
      return None
    return "expected WANDB_API_KEY, WANDB_MODE=offline or a `wandb login`"

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    # Options such as log_steps may differ in a run that resumes.
    self._run.config.update(dict(hparams), allow_val_change=True)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    self._run.log({"step": step, **scalars})

  def close(self, state: str = FINISHED) -> None:
    self._run.finish(exit_code=int(state != FINISHED))


# config.trackers has these names, or import paths of classes with the interface
# of `Tracker`.
TRACKERS: dict[str, type[Tracker]] = {"wandb": WandB}


def _tracker(name: str) -> type:
  return names.resolve(name, TRACKERS, "config.trackers")


def errors(config: Config) -> list[str]:
  """Returns why the trackers of a run could not write."""
  texts = []
  for name in config.trackers:
    try:
      kind = _tracker(name)
    except ValueError as e:
      texts.append(str(e))
      continue
    try:
      error = not_installed([kind.PACKAGE], EXTRA) or kind.error()
    except Exception as e:  # such as a key that cannot be one
      error = _sentence(e)
    if error:
      texts.append(f"config.trackers: {name}: {error.rstrip('.')}.")
  return texts


class AsyncTracker:
  """A `MetricWriter` that passes rows to one tracker, in a thread.

  A tracker that has no run yet also gets the earlier rows. One that resumes its
  run gets only new rows. Rows of steps that are computed again after a kill
  come twice.

  Args:
    name: Its name in `TRACKERS`, or its import path.
    workdir: Folder of the run.
    config: The run.
    rows: The rows in metrics.jsonl at the start.
    is_resumed: Whether the run resumes; otherwise it is a new run of the
      tracker.
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
    self._file = run_path(workdir) / "trackers" / f"{name}.json"
    self._has_failed = False
    self._state = FINISHED
    # Arguments of `write_scalars`; None: the end.
    self._queue: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
    id = self._read_id() if is_resumed else None
    for row in rows if id is None else ():
      step, metrics, _ = atomic_files.split_row(row)
      self._queue.put((step, metrics))
    self._thread = threading.Thread(
      target=self._work, args=[id], name=f"tracker {name}", daemon=True
    )
    self._thread.start()

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Passes a row to the thread, and returns at once."""
    self._queue.put((step, scalars))

  def flush(self) -> None:
    """Does not wait: the thread writes as fast as it can."""

  def close(self, error: BaseException | None = None) -> None:
    """Waits until everything is written, for at most `CLOSE_SECONDS`.

    Args:
      error: What ended the run, for the tracker; None if it is finished.
    """
    if error is not None:
      self._state = FAILED if isinstance(error, Exception) else STOPPED
    self._queue.put(None)
    self._thread.join(CLOSE_SECONDS)
    if self._thread.is_alive():
      self._note(
        f"{self._name:<11} has not answered for {CLOSE_SECONDS:.0f} s and may"
        " lack rows; metrics.jsonl has every row."
      )

  def _work(self, id: str | None) -> None:
    """Opens the tracker, writes rows until the end, and closes it."""
    tracker = None
    try:
      name = epath.Path(os.path.abspath(self._workdir)).name or self._name
      tracker = _tracker(self._name)(self._workdir, name, id)
      self._write_id(tracker.id)
      tracker.write_hparams(flat(to_dict(self._config)))
      self._note(f"{self._name:<11} {tracker.where}")
    except Exception as e:  # a service may raise anything
      self._note_error(e)
    while (row := self._queue.get()) is not None:
      try:
        if tracker is not None:
          tracker.write_scalars(*row)
      except Exception as e:
        self._note_error(e)
    try:
      if tracker is not None:
        tracker.close(self._state)
    except Exception as e:
      self._note_error(e)

  def _read_id(self) -> str | None:
    """Returns the id of the tracker's run; None if it has none."""
    try:
      id = json_file.read(self._file).get("id")
    except ValueError as e:
      self._note(f"{self._name:<11} {e} It gets a new run, with all rows.")
      return None
    return id if isinstance(id, str) else None

  def _write_id(self, id: str) -> None:
    try:
      with atomic_files.os_errors(self._file):
        self._file.parent.mkdir(parents=True, exist_ok=True)
      atomic_files.replace_text(self._file, json.dumps({"id": id}) + "\n")
    except OSError as e:
      self._note_error(e)

  def _note_error(self, error: Exception) -> None:
    """Prints the first error; a service that is down would print many."""
    if not self._has_failed:
      end = "The run goes on; metrics.jsonl has every row."
      self._note(f"{self._name:<11} failed: {_sentence(error)} {end}")
    self._has_failed = True


def _sentence(error: Exception) -> str:
  """Returns the first line of an error, as a sentence."""
  lines = str(error).strip().splitlines() or [""]
  text = f"{type(error).__name__}: {lines[0]}".strip(": ").rstrip(".")
  return f"{text}."
