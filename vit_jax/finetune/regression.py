"""Regression: predicts numbers of images, such as an age, by squared error.

The numbers are standardised by their mean and deviation in the training split,
which are stored with the model. So one learning rate suits numbers of any unit,
and several numbers count the same. The squared error is smallest for the mean
of the possible values, and a head of zeros predicts the mean of the data.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from vit_jax.batch import Standardisation, normalise
from vit_jax.objectives.objective import Learner, Objective
from vit_jax.options import unexpected


@dataclasses.dataclass(frozen=True)
class Regression(Objective):
  """Standardised numbers of images, by their mean squared error."""

  kind: str = "regression"

  standardises: ClassVar[bool] = True

  @property
  def head_loss(self) -> str:
    """See `Objective`."""
    return "regression"

  @property
  def passes_images(self) -> bool:
    """See `Objective`."""
    return True

  def data_errors(self, data) -> Iterator[str]:
    """See `Objective`."""
    name = getattr(data, "name", type(data).__name__)
    if not getattr(data, "is_regression", False):
      expected = f"'classification', as the labels of {name!r} are classes"
      yield unexpected("config.objective.kind", repr(self.kind), expected)
    elif not callable(getattr(data, "labels", None)):
      expected = f"labels() -> float32 [num_examples, numbers] of {name!r}"
      yield unexpected("config.objective.kind", repr(self.kind), expected)

  def make(self, model, run_shape, models):
    """Returns the network and its loss; see `Objective.make`.

    The loss of an image is the mean over its numbers of ((number - mean) /
    deviation - output)^2. (The planner's labels have the shape [b]; they count
    for all outputs.)

    Args:
      model: `config.model`.
      run_shape: num_classes is the number of outputs; labels().standardisation
        has mean and deviation (0 and 1 if None).
      models: Not used.
    """
    import jax.numpy as jnp

    from vit_jax.models import build

    outputs = run_shape.num_classes
    module = build(model, outputs)

    def loss(params, batch, rng, step):
      mean, deviation = (
        jnp.asarray(values, jnp.float32)[None]
        for values in run_shape.labels().standardisation
        or Standardisation(outputs * (0.0,), outputs * (1.0,))
      )
      predicted, _ = module.apply(
        {"params": params},
        normalise(batch["image"]),
        is_training=True,
        records=batch["index"],
        rngs={"dropout": rng},
      )
      label = batch["label"].reshape(len(batch["label"]), -1)
      wanted = (label.astype(jnp.float32) - mean) / deviation
      errors = jnp.square(wanted - predicted.astype(jnp.float32)).mean(-1)
      total = jnp.sum(errors * batch["mask"])
      return total, jnp.sum(batch["mask"], dtype=jnp.float32), {}

    return Learner(module, loss)
