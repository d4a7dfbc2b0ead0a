"""The rows of a run's metrics, in one order however long scoring takes.

By step; within a step the row of training comes first, then those of the
evaluators in the order of the config. A row waits for the scores before it. So
two runs write the same rows, and the rows up to a checkpoint are all written
before it is.
"""

import collections
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import threadpoolctl
from jax.experimental import multihost_utils

from vit_jax.callbacks import accounting, nonfinite
from vit_jax.writers import atomic_files, run_info
from vit_jax.writers.averages import Averages
from vit_jax.writers.metric_writer import Writer

POLL_SECONDS = 0.2
KEY = "rows"  # in the metadata of a checkpoint

# Metrics that measure the machine; all others of a run are the same whenever it
# is repeated, or was killed and resumed.
MEASURED = (
  "time",
  "train/images_per_second",
  "train/images_per_second_per_device",
  "train/input_wait",
  "train/mfu",
  "train/peak_bytes",
  *(f"train/{name}" for name in accounting.MEASURED),
)


def _scored(evaluator: Any, gathered: Any) -> dict[str, float]:
  """Returns the scores, with numpy's products on half of the cores.

  Input, and on a CPU training, keep the others busy. A product on all of them
  would wait for its last thread, and the threads spin meanwhile.
  """
  threads = max(1, (os.cpu_count() or 1) // 2)
  with threadpoolctl.threadpool_limits(threads, user_api="blas"):
    return evaluator.score(gathered)


class Rows:
  """Writes rows of training, and of scores that a thread computes.

  An evaluator's `gather` needs the devices and is done at once; its `score`
  needs only the host. Only process 0 scores: only process 0 writes.

  Args:
    writer: Writer of the run.
    evals: Options of the evaluators that score, for means over groups.
    resumed_at: Step at which the run resumes.
    note: Prints a line.
    resumed: Metadata of the checkpoint from which it resumes; {}: none.
  """

  def __init__(
    self,
    writer: Writer,
    evals: Iterable[Any],
    resumed_at: int,
    note: Callable[[str], None],
    resumed: Mapping[str, Any] | None = None,
  ):
    self._writer, self._note = writer, note
    lost = int((resumed or {}).get(KEY, 0)) - writer.num_rows
    if lost > 0 and jax.process_index() == 0:
      # It was killed while it scored after a notice, or the file is another.
      note(
        f"rows        {lost} up to step {resumed_at:,} are not in"
        " metrics.jsonl, nor will they be: they were not written before the"
        " process ended, or were removed"
      )
    self._averages = Averages(evals, resumed_at, writer.scores)
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "scores")
    # Of each row the step, and its values or a future of scores.
    self._queue: collections.deque = collections.deque()

  def put(self, step: int, values: dict[str, float]) -> None:
    """Writes a row of training, as soon as those before it are written."""
    self._queue.append((step, values))
    self.write(wait=False)

  def score(self, step: int, evaluator: Any, params: Any) -> None:
    """Gathers now, scores and writes later; all processes must call it.

    Args:
      step: Updates applied to the parameters.
      evaluator: An `Evaluator`.
      params: Parameters of the model; may be donated afterwards.
    """
    gathered = evaluator.gather(params)
    if jax.process_index() == 0:
      future = self._worker.submit(_scored, evaluator, gathered)
      self._queue.append((step, future))

  def metadata(self, step: int) -> dict[str, int]:
    """Returns, for the checkpoint of the newest step, how many rows there are
    up to it, without those of its own scores that are not known yet."""
    waiting = [s != step or isinstance(v, dict) for s, v in self._queue]
    return {KEY: self._writer.num_rows + sum(waiting)}

  def owed(self, evaluators: Sequence[Any]) -> list[Any]:
    """Returns those without a row at the step of the checkpoint, since the run
    stopped between checkpoint and evaluation; the same in all processes."""
    if not evaluators:
      return []
    scored = [e.config.name in self._writer.scored for e in evaluators]
    scored = multihost_utils.broadcast_one_to_all(np.array(scored, bool))
    return [e for e, done in zip(evaluators, scored, strict=True) if not done]

  def write(
    self,
    wait: bool,
    before: int | None = None,
    until: Callable[[], bool] = lambda: False,
  ) -> None:
    """Writes the rows that are known, up to the first that is not.

    An error of `Evaluator.score` is raised here.

    Args:
      wait: Whether to wait for all.
      before: Scores of this, the newest step are not waited for; None: all are.
      until: Whether not to wait any longer.

    Raises:
      WriteError: An evaluator's own file cannot be written; or as `Writer`.
    """
    while self._queue:
      step, values = self._queue[0]
      if isinstance(values, concurrent.futures.Future):
        while wait and step != before and not (values.done() or until()):
          concurrent.futures.wait([values], POLL_SECONDS)
        if not values.done():
          return
        try:
          scores, told = nonfinite.scores(step, values.result())
        except OSError as e:  # an evaluator's own file
          raise atomic_files.WriteError(
            f"the scores of step {step}: {e}"
          ) from None
        if told:
          self._note(told)
        values = self._averages.with_means(step, scores)
        self._note(run_info.format_scores(step, values))
      self._queue.popleft()
      self._writer.scalars(step, values)

  def close(self) -> None:
    """Ends the thread without waiting for it; unread scores are lost."""
    self._worker.shutdown(wait=False, cancel_futures=True)
