"""Writes metrics to `metrics.jsonl` and TensorBoard, from process 0 only.

And to the trackers of the run, see `vit_jax.runtime.trackers`.
"""

import json
import time
from collections.abc import Callable

import jax
from etils import epath

from vit_jax.config import Config
from vit_jax.runtime import trackers
from vit_jax.runtime.board import Board
from vit_jax.runtime.run_info import replace_text

METRICS = "metrics.jsonl"
SCORES = "evaluation.jsonl"  # from checkpoints, by `vit_jax.evaluate`


class Writer:
  """Appends scalars to the files of a run; a context, which closes them.

  Args:
    workdir: Folder of the run.
    resumed_at: Step at which the run resumes; later lines of an interrupted run
      are dropped, since they will be written again.
    config: The run, for its trackers; None: it has none.
    note: Prints a line on them.

  Attributes:
    scores: Metrics of evaluators, by name, that were written at step
      `resumed_at`; known to process 0 only.
  """

  def __init__(
    self,
    workdir: str,
    resumed_at: int = 0,
    config: Config | None = None,
    note: Callable[[str], None] = print,
  ):
    self._file = self._board = None
    self._trackers: list[trackers.Sender] = []
    self.scores: dict[str, float] = {}
    if jax.process_index() != 0:
      return
    rows = read_metrics(workdir)
    kept = [r for r in rows if r["step"] <= resumed_at]
    dropped = [r for r in rows if r["step"] > resumed_at]
    self.scores = {
      k: v
      for r in kept
      for k, v in r.items()
      if r["step"] == resumed_at and "/" in k and not k.startswith("train/")
    }
    path = epath.Path(workdir) / METRICS
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(json.dumps(r) + "\n" for r in kept))
    self._file = path.open("a")
    self._board = Board(workdir, kept)
    self._trackers = trackers.senders(
      config, workdir, resumed_at, (kept, dropped), note
    )

  @property
  def scored(self) -> set[str]:
    """The evaluators of `scores`."""
    return {key.split("/")[0] for key in self.scores}

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Writes one line; `step` is the number of updates applied."""
    if self._file is None:
      return
    row = {"step": step, "time": round(time.time(), 3), **values}
    self._file.write(json.dumps(row) + "\n")
    self._file.flush()
    self._board.write(row)
    for tracker in self._trackers:
      tracker.put(row)

  def close(self, state: str = "finished") -> None:
    """Closes the files; `state`, of `trackers.STATES`, is for the trackers."""
    if self._file is not None:
      self._file.close()
      self._board.close()
    for tracker in self._trackers:
      tracker.close(state)

  def __enter__(self):
    return self

  def __exit__(self, kind: type | None, *_) -> None:
    finished, stopped, failed = trackers.STATES
    if kind is None:
      self.close(finished)
    else:
      self.close(failed if issubclass(kind, Exception) else stopped)


def read_metrics(workdir: str) -> list[dict]:
  """Returns the lines of a run's metrics; a line cut off is left out."""
  path = epath.Path(workdir) / METRICS
  rows = []
  for line in path.read_text().splitlines() if path.exists() else []:
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError:
      continue  # the process died while writing it
  return rows
