"""Writes metrics to `metrics.jsonl` and TensorBoard, from process 0 only.

And to the trackers of the run, see `vit_jax.writers.trackers`.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator

import jax
from etils import epath

from vit_jax.config import Config
from vit_jax.writers import atomic_files, trackers, uploads
from vit_jax.writers.tensorboard import Board

METRICS = "metrics.jsonl"
SCORES = "evaluation.jsonl"  # from checkpoints, by `vit_jax.commands.evaluate`


class Writer:
  """Appends scalars to the files of a run; a context, which closes them.

  Args:
    workdir: Folder of the run.
    resumed_at: Step at which the run resumes; later lines of an interrupted run
      are dropped, since they will be written again.
    config: The run, for its trackers; None: it has none.
    note: Prints a line on what cannot be read or written, and on trackers.
    guard: Called before each row, and before each upload to a bucket; what it
      raises ends the run. See `lock.Lock.check`.

  Attributes:
    scores: Metrics of evaluators, by name, that were written at step
      `resumed_at`; known to process 0 only.
    num_rows: Rows of the run so far; known to process 0 only.

  Raises:
    WriteError: metrics.jsonl cannot be read or written now. Later on its rows
      wait in memory, see `files.Records`; TensorBoard alone is given up.
  """

  def __init__(
    self,
    workdir: str,
    resumed_at: int = 0,
    config: Config | None = None,
    note: Callable[[str], None] = print,
    guard: Callable[[], None] = lambda: None,
  ):
    self._lines: atomic_files.Records | None = None
    self._board: Board | None = None
    self._note, self._guard = note, guard
    self._trackers: list[trackers.Sender] = []
    self.scores: dict[str, float] = {}
    self.num_rows = 0
    if jax.process_index() != 0:
      return
    self._path = path = epath.Path(workdir) / METRICS
    rows, faults = atomic_files.rows_of(atomic_files.contents(path), path)
    for fault in faults:
      note(f"metrics     {fault}")
    kept = [r for r in rows if r["step"] <= resumed_at]
    self.num_rows = len(kept)
    self.scores = {
      k: v
      for r in kept
      for k, v in r.items()
      if r["step"] == resumed_at and "/" in k and not k.startswith("train/")
    }
    text = "".join(json.dumps(r) + "\n" for r in kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    self._lines = uploads.records(path, text.encode(), note, guard)
    with self._board_may_fail():
      self._board = Board(workdir, kept, guard)
    self._trackers = trackers.senders(config, workdir, rows, resumed_at, note)

  @property
  def scored(self) -> set[str]:
    """The evaluators of `scores`."""
    return {key.split("/")[0] for key in self.scores}

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Writes one line; `step` is the number of updates applied."""
    if self._lines is None:
      return
    self._guard()
    row = {"step": step, "time": round(time.time(), 3), **values}
    self._lines.append(json.dumps(row).encode() + b"\n")
    self.num_rows += 1
    if self._board is not None:
      with self._board_may_fail():
        self._board.write(row)
    for tracker in self._trackers:
      tracker.put(row)

  def due(self) -> None:
    """Sees that the rows are on their way to a bucket; does not wait for it."""
    if self._lines is not None:
      self._lines.due()

  def close(self, state: str = "finished") -> None:
    """Closes the files; `state`, of `trackers.STATES`, is for the trackers.

    Raises:
      WriteError: Rows are not in metrics.jsonl; the text says where they are.
    """
    if left := self._end(state):
      raise atomic_files.WriteError(left)

  def _end(self, state: str) -> str | None:
    """Closes the files; returns what became of rows that are not in them."""
    if self._board is not None:
      with self._board_may_fail():
        self._board.close()
    for tracker in self._trackers:
      tracker.close(state)
    lines, self._lines = self._lines, None
    return lines.close() if lines else None

  @contextlib.contextmanager
  def _board_may_fail(self) -> Iterator[None]:
    try:
      with atomic_files.os_errors(self._path):
        yield
    except OSError as e:
      self._board = None
      self._note(
        f"tensorboard cannot be written ({atomic_files.reason(e)}): the run"
        " goes on"
        " without it; metrics.jsonl has every row, of which the next start"
        " makes it anew"
      )

  def __enter__(self):
    return self

  def __exit__(self, kind: type | None, *_) -> None:
    finished, stopped, failed = trackers.STATES
    if kind is None:
      self.close(finished)
    else:
      is_error = issubclass(kind, Exception)
      if left := self._end(failed if is_error else stopped):
        self._note(f"metrics     {left}")


def read_metrics(workdir: str) -> list[dict]:
  """Returns the lines of a run's metrics; those that are none are left out."""
  return atomic_files.read_rows(epath.Path(workdir) / METRICS).values
