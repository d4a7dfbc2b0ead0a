"""A family of one file, whose options are texts until they are needed."""

from __future__ import annotations

import dataclasses
from typing import Optional

from vit_jax.families import ModelConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Bags(ModelConfig):
  """Bags of patches: a dense layer for each patch, and their mean."""

  variant: str = option("Bag", "name for messages", {"Bag": "the only one"})
  patch: int = option(8, "side of the patches in pixels")
  width: int = option(16, "features of a patch")
  scale: Optional[float] = option(None, "factor of the logits; None: 1")  # noqa: UP045

  SHARDING = ((r"head/kernel", ("fsdp", "tensor")),)

  def errors(self):
    yield from super().errors()
    if self.width < 1:
      yield f"config.model.width: got {self.width}, expected 1 or more."

  def grid(self, image_size):
    return image_size[0] // self.patch, image_size[1] // self.patch

  def forward_macs(self, image_size, num_classes):
    pixels = image_size[0] * image_size[1] * self.channels
    return pixels * self.width + self.width * num_classes

  def build(self, num_classes):
    from my_lab.module import Bag

    return Bag(self, num_classes)
