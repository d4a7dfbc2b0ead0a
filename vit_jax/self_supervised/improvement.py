"""The last line of a run: scores before the first step and after the last."""

from collections.abc import Mapping

from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.progress import note


class Improvement(Callback):
  """Prints at the end how far scores rose, or that they fell.

  A score counts from step 0 if its evaluator has `at_start`, otherwise from its
  first evaluation.

  Args:
    names: Accuracy -> what it is called, such as "knn/20nn" -> "20-NN". Those
      that no evaluator computes are left out. The first one decides whether the
      line says that the model became worse.
  """

  name = "improvement"

  def __init__(self, names: Mapping[str, str]):
    self._names = dict(names)
    self._first: dict[str, tuple[int, float]] = {}
    self._last: dict[str, tuple[int, float]] = {}

  def on_start(self, start, state, saved) -> None:
    """See `Callback`."""
    for name, values in saved.get(self.name, {}).items():
      self._first[name] = tuple(values)

  def state_dict(self, step: int) -> dict:
    """Returns the first scores, with their steps."""
    return {name: list(values) for name, values in self._first.items()}

  def on_scores(self, step: int, scores: dict[str, float]) -> None:
    """See `Callback`."""
    for name in self._names.keys() & scores.keys():
      self._first.setdefault(name, (step, scores[name]))
      self._last[name] = step, scores[name]

  def on_end(self, state) -> None:
    """See `Callback`."""
    if text := self.text():
      note(text)

  def text(self) -> str:
    """Returns the line; "" without two scores of a metric.

    Example:
      >>> line = Improvement({"knn/20nn": "20-NN"})
      >>> line.on_scores(0, {"knn/20nn": 0.408})
      >>> line.on_scores(90, {"knn/20nn": 0.431})
      >>> line.text()
      'result      20-NN 40.8 % -> 43.1 %'
    """
    known = [
      name
      for name in self._names
      if name in self._last and self._last[name][0] > self._first[name][0]
    ]
    if not known:
      return ""
    changes = []
    for name in known:
      (_, before), (_, after) = self._first[name], self._last[name]
      changes.append(
        f"{self._names[name]} {100 * before:.1f} % -> {100 * after:.1f} %"
      )
    (_, before), (_, after) = self._first[known[0]], self._last[known[0]]
    fell = "; it fell: the weights of config.init are better here"
    return f"result      {', '.join(changes)}{fell * (after < before)}"
