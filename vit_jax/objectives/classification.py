"""Classification, by the cross-entropy of a softmax or of sigmoids."""

import dataclasses
from collections.abc import Iterator

from vit_jax.batch import normalise
from vit_jax.objectives import mixing
from vit_jax.objectives.objective import Learner, Objective
from vit_jax.options import AT_LEAST_0, SHARE, option, unexpected


@dataclasses.dataclass(frozen=True)
class Classification(Objective):
  """Classification of images, by cross-entropy."""

  kind: str = "classification"
  loss: str = option(
    "softmax",
    "cross-entropy of the logits",
    {
      "softmax": "one distribution over the classes",
      "sigmoid": "an independent probability for each class",
      "bce": "as sigmoid, with the mean over the classes instead of the sum",
    },
  )
  label_smoothing: float = option(
    0.0,
    "share of the target spread over all classes, 0 to 1; DeiT: 0.1",
    limit=SHARE,
  )
  mixup: float = option(
    0.0,
    "alpha of mixup's Beta distribution, one draw a step; 0: off",
    limit=AT_LEAST_0,
  )
  cutmix: float = option(
    0.0,
    "alpha of cutmix; with both, each takes half of the steps; DeiT: 1.0",
    limit=AT_LEAST_0,
  )
  binary_targets: bool = option(
    False,
    "targets above 0 become 1 after mixing (DeiT III); for the losses sigmoid"
    " and bce",
  )
  class_weights: str = option(
    "none",
    "weights of the classes in the loss of a softmax",
    {
      "none": "1",
      "balanced": "n / (C n_c) for the n images and C classes of data.split"
      " and the n_c images of class c, so that all classes count alike",
    },
  )

  @property
  def head_loss(self) -> str:
    """See `Objective`."""
    return self.loss

  @property
  def counts_classes(self) -> bool:
    """See `Objective`."""
    return self.class_weights == "balanced"

  @property
  def passes_images(self) -> bool:
    """See `Objective`."""
    return not (self.mixup or self.cutmix)

  def errors(self) -> Iterator[str]:
    """See `Objective`."""
    if self.counts_classes and self.loss != "softmax":
      expected = f"'none' for config.objective.loss={self.loss!r}"
      yield unexpected("config.objective.class_weights", "'balanced'", expected)
    if self.binary_targets and (self.loss == "softmax" or self.label_smoothing):
      yield unexpected(
        "config.objective.binary_targets",
        f"true with loss={self.loss!r}, label_smoothing={self.label_smoothing}",
        "loss='sigmoid' or 'bce' (targets of a softmax sum to 1) and"
        " label_smoothing=0 (which makes all targets more than 0)",
      )

  def data_errors(self, data) -> Iterator[str]:
    """See `Objective`."""
    name = getattr(data, "name", type(data).__name__)
    if getattr(data, "is_regression", False):
      expected = f"'regression' for {name!r}, whose labels are numbers"
      yield unexpected("config.objective.kind", repr(self.kind), expected)
    if self.counts_classes and not callable(getattr(data, "labels", None)):
      expected = f"'none': {name!r} has no labels() -> int [num_examples]"
      yield unexpected("config.objective.class_weights", "'balanced'", expected)
    if self.loss == "softmax" and getattr(data, "is_multilabel", False):
      expected = (
        f"'sigmoid', because an image of {name!r} can have many classes"
      )
      yield unexpected("config.objective.loss", "'softmax'", expected)

  def paired(self, batch):
    """See `Objective`."""
    return mixing.paired(batch) if self.mixup or self.cutmix else batch

  def make(self, model, run_shape, models):
    """Returns the network and its loss; see `Objective.make`.

    Args:
      model: `config.model`.
      run_shape: num_classes is the width of the head; labels().class_counts
        decide the class weights (all 1 if None).
      models: Not used.

    With class weights w, the loss of an image is -sum_k w_k target_k log p_k,
    also for mixed and smoothed targets, as in PyTorch for targets that are
    probabilities. The mean over a batch divides by the number of images.
    (PyTorch divides by the sum of weights if targets are classes. An image
    would then count less beside other rare ones.)
    """
    import jax.numpy as jnp

    from vit_jax.losses import LOSSES, balanced_weights, smooth, targets_of
    from vit_jax.models import build

    module = build(model, run_shape.num_classes)
    cross_entropy = LOSSES[self.loss]

    def examples(batch):
      targets = targets_of(batch["label"], run_shape.num_classes)
      return normalise(batch["image"]), smooth(targets, self.label_smoothing)

    def loss(params, batch, rng, step):
      images, targets = examples(batch)
      if partner := batch.get(mixing.PARTNER):
        images, targets = mixing.mix(
          *(images, targets, examples(partner), partner["mask"]),
          *(rng, self.mixup, self.cutmix),
        )
      if self.binary_targets:
        targets = jnp.asarray(targets > 0, targets.dtype)
      logits, _ = module.apply(
        {"params": params},
        images,
        is_training=True,
        records=batch["index"],
        rngs={"dropout": rng},
      )
      if self.counts_classes and (counts := run_shape.labels().class_counts):
        targets *= balanced_weights(counts, run_shape.num_classes)[None]
      total = jnp.sum(cross_entropy(logits, targets) * batch["mask"])
      return total, jnp.sum(batch["mask"], dtype=jnp.float32), {}

    return Learner(module, loss)
