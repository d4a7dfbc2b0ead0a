"""Errors of predicted numbers over a whole split, in the data's units."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from vit_jax.batch import DataError
from vit_jax.class_names import Head, by_name
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  EvaluatorConfig,
  Outputs,
  Params,
  Splits,
  no_images_error,
)
from vit_jax.options import option, unexpected

MOST_POINTS = 2000  # images whose predictions are saved


@dataclasses.dataclass(frozen=True)
class RegressionConfig(EvaluatorConfig):
  """Mean absolute error and R2 of predicted numbers."""

  name: str = "val"
  kind: str = "regression"
  split: str = option("validation", "split to score, every example once")
  ops: str = option("decode|resize(224)", "preprocessing")

  scores_head: ClassVar[bool] = True
  scores_numbers: ClassVar[bool] = True

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields an error if the data have other numbers than the head."""
    source = sources["split"]
    if _columns(source, head) is None:
      got = f"{source.name!r} with {', '.join(source.class_names)}"
      names = ", ".join(head.class_names or ()) or str(head.num_classes)
      yield unexpected(f"{where}.dataset", got, f"the head's {names}")

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Regression(context)


class Regression(Evaluator):
  """Compares predicted numbers with the numbers of a split.

  Numbers are matched with the outputs of the head by name if both have names.
  With fake data two batches are scored.
  """

  def __init__(self, context: Context):
    super().__init__(context)
    self._source = source = self.few_if_fake(context.sources["split"])
    columns = _columns(source, context.head)

    def rows(params, batch):
      outputs, _ = context.predict(params, batch["image"])
      return {
        "output": outputs[:, columns],
        "number": batch["label"],
        "mask": batch["mask"],
      }

    self._columns, self._rows = columns, context.jit(rows)

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"rows": self._rows}

  def gather(self, params: Params) -> list[dict[str, np.ndarray]]:
    """Returns outputs and numbers of all images, batch by batch."""
    batches = self.context.for_logits(self._source, params)
    return list(self.context.forward(self._rows, params, batches))

  def score(self, gathered: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Returns `<name>/mae` and `r2`, means over the outputs, and `count`.

    If there are several outputs, `<name>/<output>/mae` and `r2` of each are
    added. `mae` is in the units of the data; `r2` is the explained share of the
    variance in the split.

    Raises:
      DataError: No image counts.
    """
    rows = {k: np.concatenate([p[k] for p in gathered]) for k in gathered[0]}
    rows = {k: v[rows["mask"]] for k, v in rows.items()}
    number = rows["number"].astype(np.float64)
    if not len(number):
      raise DataError(
        no_images_error(self.config.name, self._source, "can be scored")
      )
    output = self._in_units(rows["output"])
    mae, r2 = np.abs(output - number).mean(0), r_squared(output, number)
    name = self.config.name
    scores = {f"{name}/mae": mae.mean(), f"{name}/r2": r2.mean()}
    scores[f"{name}/count"] = len(number)
    names = self._source.class_names
    for i, output_name in enumerate(names if len(names) > 1 else ()):
      key = f"{name}/{output_name.replace('/', '_')}"
      scores |= {f"{key}/mae": mae[i], f"{key}/r2": r2[i]}
    return {k: float(v) for k, v in scores.items()}

  def _in_units(self, output: np.ndarray) -> np.ndarray:
    """Returns outputs of the head in the units of the data, float64."""
    output = output.astype(np.float64)
    if (of := self.context.head.standardisation) is not None:
      mean, deviation = (np.array(v)[self._columns] for v in of)
      output = output * deviation + mean
    return output

  def predictions(
    self, params: Params, limit: int, num_mistakes: int
  ) -> dict[str, np.ndarray] | None:
    """Returns predicted numbers and the worst images; for one process.

    The whole split passes through the model once more.

    Args:
      params: Parameters of the model.
      limit: Not used.
      num_mistakes: Largest number of worst images. An image is as bad as the
        largest error of its numbers, in units of the split's deviation.

    Returns:
      number and output, float64 [n, outputs], of the first `MOST_POINTS`
      images; worst_image uint8 [m, h, w, 3], worst_number and worst_output;
      names, `num_images`, `dataset` and `split`.
    """
    batches, again = itertools.tee(self.context.batches(self._source))
    parts = self.context.forward(self._rows, params, batches)
    rows = [
      (batch["index"][mask], part["number"][mask], part["output"][mask])
      for batch, part in zip(again, parts, strict=True)
      if (mask := np.asarray(part["mask"])).any()
    ]
    if not rows:
      return None
    index, number, output = map(np.concatenate, zip(*rows, strict=True))
    output = self._in_units(output)
    errors = np.abs(output - number) / np.maximum(number.std(0), 1e-12)
    order = np.argsort(-errors.max(-1), kind="stable")[:num_mistakes]
    # Read again, so that not all images are in memory.
    rising = np.sort(index[order])
    again = self.context.batches(self._source, rising)
    images = np.concatenate([np.asarray(b["image"])[b["mask"]] for b in again])
    images = images[np.searchsorted(rising, index[order])]
    return {
      "number": number[:MOST_POINTS].astype(np.float64),
      "output": output[:MOST_POINTS],
      "worst_image": images,
      "worst_number": number[order].astype(np.float64),
      "worst_output": output[order],
      "names": np.array(self._source.class_names or [], dtype=str),
      "num_images": np.array(len(number)),
      **{k: np.array(getattr(self.config, k)) for k in ("dataset", "split")},
    }


def r_squared(output: np.ndarray, number: np.ndarray) -> np.ndarray:
  """Returns R2 of each output: 1 - sum (y - f)^2 / sum (y - mean y)^2.

  If all numbers of an output are equal, R2 is 1 for exact predictions and 0
  otherwise, as in scikit-learn.

  Args:
    output: The predictions f, float64 [n, outputs].
    number: The true numbers y, float64 [n, outputs].

  Example:
    >>> y = np.array([[1.0], [2.0], [3.0]])
    >>> r_squared(y, y).tolist(), r_squared(0 * y + 2, y).tolist()
    ([1.0], [0.0])
  """
  residual = np.square(number - output).sum(0)
  total = np.square(number - number.mean(0)).sum(0)
  constant = np.where(residual == 0, 1.0, 0.0)
  ratio = residual / np.where(total == 0, 1.0, total)
  return np.where(total == 0, constant, 1 - ratio)


def _columns(source, head: Head) -> np.ndarray | None:
  """Returns the output of the head for each number; None: the names differ."""
  if source.num_classes != head.num_classes:
    return None
  if head.class_names is None or source.class_names is None:
    return np.arange(head.num_classes)
  return by_name(source.class_names, head.class_names)
