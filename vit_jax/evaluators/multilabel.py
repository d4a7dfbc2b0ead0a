"""Mean average precision, for images with any number of classes."""

import dataclasses
from collections.abc import Callable

import numpy as np

from vit_jax.batch import DataError
from vit_jax.evaluators.classification import (
  Classification,
  ClassificationConfig,
)
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  Params,
  no_images_error,
)


@dataclasses.dataclass(frozen=True)
class MultilabelConfig(ClassificationConfig):
  """Mean average precision of images with any number of classes."""

  kind: str = "multilabel"

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Multilabel(context)


class Multilabel(Classification):
  """Ranks all images of a split by the logit of each class.

  An image without a class is a negative example for all classes. If every image
  has one class, it is a positive example for this class.
  """

  def __init__(self, context: Context):
    import jax

    from vit_jax.losses import LOSSES

    super().__init__(context)
    columns, num_classes = self._positions, self._source.num_classes
    loss = context.config.objective.head_loss
    # The softmax loss is not defined for an image with several classes.
    loss_fn = None if loss == "softmax" else LOSSES[loss]

    def ranked(params, batch):
      logits = context.predict(params, batch["image"])[0][:, columns]
      label, mask = batch["label"], batch["mask"]
      if label.ndim == 1:
        mask &= label >= 0
        label = jax.nn.one_hot(label, num_classes)
      rows = {"logits": logits, "label": label > 0, "mask": mask}
      return rows | ({"loss": loss_fn(logits, label)} if loss_fn else {})

    self._ranked = context.jit(ranked)

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"ranked": self._ranked, "answers": self._answers}

  def gather(self, params: Params) -> list[dict[str, np.ndarray]]:
    """Returns logits and labels of all images, batch by batch."""
    batches = self.context.for_logits(self._source, params)
    return list(self.context.forward(self._ranked, params, batches))

  def score(self, gathered: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Returns `<name>/map`, the mean over the classes that have an image.

    Other metrics are `classes`, the number of these classes; `count`, the
    number of images; and the `loss` of the run (nats), except for "softmax".

    Raises:
      DataError: No class has an image.
    """
    from vit_jax.metrics import average_precision

    rows = {k: np.concatenate([p[k] for p in gathered]) for k in gathered[0]}
    rows = {k: v[rows["mask"]] for k, v in rows.items()}
    logits, label = rows["logits"], rows["label"]
    occurring = np.flatnonzero(label.any(axis=0))
    if not len(occurring):
      raise DataError(
        no_images_error(self.config.name, self._source, "has a class")
      )
    scores = {
      "map": np.mean(
        [average_precision(logits[:, k], label[:, k]) for k in occurring]
      ),
      "classes": len(occurring),
      "count": len(label),
    }
    if "loss" in rows:
      scores["loss"] = rows["loss"].mean(dtype=np.float64)
    return {f"{self.config.name}/{k}": float(v) for k, v in scores.items()}
