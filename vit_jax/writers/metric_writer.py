"""The rows of a run's metrics: `metrics.jsonl`, TensorBoard and trackers.

Rows come by step. Within a step the row of training comes first, then the
scores of the evaluators in the order of the config. A row waits for earlier
scores, which a thread computes. So repeated runs write the same rows, and all
rows up to a checkpoint can be written before the checkpoint.
"""

import collections
import concurrent.futures
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax import evaluators as evaluators_lib
from vit_jax.config import Config
from vit_jax.evaluators.evaluator import Evaluator, EvaluatorConfig
from vit_jax.paths import is_remote, run_path
from vit_jax.writers import MetricWriter, atomic_files, tensorboard, trackers
from vit_jax.writers.atomic_files import Row

METRICS = "metrics.jsonl"
SCORES = "evaluation.jsonl"  # from checkpoints, by `vit-jax evaluate`
POLL_SECONDS = 0.2

_MEASURED = (
  "time",
  "train/images_per_second",
  "train/images_per_second_per_device",
  "train/input_wait",
  "train/mfu",
  "train/peak_bytes",
  "train/device_hours",
  "train/goodput",
)
T = TypeVar("T")


def is_measured(name: str) -> bool:
  """Whether a metric measures the machine.

  All other metrics are the same if a run is repeated, or is killed and resumed.
  """
  return name in _MEASURED or name.startswith("train/seconds/")


def read_metrics(workdir: str) -> list[Row]:
  """Returns the rows of a run's metrics, without damaged lines."""
  return atomic_files.read_rows(run_path(workdir) / METRICS).rows


