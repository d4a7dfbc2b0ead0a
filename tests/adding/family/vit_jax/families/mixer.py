"""MLP-Mixer: options, sizes, arithmetic.

Source: arXiv:2105.01601, Table 1.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from vit_jax.families.base import ModelConfig
from vit_jax.options import nearest, option


class Size(NamedTuple):
  """Width of a token, blocks, hidden widths over tokens and over channels."""

  width: int
  depth: int
  tokens_mlp_dim: int
  channels_mlp_dim: int


SIZES = {"Ti": Size(32, 2, 16, 64), "S": Size(512, 8, 256, 2048)}


@dataclasses.dataclass(frozen=True)
class MixerConfig(ModelConfig):
  """MLP-Mixers: dense layers over tokens and over channels in turn."""

  name: str = "mixer"
  variant: str = option("Mixer-S/16", "Mixer-<size>/<patch in pixels>")
  tokens_dropout: float = option(0.0, "share of tokens dropped, 0 to 1")

  SHARDING: ClassVar = (
    (r"(token|channel)_mixing/Dense_0/kernel", ("fsdp", "tensor")),
    (r"(token|channel)_mixing/Dense_0/bias", ("tensor",)),
    (r"(token|channel)_mixing/Dense_1/kernel", ("tensor", "fsdp")),
    (r"stem/kernel", (None, None, None, ("fsdp", "tensor"))),
    (r"head/kernel", ("fsdp", "tensor")),
    (r"head/bias", ("tensor",)),
  )
  CAST: ClassVar = r"(^|/)(block_\d+/.*|stem/)kernel$"
  PUBLISHED: ClassVar = {
    "Mixer-S/16": ("gs://mixer_models/imagenet21k/Mixer-S_16.npz",)
  }

  @classmethod
  def knows(cls, variant: str) -> bool:
    return variant.startswith("Mixer-")

  @property
  def _parsed(self) -> tuple[Size, int]:
    match = re.fullmatch(r"Mixer-(\w+)/([1-9]\d*)", self.variant)
    if not match or match[1] not in SIZES:
      known = [f"Mixer-{name}/16" for name in SIZES]
      raise ValueError(
        f"got {self.variant!r}, expected such as {', '.join(known)}."
        + nearest(self.variant, known)
      )
    return SIZES[match[1]], int(match[2])

  @property
  def size(self) -> Size:
    return self._parsed[0]

  @property
  def patch(self) -> int:
    return self._parsed[1]

  def errors(self) -> Iterator[str]:
    yield from super().errors()
    if not 0 <= self.tokens_dropout < 1:
      yield (
        f"config.model.tokens_dropout: got {self.tokens_dropout}, expected a"
        " share from 0 to below 1."
      )
    try:
      self._parsed  # noqa: B018
    except ValueError as e:
      yield f"config.model.variant: {e}"

  def size_errors(self, image_size: tuple[int, int]) -> Iterator[str]:
    if any(side % self.patch for side in image_size):
      yield (
        f"config.data.ops: got images of {image_size[0]}x{image_size[1]}"
        f" pixels, expected multiples of the patch of {self.patch}."
      )

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    return image_size[0] // self.patch, image_size[1] // self.patch

  def num_tokens(self, image_size: tuple[int, int]) -> int:
    rows, columns = self.grid(image_size)
    return rows * columns

  def forward_macs(self, image_size: tuple[int, int], num_classes: int) -> int:
    size, tokens = self.size, self.num_tokens(image_size)
    block = 2 * tokens * size.width
    block *= size.tokens_mlp_dim + size.channels_mlp_dim
    stem = tokens * 3 * self.patch**2 * size.width
    return stem + size.depth * block + size.width * num_classes
