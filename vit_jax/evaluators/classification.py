"""Top-1, top-5 and loss over a whole split, every example exactly once."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.batch import Batch
from vit_jax.config import ClassificationConfig, Config
from vit_jax.data.pipeline import eval_batches
from vit_jax.data.sources import open_source
from vit_jax.evaluators.forward import forward
from vit_jax.losses import LOSSES, PROBABILITIES, targets_of
from vit_jax.metrics import mean, sum_and_count, top_k_correct
from vit_jax.sharding import replicated
from vit_jax.weights import Head, match


class Classification:
  """Scores the head of a model on a split.

  Args:
    config: What to score; dataset and batch_size are set.
    run: The run it belongs to: its loss, and whether data are made up, of
      which two batches are scored.
    predict: (params, uint8 images) -> (logits, out).
    mesh: Where it runs.
    random_params: Not needed here.
    head: The classes of the logits; labels are matched with them.
  """

  def __init__(
    self,
    config: ClassificationConfig,
    run: Config,
    predict: Callable,
    mesh: Mesh,
    random_params: Callable,
    head: Head,
  ):
    del random_params
    self.config = config
    self._mesh = mesh
    source = open_source(
      config.dataset, config.split, run.data.data_dir, fake=run.fake_data
    )
    if run.fake_data:  # a trial: two batches show that it works
      few = min(source.num_examples, 2 * config.batch_size)
      source = dataclasses.replace(source, num_examples=few)
    self._source = source
    self._columns, how = match(source, head)
    self.note = f"{source.name} [{source.split}], {how}"
    loss_fn = LOSSES[run.objective.loss]

    def sums(params, batch):
      """Sums over the rows that count, and how many they are."""
      logits, _ = predict(params, batch["image"])
      labels = batch["label"]
      per_example = {
        "top1": top_k_correct(logits, labels, 1),
        "top5": top_k_correct(logits, labels, 5),
        "loss": loss_fn(logits, targets_of(labels, logits.shape[-1])),
      }
      return {
        k: sum_and_count(v, batch["mask"]) for k, v in per_example.items()
      }

    def probabilities(params, batch):
      return PROBABILITIES[run.objective.loss](
        predict(params, batch["image"])[0]
      )

    def answers(params, batch):
      found = probabilities(params, batch)
      return {"prediction": found.argmax(-1), "probability": found.max(-1)}

    self._sums = jax.jit(sums, out_shardings=replicated(mesh))
    self._answers = jax.jit(answers, out_shardings=replicated(mesh))

  def run(self, params: Any) -> dict[str, float]:
    """Returns `<name>/top1`, `top5` (shares), `loss` (nats), `count`."""
    return self.score(self.gather(params))

  def gather(self, params: Any) -> list[dict[str, Any]]:
    """Runs on the devices: the sums of every batch."""
    return list(forward(self._sums, params, self._batches(), self._mesh))

  def score(self, sums: list[dict[str, Any]]) -> dict[str, float]:
    """Runs on the host; returns what `run` does."""
    scores = {k: mean([s[k] for s in sums]) for k in sums[0]}
    scores["count"] = float(sum(s["top1"][1] for s in sums))
    return {f"{self.config.name}/{k}": v for k, v in scores.items()}

  def predictions(
    self, params: Any, limit: int, num_mistakes: int
  ) -> dict[str, np.ndarray]:
    """Returns the first images and the worst mistakes; one process only.

    The whole split is passed through once more; never more images are held
    than those asked for and two batches.

    Args:
      params: Of the model.
      limit: How many of the first images at most.
      num_mistakes: How many mistakes at most: images whose predicted class is
        none of their labels, by falling probability of that class. Images
        without a label are no mistakes.

    Returns:
      image uint8 [n, h, w, 3], label int [n] or [n, classes], prediction
      int [n] and its probability float [n], by the loss of the run: softmax or
      sigmoid; the same of the mistakes with `mistake_` before the name; and of
      the split `num_images`, how many of them `num_wrong`, its `dataset` and
      `split`. Labels and predictions are columns of the head.
    """
    batches, again = itertools.tee(self._batches())
    answers = forward(self._answers, params, batches, self._mesh)
    first, worst, num_images, num_wrong = {}, {}, 0, 0
    for batch, answer in zip(again, answers, strict=True):
      rows = {"image": batch["image"], "label": batch["label"], **answer}
      rows = _chosen(rows, batch["mask"])
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
    """Yields the split with the head's columns for labels."""
    for batch in eval_batches(
      self._source,
      self.config.ops,
      batch_size=self.config.batch_size,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    ):
      yield {**batch, "label": self._columns[batch["label"]]}


def is_mistake(labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
  """True where an image has labels, and the prediction is none of them.

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
  """Rows of both, in this order; `rows` may be {}."""
  return {k: np.concatenate([rows[k], more[k]]) for k in rows} or more