class MetricLog:
  """Writes the metrics of a run, in process 0; a context, which closes them.

  Args:
    workdir: Folder of the run.
    start: Step at which the run starts or resumes. Rows of later steps are
      removed, because they will be written again.
    config: The run, for its trackers; None for no trackers.
    evals: Options of the evaluators, for means over groups.
    writer: Also gets the rows from `start` on, and is closed at the end; its
      exceptions end the run. None for no such writer.
    note: Prints a line, on scores and on errors of reading and writing.
    check_owner: Called before each row on a local disk, and before each upload
      to a bucket; raises if another run took the folder.
    has_row: Whether a step has a row of training, beside the first step and
      every config.log_steps.
    until: Returns whether to stop waiting for scores, such as after SIGTERM.
    on_scores: Called in process 0 with the step and the scores of an evaluator,
      in the order of the rows.

  Raises:
    WriteError: metrics.jsonl cannot be read or written now. Later its rows wait
      in memory, see `atomic_files.Records`; TensorBoard and trackers are given
      up.
  """

  def __init__(
    self,
    workdir: str,
    start: int = 0,
    *,
    config: Config | None = None,
    evals: Iterable[EvaluatorConfig] = (),
    writer: MetricWriter | None = None,
    note: Callable[[str], None] = print,
    check_owner: Callable[[], None] = lambda: None,
    has_row: Callable[[int], bool] = lambda step: False,
    until: Callable[[], bool] = lambda: False,
    on_scores: Callable[[int, dict[str, float]], None] = lambda *_: None,
  ):
    self._start, self._has_row, self._until = start, has_row, until
    self._every = config.log_steps if config else 1
    self._note, self._check_owner = note, check_owner
    self._on_scores = on_scores
    self._is_local = not is_remote(workdir)
    self._pool = concurrent.futures.ThreadPoolExecutor(1, "scores")
    # For each row its step, and its values or a future of scores.
    self._queue: collections.deque[
      tuple[int, Mapping[str, float] | concurrent.futures.Future]
    ] = collections.deque()
    self._records: atomic_files.Records | None = None
    self._writers: list[MetricWriter] = []  # which get every row as well
    rows = []
    if jax.process_index() == 0:
      path = run_path(workdir) / METRICS
      old_rows, damaged = atomic_files.parse_rows(atomic_files.contents(path))
      if damaged:
        numbers = atomic_files.lines_text(damaged)
        note(f"metrics     {path}: {numbers}: cut off or damaged; left out")
      rows = [row for row in old_rows if row["step"] <= start]
      path.parent.mkdir(parents=True, exist_ok=True)
      text = "".join(json.dumps(row) + "\n" for row in rows)
      self._records = atomic_files.open_records(
        path, text.encode(), note, check_owner
      )
      self._writers.append(
        tensorboard.TensorBoard(workdir, rows, note, check_owner)
      )
      self._writers += [
        trackers.AsyncTracker(name, workdir, config, rows, start > 0, note)
        for name in (config.trackers if config else ())
      ]
    self._writers += [] if writer is None else [writer]
    scores = [
      (row["step"], name, value)
      for row in rows
      for name, value in row.items()
      if "/" in name and not name.startswith("train/")
    ]
    self._scored = {(step, name.split("/")[0]) for step, name, _ in scores}
    self._means = GroupMeans(evals)
    for step, name, value in scores:
      if step == start:
        self._means.add(step, {name: float(value)})

  def due(self, step: int) -> bool:
    """Whether a step has a row, or is the first of the process."""
    return step == self._start + 1 or self._is_row(step)

  def _is_row(self, step: int) -> bool:
    return step == 1 or step % self._every == 0 or self._has_row(step)

  def write_training(self, step: int, values: Mapping[str, float]) -> None:
    """Writes the metrics of training, if the step has a row.

    Args:
      step: Number of updates applied.
      values: The metrics, which get the names `train/<key>`.
    """
    if self._is_row(step):
      self.write(step, {f"train/{key}": v for key, v in values.items()})

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes a row as soon as earlier rows are written.

    Args:
      step: Number of updates applied.
      values: Metrics, by their names in the file.
    """
    self._queue.append((step, values))
    self.flush(wait=False)

  def write_later(
    self, step: int, score_fn: Callable[[T], Mapping[str, float]], gathered: T
  ) -> None:
    """Computes scores in a thread, and writes them in the order of the steps.

    Args:
      step: Number of updates applied.
      score_fn: `Evaluator.score`, which uses only the host.
      gathered: Its argument, the result of `Evaluator.gather`.
    """
    if jax.process_index() == 0:
      future = self._pool.submit(_score, score_fn, gathered)
      self._queue.append((step, future))

  def flush(self, *, wait: bool = True, before: int | None = None) -> None:
    """Writes the rows that are known, up to the first that is not.

    A run waits for its scores before it saves or evaluates again. When it is
    about to stop, the state comes first, and then the rows before it.

    Exceptions of `score_fn` are raised here.

    Args:
      wait: Whether to wait for scores until the run is about to stop.
      before: Wait for the scores of the steps before this one, also if the run
        is about to stop, and for no others; None for `wait`.

    Raises:
      WriteError: An evaluator's own file cannot be written; or as
        `atomic_files.Records.append`.
    """

    def is_waited_for(step: int) -> bool:
      return step < before if before is not None else wait and not self._until()

    while self._queue:
      step, values = self._queue[0]
      if isinstance(values, concurrent.futures.Future):
        while not values.done() and is_waited_for(step):
          concurrent.futures.wait([values], POLL_SECONDS)
        if not values.done():
          break
        values = self._scores(step, values)
      self._queue.popleft()
      self._write_row(step, values)
    if wait and self._records is not None:
      self._records.flush()
      for writer in self._writers:
        writer.flush()

  def missing(
    self, step: int, evaluators: Sequence[Evaluator]
  ) -> list[Evaluator]:
    """Returns the evaluators without a score at the resumed step. Collective.

    The run stopped between saving and evaluating. All processes get the same
    result.
    """
    if not evaluators:
      return []
    scored = [(step, e.config.name) in self._scored for e in evaluators]
    scored = multihost_utils.broadcast_one_to_all(np.array(scored, bool))
    return [e for e, done in zip(evaluators, scored, strict=True) if not done]

  def close(self, error: BaseException | None = None) -> None:
    """Closes the files; unfinished scores are lost.

    Args:
      error: What ended the run, for the trackers; None if it is finished.

    Raises:
      WriteError: Some rows are not in metrics.jsonl; the message says where
        they are. If there is already an error, the message is printed instead.
    """
    self._pool.shutdown(wait=False, cancel_futures=True)
    with contextlib.ExitStack() as stack:  # closes all, even if one raises
      stack.callback(self._close_records, error)
      for writer in self._writers:
        if isinstance(writer, trackers.AsyncTracker):
          stack.callback(writer.close, error)
        else:
          stack.callback(writer.close)

  def _close_records(self, error: BaseException | None) -> None:
    records, self._records = self._records, None
    unwritten = None if records is None else records.close()
    if unwritten and error is None:
      raise atomic_files.WriteError(unwritten)
    if unwritten:
      self._note(f"metrics     {unwritten}")

  def __enter__(self) -> "MetricLog":
    return self

  def __exit__(self, kind, error: BaseException | None, traceback) -> None:
    self.close(error)

  def _scores(
    self, step: int, future: concurrent.futures.Future
  ) -> dict[str, float]:
    """Returns an evaluator's scores with the means that they complete."""
    try:
      scores, message = finite_scores(step, future.result())
    except OSError as e:  # an evaluator's own file
      raise atomic_files.WriteError(f"the scores of step {step}: {e}") from None
    if message:
      self._note(message)
    scores = self._means.add(step, scores)
    self._note(format_scores(step, scores))
    self._on_scores(step, scores)
    return scores

  def _write_row(self, step: int, values: Mapping[str, float]) -> None:
    if self._records is None:
      return
    if self._is_local:  # a bucket is asked in the thread of the uploads
      self._check_owner()
    now = round(time.time(), 3)
    row = {"step": step, "time": now, **values}
    self._records.append(json.dumps(row).encode() + b"\n")
    for writer in self._writers:
      writer.write_scalars(step, values)


