"""Means over the evaluators of a group, such as few-shot data sets."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def groups(evals: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
  """Returns the evaluators of each group by its name, in their order.

  Args:
    evals: Options of evaluators, `EvaluatorConfig`.
  """
  found: dict[str, tuple[Any, ...]] = {}
  for e in evals:
    if e.group is not None:
      found[e.group] = (*found.get(e.group, ()), e)
  return found


class Averages:
  """Adds the mean over a group to the scores of its last evaluator.

  So mean and scores are one line of a file: both are there, or neither. Every
  evaluator has the same weight; a metric is averaged if all of them have it.

  Args:
    evals: Options of the evaluators that score.
    step: Step of `scores`; None: none.
    scores: Metrics that were written at that step before the run resumed.
  """

  def __init__(
    self,
    evals: Iterable[Any],
    step: int | None = None,
    scores: Mapping[str, float] | None = None,
  ):
    self._groups = {
      group: [e.name for e in members]
      for group, members in groups(evals).items()
    }
    # Step -> evaluator -> its metrics.
    self._waiting: dict[int, dict[str, dict[str, float]]] = {}
    for key, value in (scores or {}).items():
      self._take(step, key, float(value))

  def with_means(
    self, step: int, scores: Mapping[str, float]
  ) -> dict[str, float]:
    """Returns the scores of one evaluator, and means that they complete.

    Returns:
      The scores, and for each group that is complete by them `<group>/<metric>`
      and `<group>/sets`, the number of evaluators.
    """
    for key, value in scores.items():
      self._take(step, key, value)
    found, waiting = dict(scores), self._waiting.get(step, {})
    owners = {key.split("/")[0] for key in scores}
    for group, names in self._groups.items():
      if owners.isdisjoint(names) or not waiting.keys() >= set(names):
        continue
      members = [waiting.pop(name) for name in names]
      shared = [m for m in members[0] if all(m in other for other in members)]
      found |= {
        f"{group}/{m}": float(np.mean([other[m] for other in members]))
        for m in shared
      }
      found[f"{group}/sets"] = float(len(names))
    return found

  def _take(self, step: int, key: str, value: float) -> None:
    name, _, metric = key.partition("/")
    if any(name in names for names in self._groups.values()):
      of_step = self._waiting.setdefault(step, {})
      of_step.setdefault(name, {})[metric] = value
