"""Classes of images, by the cross-entropy of a softmax or of sigmoids."""

import dataclasses
from collections.abc import Iterator

from vit_jax.batch import normalise
from vit_jax.objectives.objective import Objective
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Classification(Objective):
  """Classes of images, by cross-entropy."""

  kind: str = "classification"
  loss: str = option(
    "softmax",
    "cross-entropy of the logits",
    {
      "softmax": "one distribution over the classes",
      "sigmoid": "a probability for each class by itself",
    },
  )
  label_smoothing: float = option(
    0.0, "share of the target spread over all classes, 0 to 1"
  )

  def faults(self) -> Iterator[str]:
    if not 0 <= self.label_smoothing < 1:
      yield (
        f"config.objective.label_smoothing: got {self.label_smoothing},"
        " expected a share from 0 to below 1."
      )

  def data_faults(self, data) -> Iterator[str]:
    """See `Objective`."""
    if self.loss == "softmax" and getattr(data, "is_multilabel", False):
      name = getattr(data, "name", type(data).__name__)
      yield (
        f"config.objective.loss: got 'softmax', one distribution over the"
        f" classes, but an image of {name!r} has any number of classes;"
        " expected 'sigmoid'."
      )

  def make(self, model, facts):
    """Returns the network and its loss; see `Objective.make`.

    Args:
      model: `config.model`.
      facts: `step.Facts`, of which num_classes is the width of the head.
    """
    import jax.numpy as jnp

    from vit_jax.losses import LOSSES, smooth, targets_of
    from vit_jax.models import build

    module = build(model, facts.num_classes)
    cross_entropy = LOSSES[self.loss]

    def loss_fn(params, batch, rng):
      logits, _ = module.apply(
        {"params": params},
        normalise(batch["image"]),
        is_training=True,
        records=batch["index"],
        rngs={"dropout": rng},
      )
      targets = targets_of(batch["label"], facts.num_classes)
      targets = smooth(targets, self.label_smoothing)
      loss = jnp.sum(cross_entropy(logits, targets) * batch["mask"])
      return loss, jnp.sum(batch["mask"], dtype=jnp.float32), {}

    return module, loss_fn
