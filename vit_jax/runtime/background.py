"""Scores that the host computes while the devices continue to train."""

import collections
import concurrent.futures
from collections.abc import Iterator
from typing import Any

import jax


class Background:
  """A thread for the second phase of evaluations, in the order of their starts.

  An evaluator's `gather` needs the devices and is done at once; its `score`
  needs only the host. Only process 0 scores: only process 0 writes.
  """

  def __init__(self):
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "scores")
    self._pending: collections.deque = collections.deque()

  def start(self, step: int, evaluator: Any, params: Any) -> None:
    """Gathers now, scores later; all processes must call it.

    Args:
      step: Updates applied to the parameters.
      evaluator: An `Evaluator`.
      params: Parameters of the model; may be donated afterwards.
    """
    gathered = evaluator.gather(params)
    if jax.process_index() == 0:
      future = self._worker.submit(evaluator.score, gathered)
      self._pending.append((step, future))

  def finished(self, wait: bool) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields (step, scores) in the order of the starts, each once.

    An error of `score` is raised here.

    Args:
      wait: Whether to wait for all that were started.
    """
    while self._pending and (wait or self._pending[0][1].done()):
      step, future = self._pending.popleft()
      yield step, future.result()

  def close(self) -> None:
    """Ends the thread without waiting for it; unread scores are lost."""
    self._worker.shutdown(wait=False, cancel_futures=True)
