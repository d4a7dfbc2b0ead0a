"""Classes of images, by the cross-entropy of a softmax or of sigmoids."""

import dataclasses
from collections.abc import Iterator

from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Classification:
  """The classes of an image, by cross-entropy."""

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
    """Yields what is wrong with the options, one text a fault."""
    if not 0 <= self.label_smoothing < 1:
      yield (
        f"config.objective.label_smoothing: got {self.label_smoothing},"
        " expected a share from 0 to below 1."
      )
