"""Accuracy of each class, which classes are confused, and calibration.

Each evaluation also writes `<name>_classes.json` to the folder of the run,
in place of the previous one. `vit-jax report` shows its contents:

  dataset, split, count   what was scored, and the number of images
  classes                 each class that is a label or a prediction: class
                          (column of the head), name, count (its images), right
                          (images that are predicted right), predicted (images
                          with this prediction)
  confusions              [class, predicted class, images], the most frequent
                          first; a matrix would be mostly zeros
  bins                    15 bins of equal width, by rising confidence: count,
                          confidence (mean), right (share of the images); the
                          last two are null for an empty bin
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vit_jax.class_names import Head
from vit_jax.evaluators.classification import (
  Classification,
  ClassificationConfig,
)
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  Outputs,
  Params,
  Splits,
  multilabel_error,
)

FILE = "{}_classes.json"  # {} is the name of the evaluator
FEW = 10  # images of a class: of fewer, one is more than 10 % of its accuracy


@dataclasses.dataclass(frozen=True)
class PerClassConfig(ClassificationConfig):
  """Accuracy and confusions of each class, calibration, top-1, top-5, loss."""

  name: str = "classes"
  kind: str = "per_class"

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields also an error if an image may have several classes."""
    yield from super().check(where, sources, head, out)
    if sources["split"].is_multilabel:
      yield multilabel_error(where, sources["split"])

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return PerClass(context)


class PerClass(Classification):
  """Scores each class, and the calibration of the confidence."""

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {
      "sums_and_answers": self._sums_and_answers,
      "answers": self._answers,
    }

  def gather(self, params: Params) -> list[dict[str, Any]]:
    """Returns sums, labels and predictions of every batch."""
    batches = self._for_logits(params)
    return list(self.context.forward(self._sums_and_answers, params, batches))

  def score(self, gathered: list[dict[str, Any]]) -> dict[str, float]:
    """Writes the file; returns `Classification`'s scores and two more.

    `<name>/worst_class` is the lowest accuracy of a class; `balanced_accuracy`
    is the mean over the classes. `ece` is the expected calibration error, see
    `metrics.calibration_error`. All are shares. `smallest_class` is the number
    of images of the class with the fewest; it is added if they are fewer than
    `FEW`, because one image then decides `worst_class`. If a probability is
    NaN, no file is written, and `worst_class` and `ece` are NaN.

    Raises:
      DataError: No image has a label.
    """
    from vit_jax.metrics import calibration_error, reliability

    scores = super().score([batch.pop("sums") for batch in gathered])
    rows = {k: np.concatenate([b[k] for b in gathered]) for k in gathered[0]}
    rows = {k: v[rows["mask"]] for k, v in rows.items()}
    name = self.config.name
    if np.isnan(rows["probability"]).any():  # whose class is 0, the first
      return scores | {f"{name}/{k}": np.nan for k in ("worst_class", "ece")}
    label, prediction = rows["label"], rows["prediction"]
    is_right = label == prediction
    classes = per_class(label, prediction)
    shares = [c["right"] / c["count"] for c in classes if c["count"]]
    calibration = rows["probability"], is_right
    counts = np.bincount(label, minlength=self._width)
    fewest = int(counts[self._positions[self._positions >= 0]].min())
    if fewest < FEW:
      scores[f"{name}/smallest_class"] = float(fewest)
    scores |= {
      f"{name}/worst_class": float(np.min(shares)),
      f"{name}/ece": calibration_error(*calibration),
    }
    if self.context.workdir is not None:
      bins = reliability(*calibration)
      self._write(
        {
          "dataset": self.config.dataset,
          "split": self.config.split,
          "count": len(label),
          "classes": [{"name": self._name(c["class"]), **c} for c in classes],
          "confusions": confusions(label, prediction),
          "bins": [
            {
              k: None if np.isnan(v[i]) else v[i].item()
              for k, v in bins.items()
            }
            for i in range(len(bins["count"]))
          ],
        }
      )
    return scores

  def _name(self, column: int) -> str:
    """Returns the name of a column of the head; without a name, its number."""
    if names := self.context.head.class_names:
      return names[column]
    label = next(iter(np.flatnonzero(self._positions == column)), None)
    names = self._source.class_names
    return str(column) if label is None or not names else names[label]

  def _write(self, values: dict[str, Any]) -> None:
    import jax

    from vit_jax.paths import run_path

    if jax.process_index():
      return
    folder = run_path(self.context.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, ensure_ascii=False) + "\n"
    path = folder / FILE.format(self.config.name)
    draft = folder / f"{path.name}.new"  # a reader never sees half of a file
    draft.write_text(text)
    draft.replace(path)


def per_class(
  label: np.ndarray, prediction: np.ndarray
) -> list[dict[str, int]]:
  """Counts the images of each class that is a label or a prediction.

  Args:
    label: Class of each image, int [n].
    prediction: Predicted class of each image, int [n].

  Returns:
    A dict for each class, by rising class: `class`; `count`, its images;
    `right`, its images with a right prediction; `predicted`, all images with
    this prediction.

  Example:
    >>> for row in per_class(np.array([3, 3, 7]), np.array([3, 7, 7])):
    ...   print(*row.values())
    3 2 1 1
    7 1 1 2
  """
  counted = (label, label[label == prediction], prediction)
  width = int(max(label.max(), prediction.max())) + 1
  counts = np.stack([np.bincount(v, minlength=width) for v in counted], 1)
  return [
    dict(zip(("class", "count", "right", "predicted"), (k, *row), strict=True))
    for k, row in enumerate(counts.tolist())
    if any(row)
  ]


def confusions(label: np.ndarray, prediction: np.ndarray) -> list[list[int]]:
  """Counts every pair of a class and a wrong prediction of its images.

  Returns:
    [class, prediction, images], the most frequent first, then by class.

  Example:
    >>> confusions(np.array([3, 3, 7, 1]), np.array([7, 7, 3, 1]))
    [[3, 7, 2], [7, 3, 1]]
  """
  wrong = np.stack([label, prediction], 1)[label != prediction]
  pairs, counts = np.unique(wrong, axis=0, return_counts=True)
  order = np.argsort(-counts, kind="stable")
  return np.column_stack([pairs, counts])[order].tolist()
