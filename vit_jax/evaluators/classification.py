"""Top-1, top-5 and loss over a whole split, every example exactly once.

Where the data set gives an image any number of classes, a prediction is right
if it is one of them, and images without a class do not count: the rule of
ImageNet's reassessed labels (ReaL, section 4.1 of arXiv:2006.07159).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from vit_jax import class_names
from vit_jax.batch import Batch, DataError
from vit_jax.evaluators.evaluator import Context, Evaluator, EvaluatorConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(EvaluatorConfig):
  """Top-1, top-5 and loss over a whole split."""

  name: str = "val"
  kind: str = "classification"
  split: str = option("validation", "split to score, every example once")
  ops: str = option(
    "decode|resize_small(256)|central_crop(224)", "preprocessing"
  )

  scores_head: ClassVar[bool] = True

  def check(
    self, where: str, sources: Mapping[str, Any], head: Any, out: Any
  ) -> Iterator[str]:
    """Yields a fault where classes of the data are not those of the head."""
    try:
      class_names.match(sources["split"], head)
    except ValueError as e:
      yield f"{where}.dataset: {e}"

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Classification(context)


class Classification(Evaluator):
  """Scores the head of a model on a split; with fake data, two batches of it.

  Labels are matched with the classes of the head by `class_names.match`; the
  loss is that of the run. Images without a label do not count.

  Args:
    context: Its context.
    classes: Labels of the data among which the prediction is sought, int [n];
      images of other classes do not count. None: all columns of the head.

  Raises:
    ValueError: The classes of the data are not those of the head.
  """

  def __init__(self, context: Context, classes: np.ndarray | None = None):
    from vit_jax.losses import LOSSES, PROBABILITIES, targets_of
    from vit_jax.metrics import sum_and_count, top_k_correct

    super().__init__(context)
    source = context.sources["split"]
    if context.config.fake_data:  # a trial: two batches show that it works
      few = min(source.num_examples, 2 * self.config.batch_size)
      source = dataclasses.replace(source, num_examples=few)
    self._source = source
    columns, how = class_names.match(source, context.head)
    self.note += f", {how}"
    width = context.head.num_classes
    # The columns that are scored, and label of the data -> which of these.
    if classes is None:
      self._kept, self._place = np.arange(width), columns
    else:
      self._kept, self._place = columns[classes], np.full(len(columns), -1)
      self._place[classes] = np.arange(len(classes))
    self._width = width
    loss = context.config.objective.loss
    loss_fn = LOSSES[loss]
    # A softmax has no loss for several classes of an image.
    has_loss = loss != "softmax" or not source.is_multilabel

    def logits_of(params, batch):
      logits, _ = context.predict(params, batch["image"])
      return logits if classes is None else logits[:, self._kept]

    def sums(params, batch):
      """Returns sums over the rows that count, and their number."""
      logits, labels = logits_of(params, batch), batch["label"]
      per_example = {
        "top1": top_k_correct(logits, labels, 1),
        "top5": top_k_correct(logits, labels, 5),
      }
      if has_loss:
        targets = targets_of(labels, logits.shape[-1])
        per_example["loss"] = loss_fn(logits, targets)
      return {
        k: sum_and_count(v, batch["mask"]) for k, v in per_example.items()
      }

    def answers(params, batch):
      found = PROBABILITIES[loss](logits_of(params, batch))
      return {"prediction": found.argmax(-1), "probability": found.max(-1)}

    def sums_and_answers(params, batch):
      found = {k: batch[k] for k in ("label", "mask")}
      return found | {
        "sums": sums(params, batch),
        **answers(params, batch),
      }

    def hits(params, batch):
      logits = logits_of(params, batch)
      return {
        "index": batch["index"],
        "mask": batch["mask"],
        "prediction": logits.argmax(-1),
        "is_right": top_k_correct(logits, batch["label"], 1) > 0,
      }

    self._hits = context.jit(hits)
    self._sums = context.jit(sums)
    self._answers = context.jit(answers)
    self._sums_and_answers = context.jit(sums_and_answers)

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`; the answers are those of `predictions`."""
    return {"sums": self._sums, "answers": self._answers}

  def gather(self, params: Any) -> list[dict[str, Any]]:
    """Returns the sums of every batch."""
    return list(self.context.forward(self._sums, params, self._batches()))

  def score(self, gathered: list[dict[str, Any]]) -> dict[str, float]:
    """Returns `<name>/top1`, `top5` (shares), `loss` (nats), `count`.

    The count is of the images that are scored. There is no loss where an image
    has several classes and the loss of the run is a softmax's.

    Raises:
      DataError: No image counts.
    """
    from vit_jax.metrics import mean

    if not any(s["top1"][1] for s in gathered):
      raise DataError(
        f"config.evals.{self.config.name}.split: got {self.config.split!r} of"
        f" {self.config.dataset!r}, in which no image has a class that counts;"
        " expected another split."
      )
    scores = {k: mean([s[k] for s in gathered]) for k in gathered[0]}
    scores["count"] = float(sum(s["top1"][1] for s in gathered))
    return {f"{self.config.name}/{k}": v for k, v in scores.items()}

  def hits(self, params: Any) -> dict[str, np.ndarray]:
    """Returns the answer to every image that counts, in the split's order.

    Two passes with different preprocessing, or models, can so be compared image
    by image.

    Returns:
      index int64 [n], number of the record; prediction int [n], column of the
      head; is_right bool [n], whether it is one of the image's labels.
    """
    parts = self.context.forward(self._hits, params, self._batches())
    rows: dict[str, np.ndarray] = {}
    for part in parts:
      rows = _joined(rows, _chosen(part, part["mask"]))
    rows = _chosen(rows, np.argsort(rows["index"]))
    prediction = self._kept[rows["prediction"]]
    return {
      "index": rows["index"],
      "prediction": prediction,
      "is_right": rows["is_right"],
    }

  def predictions(
    self, params: Any, limit: int, num_mistakes: int
  ) -> dict[str, np.ndarray]:
    """Returns the first images and the worst mistakes; one process only.

    The whole split is passed through once more; at any time at most the images
    asked for and two batches are kept.

    Args:
      params: Parameters of the model.
      limit: Most first images.
      num_mistakes: Most mistakes: images whose predicted class is none of their
        labels, by falling probability of that class. Images without a label are
        no mistakes.

    Returns:
      image uint8 [n, h, w, 3], label int [n] or [n, classes], prediction int
      [n] and its probability float [n], by the loss of the run: softmax or
      sigmoid; the same for the mistakes with `mistake_` before the name; and
      for the split `num_images`, the number of mistakes among them `num_wrong`,
      its `dataset` and `split`. Labels and predictions are columns of the head.
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

  def _batches(self) -> Iterator[Batch]:
    """Yields the split with places among the kept columns for labels."""
    for batch in self.context.batches(self._source):
      label = placed(batch["label"], self._place, len(self._kept))
      has_label = label >= 0 if label.ndim == 1 else label.any(axis=-1)
      yield {**batch, "label": label, "mask": batch["mask"] & has_label}

  def _in_head(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns rows whose labels and predictions are columns of the head."""
    return rows | {
      "label": placed(rows["label"], self._kept, self._width),
      "prediction": self._kept[rows["prediction"]],
    }


def placed(labels: np.ndarray, place: np.ndarray, width: int) -> np.ndarray:
  """Returns labels under other numbers.

  Args:
    labels: [n], -1 for none, or [n, classes], positive where it applies.
    place: Class -> its new number; -1: it has none.
    width: How many new numbers there are.

  Returns:
    int32 [n], -1 for none, or float32 [n, width].

  Example:
    >>> placed(np.array([0, 2, -1]), np.array([5, -1, 3]), 6).tolist()
    [5, 3, -1]
    >>> placed(np.array([[1, 0, 1]]), np.array([2, -1, 0]), 3).tolist()
    [[1.0, 0.0, 1.0]]
  """
  if labels.ndim == 1:
    return np.where(labels >= 0, place[labels], -1).astype(np.int32)
  found = np.zeros([len(labels), width], np.float32)
  found[:, place[place >= 0]] = labels[:, place >= 0]
  return found


def is_mistake(labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
  """Returns whether an image has labels, and the prediction is none of them.

  Args:
    labels: [n], -1 for none, or [n, classes], positive where it applies.
    predictions: [n].

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
