"""Accuracies and loss over a whole split, every example exactly once.

`balanced_accuracy` is the mean of the classes' recalls, so that all classes
have the same weight.

If an image may have several classes, a prediction is right if it is one of
them, and images without a class do not count: the rule of ImageNet's reassessed
labels (ReaL, section 4.1 of arXiv:2006.07159).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from vit_jax import class_names
from vit_jax.batch import Batch, DataError
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  EvaluatorConfig,
  Outputs,
  Params,
  Splits,
  no_images_error,
)
from vit_jax.options import option

if TYPE_CHECKING:  # it imports jax
  import clu.metrics


RECALL = "recall"  # number of right images of each class, and of all images


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(EvaluatorConfig):
  """Top-1, top-5 and loss over a whole split."""

  name: str = "val"
  kind: str = "classification"
  split: str = option("validation", "split to score, every example once")
  ops: str = option(
    "decode|resize_small(256)|central_crop(224)", "preprocessing"
  )

  match: str = option(
    "name",
    "how classes of the data are matched to outputs of the head",
    {
      "name": "by name; if one side has no names, by number or position",
      "position": "by number if a class is named by a number, else by position",
    },
  )

  scores_head: ClassVar[bool] = True

  def check(
    self, where: str, sources: Splits, head: class_names.Head, out: Outputs
  ) -> Iterator[str]:
    """Yields an error if the head lacks classes of the data."""
    try:
      class_names.match(sources["split"], head, self.match)
    except ValueError as e:
      yield f"{where}.dataset: {e}"

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Classification(context)


class Classification(Evaluator):
  """Scores the head of a model on a split.

  Labels are matched with the classes of the head by `class_names.match`. The
  loss is the loss of the run. Images without a label do not count. With fake
  data two batches are scored.

  Args:
    context: Context of the evaluator.
    classes: Labels of the data that can be predicted, int [n]; images of other
      classes do not count. None: all outputs of the head can be predicted.

  Raises:
    ValueError: The head lacks classes of the data.
  """

  def __init__(self, context: Context, classes: np.ndarray | None = None):
    import jax.numpy as jnp
    from clu.metrics import Average

    from vit_jax.losses import LOSSES, PROBABILITIES, targets_of
    from vit_jax.metrics import top_k_correct

    super().__init__(context)
    self._source = source = self.few_if_fake(context.sources["split"])
    columns, how = class_names.match(source, context.head, self.config.match)
    self.note += f", {how}"
    width = context.head.num_classes
    # _columns: outputs of the head that are scored. _positions: label of the
    # data -> its position among these columns; -1: none.
    if classes is None:
      self._columns, self._positions = np.arange(width), columns
    else:
      self._columns = columns[classes]
      self._positions = np.full(len(columns), -1)
      self._positions[classes] = np.arange(len(classes))
    self._width = width
    loss = context.config.objective.head_loss
    loss_fn = LOSSES[loss]
    # The softmax loss is not defined for an image with several classes.
    has_loss = loss != "softmax" or not source.is_multilabel

    def logits_of(params, batch):
      logits, _ = context.predict(params, batch["image"])
      return logits if classes is None else logits[:, self._columns]

    def sums(params, batch):
      logits, labels = logits_of(params, batch), batch["label"]
      per_example = {
        "top1": top_k_correct(logits, labels, 1),
        "top5": top_k_correct(logits, labels, 5),
      }
      if has_loss:
        targets = targets_of(labels, logits.shape[-1])
        per_example["loss"] = loss_fn(logits, targets)
      averages = {
        k: Average.from_model_output(v, batch["mask"])
        for k, v in per_example.items()
      }
      if not source.is_multilabel:
        counts = jnp.zeros(logits.shape[-1]).at[labels]
        averages[RECALL] = Average(
          total=counts.add(per_example["top1"] * batch["mask"]),
          count=counts.add(batch["mask"]),
        )
      return averages

    def answers(params, batch):
      p = PROBABILITIES[loss](logits_of(params, batch))
      return {"prediction": p.argmax(-1), "probability": p.max(-1)}

    def sums_and_answers(params, batch):
      return {
        "label": batch["label"],
        "mask": batch["mask"],
        "sums": sums(params, batch),
        **answers(params, batch),
      }

    def hits(params, batch):
      logits = logits_of(params, batch)
      label = {} if source.is_multilabel else {"label": batch["label"]}
      return {
        "index": batch["index"],
        "mask": batch["mask"],
        **label,
        "prediction": logits.argmax(-1),
        "is_right": top_k_correct(logits, batch["label"], 1) > 0,
      }

    self._hits = context.jit(hits)
    self._sums = context.jit(sums)
    self._answers = context.jit(answers)
    self._sums_and_answers = context.jit(sums_and_answers)

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`; "answers" is the function of `predictions`."""
    return {"sums": self._sums, "answers": self._answers}

  def gather(self, params: Params) -> list[dict[str, "clu.metrics.Average"]]:
    """Returns the averages of every batch."""
    batches = self._for_logits(params)
    return list(self.context.forward(self._sums, params, batches))

  def score(
    self, gathered: list[dict[str, "clu.metrics.Average"]]
  ) -> dict[str, float]:
    """Returns `<name>/top1` and `top5` (shares), `loss` (nats) and `count`.

    `count` is the number of scored images. If every image has one class,
    `balanced_accuracy` is also returned. If images may have several classes
    and the loss of the run is "softmax", no loss is returned.

    Raises:
      DataError: No image counts.
    """
    from vit_jax.metrics import merged

    averages = {k: merged(part[k] for part in gathered) for k in gathered[0]}
    count = float(averages["top1"].count)
    if not count:
      raise DataError(
        no_images_error(
          self.config.name, self._source, "has a class that is scored"
        )
      )
    recall = averages.pop(RECALL, None)
    scores = {k: float(v.compute()) for k, v in averages.items()}
    if recall:
      occurs = recall.count > 0
      shares = recall.total[occurs] / recall.count[occurs]
      scores["balanced_accuracy"] = float(shares.mean())
    scores["count"] = count
    return {f"{self.config.name}/{k}": v for k, v in scores.items()}

  def hits(self, params: Params) -> dict[str, np.ndarray]:
    """Returns the prediction of every image that counts, in the split's order.

    Two models, or two preprocessings, are compared image by image with it.

    Returns:
      index: Index of the record in the split, int64 [n].
      label: Column of the head, int [n]; left out if an image may have several
        classes.
      prediction: Column of the head, int [n].
      is_right: Whether the prediction is a label of the image, bool [n].
    """
    parts = self.context.forward(self._hits, params, self._for_logits(params))
    rows: dict[str, np.ndarray] = {}
    for part in parts:
      rows = _joined(rows, _chosen(part, part["mask"]))
    rows = _chosen(rows, np.argsort(rows["index"]))
    del rows["mask"]
    columns = rows.keys() & {"label", "prediction"}
    return rows | {k: self._columns[rows[k]] for k in columns}

  def predictions(
    self, params: Params, limit: int, num_mistakes: int
  ) -> dict[str, np.ndarray]:
    """Returns the first images and the worst mistakes; for one process.

    The whole split passes through the model once more. Only the returned images
    and two batches are in memory.

    Args:
      params: Parameters of the model.
      limit: Largest number of first images.
      num_mistakes: Largest number of mistakes. A mistake is an image whose
        predicted class is none of its labels; the mistakes with the highest
        probability are returned. An image without a label is no mistake.

    Returns:
      image uint8 [n, h, w, 3]; label int [n] or [n, classes]; prediction int
      [n]; probability of the prediction, float [n] (softmax or sigmoid, by the
      loss of the run). The same arrays of the mistakes have names that begin
      with `mistake_`. `num_images`, `num_wrong` (mistakes), `dataset` and
      `split` describe the split. Labels and predictions are columns of the
      head.
    """
    batches, again = itertools.tee(self._batches())
    answers = self.context.forward(self._answers, params, batches)
    first, worst, num_images, num_wrong = {}, {}, 0, 0
    for batch, answer in zip(again, answers, strict=True):
      rows = {"image": batch["image"], "label": batch["label"], **answer}
      rows = self._in_head(_chosen(rows, batch["mask"]))
      wrong = _chosen(rows, is_mistake(rows["label"], rows["prediction"]))
      first = _joined(first, _chosen(rows, slice(max(0, limit - num_images))))
      num_images += len(rows["label"])
      num_wrong += len(wrong["label"])
      worst = _joined(worst, wrong)
      order = np.argsort(-worst["probability"], kind="stable")
      worst = _chosen(worst, order[:num_mistakes])
    return (
      first
      | {f"mistake_{k}": v for k, v in worst.items()}
      | {"num_images": np.array(num_images), "num_wrong": np.array(num_wrong)}
      | {k: np.array(getattr(self.config, k)) for k in ("dataset", "split")}
    )

  def _for_logits(self, params: Params) -> Iterator[Batch]:
    """Yields the batches of `Context.for_logits`, with labels as `_batches`."""
    return self._renumbered(self.context.for_logits(self._source, params))

  def _batches(self) -> Iterator[Batch]:
    """Yields batches of the split; labels are positions among the columns."""
    return self._renumbered(self.context.batches(self._source))

  def _renumbered(self, batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
      label = renumbered(batch["label"], self._positions, len(self._columns))
      has_label = label >= 0 if label.ndim == 1 else label.any(axis=-1)
      yield {**batch, "label": label, "mask": batch["mask"] & has_label}

  def _in_head(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns rows whose labels and predictions are columns of the head."""
    return rows | {
      "label": renumbered(rows["label"], self._columns, self._width),
      "prediction": self._columns[rows["prediction"]],
    }


def renumbered(
  labels: np.ndarray, numbers: np.ndarray, width: int
) -> np.ndarray:
  """Returns labels with new numbers.

  Args:
    labels: Label of each image, [n], -1 for none; or [n, classes], positive for
      the classes of the image.
    numbers: Class -> its new number; -1: none.
    width: Number of new classes.

  Returns:
    int32 [n], -1 for none, or float32 [n, width].

  Example:
    >>> renumbered(np.array([0, 2, -1]), np.array([5, -1, 3]), 6).tolist()
    [5, 3, -1]
    >>> renumbered(np.array([[1, 0, 1]]), np.array([2, -1, 0]), 3).tolist()
    [[1.0, 0.0, 1.0]]
  """
  if labels.ndim == 1:
    return np.where(labels >= 0, numbers[labels], -1).astype(np.int32)
  result = np.zeros([len(labels), width], np.float32)
  result[:, numbers[numbers >= 0]] = labels[:, numbers >= 0]
  return result


def is_mistake(labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
  """Returns whether each image has labels, but not the predicted one, [n].

  Args:
    labels: Label of each image, [n], -1 for none; or [n, classes], positive for
      the classes of the image.
    predictions: Predicted class of each image, [n].

  Example:
    >>> is_mistake(np.array([2, 0, -1]), np.array([2, 1, 1])).tolist()
    [False, True, False]
  """
  if labels.ndim == 1:
    return (labels >= 0) & (labels != predictions)
  hits = np.take_along_axis(labels, predictions[:, None], axis=-1)[:, 0] > 0
  return (labels.max(-1) > 0) & ~hits


def _chosen(rows: dict[str, np.ndarray], index) -> dict[str, np.ndarray]:
  return {k: v[index] for k, v in rows.items()}


def _joined(
  rows: dict[str, np.ndarray], more: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the rows of both, in this order; `rows` may be {}."""
  return {k: np.concatenate([rows[k], more[k]]) for k in rows} or more
