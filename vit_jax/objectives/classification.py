"""Classes of images, by the cross-entropy of a softmax or of sigmoids."""

import dataclasses
from collections.abc import Iterator

from vit_jax.batch import normalise
from vit_jax.objectives import mixing
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
      "bce": "the same, its mean over the classes instead of their sum",
    },
  )
  label_smoothing: float = option(
    0.0, "share of the target spread over all classes, 0 to 1; DeiT: 0.1"
  )
  mixup: float = option(
    0.0, "alpha of the Beta distribution of mixup's share in a step; 0: off"
  )
  cutmix: float = option(
    0.0,
    "the same for cutmix; with both, half of the steps have either; DeiT: 1.0",
  )

  def errors(self) -> Iterator[str]:
    if not 0 <= self.label_smoothing < 1:
      yield (
        f"config.objective.label_smoothing: got {self.label_smoothing},"
        " expected a share from 0 to below 1."
      )
    yield from mixing.errors(mixup=self.mixup, cutmix=self.cutmix)

  def data_errors(self, data) -> Iterator[str]:
    """See `Objective`."""
    if self.loss == "softmax" and getattr(data, "is_multilabel", False):
      name = getattr(data, "name", type(data).__name__)
      yield (
        f"config.objective.loss: got 'softmax', one distribution over the"
        f" classes, but an image of {name!r} has any number of classes;"
        " expected 'sigmoid'."
      )

  def paired(self, batch):
    """See `Objective`."""
    return mixing.paired(batch) if self.mixup or self.cutmix else batch

  def make(self, model, run_shape):
    """Returns the network and its loss; see `Objective.make`.

    Args:
      model: `config.model`.
      run_shape: `step.RunShape`, of which num_classes is the width of the head.
    """
    import jax.numpy as jnp

    from vit_jax.losses import LOSSES, smooth, targets_of
    from vit_jax.models import build

    module = build(model, run_shape.num_classes)
    cross_entropy = LOSSES[self.loss]

    def examples(batch):
      targets = targets_of(batch["label"], run_shape.num_classes)
      return normalise(batch["image"]), smooth(targets, self.label_smoothing)

    def loss_fn(params, batch, rng):
      images, targets = examples(batch)
      if partner := batch.get(mixing.PARTNER):
        images, targets = mixing.mix(
          *(images, targets, examples(partner), partner["mask"]),
          *(rng, self.mixup, self.cutmix),
        )
      logits, _ = module.apply(
        {"params": params},
        images,
        is_training=True,
        records=batch["index"],
        rngs={"dropout": rng},
      )
      loss = jnp.sum(cross_entropy(logits, targets) * batch["mask"])
      return loss, jnp.sum(batch["mask"], dtype=jnp.float32), {}

    return module, loss_fn