def _score(
  score_fn: Callable[[T], Mapping[str, float]], gathered: T
) -> Mapping[str, float]:
  """Returns the scores, with numpy's products on half of the cores.

  Input, and on a CPU training, use the others. A product on all cores would
  wait for its last thread, and its threads would spin meanwhile.
  """
  import threadpoolctl  # not needed to read metrics, nor installed for it

  threads = max(1, (os.cpu_count() or 1) // 2)
  with threadpoolctl.threadpool_limits(threads, user_api="blas"):
    return score_fn(gathered)


class GroupMeans:
  """Adds the mean over a group to the scores of its last evaluator.

  So mean and scores are in one row: both exist, or neither. Every evaluator has
  the same weight. A metric is averaged if all of them have it.

  Args:
    evals: Options of the evaluators.
  """

  def __init__(self, evals: Iterable[EvaluatorConfig]):
    self._groups = {
      group: [e.name for e in members]
      for group, members in evaluators_lib.groups(evals).items()
    }
    # Step -> evaluator -> its metrics.
    self._waiting: dict[int, dict[str, dict[str, float]]] = {}

  def add(self, step: int, scores: Mapping[str, float]) -> dict[str, float]:
    """Returns the scores of one evaluator, and the means that they complete.

    Returns:
      The scores; for each group that they complete, `<group>/<metric>`, and
      `<group>/sets`, the number of evaluators.
    """
    waiting = self._waiting.setdefault(step, {})
    for key, value in scores.items():
      name, _, metric = key.partition("/")
      if any(name in names for names in self._groups.values()):
        waiting.setdefault(name, {})[metric] = value
    result = dict(scores)
    owners = {key.split("/")[0] for key in scores}
    for group, names in self._groups.items():
      if owners.isdisjoint(names) or not waiting.keys() >= set(names):
        continue
      members = [waiting.pop(name) for name in names]
      shared = [m for m in members[0] if all(m in other for other in members)]
      for metric in shared:
        values = [other[metric] for other in members]
        result[f"{group}/{metric}"] = float(np.mean(values))
      result[f"{group}/sets"] = float(len(names))
    if not waiting:
      del self._waiting[step]
    return result


def finite_scores(
  step: int, scores: Mapping[str, float]
) -> tuple[dict[str, float], str]:
  """Leaves out the scores of an evaluator that are not finite.

  They do not stop the run: its state is finite, and only process 0 knows them.

  Returns:
    The others, with `<evaluator>/not_finite`, the number of scores left out, if
    there are any; a line about them, or "".
  """
  bad = {k: v for k, v in scores.items() if not math.isfinite(v)}
  if not bad:
    return dict(scores), ""
  name = next(iter(bad)).split("/")[0]
  values = ", ".join(f"{k} is {v}" for k, v in bad.items())
  finite = {k: v for k, v in scores.items() if k not in bad}
  return (
    finite | {f"{name}/not_finite": float(len(bad))},
    f"not finite  {values} at step {step}; not written",
  )


# Metrics that are whole numbers.
WHOLE = ("count", "sets", "not_finite", "smallest_class")


def format_scores(step: int, scores: Mapping[str, float]) -> str:
  """Returns an evaluator's results, with baselines on separate lines."""
  rows: dict[str, list[str]] = {}
  for key, value in scores.items():
    name, metric = key.rsplit("/", 1)
    is_whole = metric in WHOLE
    text = f"{value:,.0f}" if is_whole else f"{value:.4f}"
    rows.setdefault(name, []).append(f"{metric} {text}")
  head, width = f"step {step:,}: ", max(map(len, rows))
  lines = [f"{name:<{width}}  {'  '.join(v)}" for name, v in rows.items()]
  return head + ("\n" + " " * len(head)).join(lines)
