"""Scores that the host works out while the devices go on training."""

import collections
import concurrent.futures
from collections.abc import Iterator
from typing import Any

import jax


class Background:
  """A thread for the second half of evaluations, first come, first served.

  An evaluator's `gather` needs the devices and is done at once; its `score`
  needs the host alone. Only process 0 scores: only process 0 writes.
  """

  def __init__(self):
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "scores")
    self._pending: collections.deque = collections.deque()

  def start(self, step: int, evaluator: Any, params: Any) -> None:
    """Gathers now, scores later; all processes must call it.

    Args:
      step: Updates applied to the parameters.
      evaluator: An `Evaluator`.
      params: Those of the model; may be donated afterwards.
    """
    gathered = evaluator.gather(params)
    if jax.process_index() == 0:
      future = self._worker.submit(evaluator.score, gathered)
      self._pending.append((step, future))

  def finished(self, wait: bool) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields (step, scores) in the order of the starts, each once.

    An error of `score` is raised here.

    Args:
      wait: For all that were started, instead of taking what is there.
    """
    while self._pending and (wait or self._pending[0][1].done()):
      step, future = self._pending.popleft()
      yield step, future.result()

  def close(self) -> None:
    """Ends the thread; what was not taken is lost, and nobody waits for it."""
    self._worker.shutdown(wait=False, cancel_futures=True)
