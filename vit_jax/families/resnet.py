"""ResNets with GroupNorm and standardised kernels (BiT): sizes, multiply-adds.

"R50x2" is a ResNet-50 with all widths doubled. The Transformer of a hybrid also
has a ResNet in front (`vit_jax.families.vit`).

Source: arXiv:1912.11370; section 4.1 of arXiv:2010.11929.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from vit_jax.families import published
from vit_jax.families.base import ModelConfig
from vit_jax.options import ABOVE_0, option, shown, unexpected

ROOT_CHANNELS = 64
GROUPS = 32  # groups of a GroupNorm
# Larger ones, far above any ResNet, are errors.
MAX_UNITS, MAX_STAGES, MAX_WIDTH = 200, 8, 100
RESNETS = {
  26: (2, 2, 2, 2),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),
}


class Stages(NamedTuple):
  """Units in each stage of a ResNet, and the factor of all its widths."""

  blocks: tuple[int, ...]
  width: float = 1.0


class Norms(NamedTuple):
  """Epsilons of the norms.

  gn_eps: Added to the variance of GroupNorm.
  ws_eps: Added in the standardisation of kernels.
  ws_eps_on: Whether ws_eps is added to the variance ("var") or to the standard
    deviation ("std").
  """

  gn_eps: float
  ws_eps: float
  ws_eps_on: str


V1_NORMS = Norms(1e-6, 1e-5, "std")
V2_NORMS = Norms(1e-5, 1e-10, "var")


def units(depth: int) -> tuple[int, ...]:
  """Returns the units of each stage of a ResNet, such as ResNet-50.

  Raises:
    ValueError: The depth is unknown.
  """
  if depth not in RESNETS:
    known = ", ".join(f"R{d}" for d in RESNETS)
    raise ValueError(f"got a ResNet-{depth}, expected one of {known}.")
  return RESNETS[depth]


def parse_variant(variant: str) -> Stages:
  """Returns the stages of "R50x2".

  Raises:
    ValueError: The text has another form, or the depth is unknown.

  Example:
    >>> parse_variant("R50x2")
    Stages(blocks=(3, 4, 6, 3), width=2.0)
  """
  match = re.fullmatch(r"R([0-9]+)x([0-9]+(?:\.[0-9]+)?)", variant)
  if not match:
    raise ValueError(f"got {variant!r}, expected a ResNet such as 'R50x1'.")
  return Stages(units(int(match[1])), float(match[2]))


def overridden(
  stages: Stages, blocks: tuple[int, ...] | None, width: float | None
) -> Stages:
  """Returns the stages, with the given values in place of their own."""
  return Stages(
    stages.blocks if blocks is None else blocks,
    stages.width if width is None else width,
  )


def norms_of(
  default: Norms, gn_eps: float | None, eps: float | None, on: str | None
) -> Norms:
  """Returns the epsilons, with the given values in place of the defaults."""
  given = (gn_eps, eps, on)
  return Norms(
    *(d if g is None else g for d, g in zip(default, given, strict=True))
  )


def feature_map(stages: Stages, image_size: tuple[int, int]) -> tuple[int, int]:
  """Returns rows and columns of the last feature map of an image.

  The root halves both sides twice, every stage but the first once, rounding up.
  """
  halvings = 2 + max(0, len(stages.blocks) - 1)
  height, width = (-(-side // 2**halvings) for side in image_size)
  return height, width


def trunk_macs(stages: Stages, image_size: tuple[int, int]) -> tuple[int, int]:
  """Returns multiply-adds of root and stages, and channels of the last map."""
  width = round(ROOT_CHANNELS * stages.width)
  height, columns = (-(-side // 2) for side in image_size)
  macs = height * columns * 7 * 7 * 3 * width
  height, columns = -(-height // 2), -(-columns // 2)
  points = height * columns
  channels = width
  for i, num_units in enumerate(stages.blocks):
    narrow = width * 2**i
    for unit in range(num_units):
      before = points
      if i > 0 and unit == 0:
        height, columns = -(-height // 2), -(-columns // 2)
        points = height * columns
      macs += before * channels * narrow + points * 13 * narrow * narrow
      if channels != 4 * narrow or before != points:
        macs += points * channels * 4 * narrow
      channels = 4 * narrow
  return macs, channels


def stage_errors(stages: Stages) -> Iterator[str]:
  """Yields errors of the sizes, with the names of config.model."""
  if any(not 1 <= n <= MAX_UNITS for n in stages.blocks) or (
    len(stages.blocks) > MAX_STAGES
  ):
    expected = f"1 to {MAX_UNITS} each, in at most {MAX_STAGES} stages"
    yield unexpected(
      "config.model.stage_blocks", shown(stages.blocks), expected
    )
  is_whole = round(ROOT_CHANNELS * stages.width) % GROUPS == 0
  if not (0 < stages.width <= MAX_WIDTH and is_whole):
    expected = (
      f"a multiple of {GROUPS / ROOT_CHANNELS:g} up to {MAX_WIDTH}, because the"
      f" norms have {GROUPS} groups"
    )
    yield unexpected("config.model.stage_width", stages.width, expected)


CONV_SHARDING = ((r"conv\w*/kernel", (None, None, None, ("fsdp", "tensor"))),)
HEAD_SHARDING = (
  (r"head/kernel", ("fsdp", "tensor")),
  (r"head/bias", ("tensor",)),
)


@dataclasses.dataclass(frozen=True)
class BiTConfig(ModelConfig):
  """ResNets as BiT released them (V2): norm and ReLU before a convolution."""

  name: str = "bit"
  variant: str = option(
    "R50x1",
    f"depth ({' '.join(map(str, RESNETS))}) and factor of the widths: R50x1",
  )
  stage_blocks: tuple[int, ...] | None = option(
    None, "units in each stage; None: the variant's"
  )
  stage_width: float | None = option(
    None, "factor of all widths; None: the variant's"
  )
  gn_eps: float | None = option(
    None,
    "epsilon of GroupNorm; None: 1e-5 (bit_v1: 1e-6)",
    is_rare=True,
    limit=ABOVE_0,
  )
  ws_eps: float | None = option(
    None,
    "epsilon of the weight standardisation; None: 1e-10 (bit_v1: 1e-5)",
    is_rare=True,
    limit=ABOVE_0,
  )
  ws_eps_on: str | None = option(
    None,
    "what ws_eps is added to; None: the variance (bit_v1: the deviation)",
    {"var": "the variance", "std": "the standard deviation"},
    is_rare=True,
  )
  root_pad: str = option(
    "zero",
    "padding of the root's max pooling; only for bit",
    {
      "zero": "zeros, as in BiT's own code",
      "nothing": "values that are never the maximum, as in big_vision",
    },
    is_rare=True,
  )
  remat: str = option(
    "none",
    "what the backward pass recomputes, to save memory",
    {"none": "nothing", "full": "whole units"},
  )

  FORM: ClassVar[str] = "v2"
  NORMS: ClassVar[Norms] = V2_NORMS
  STEM: ClassVar = r"(conv_root|gn_root|block\d+)/.*"
  SHARDING: ClassVar = (*CONV_SHARDING, *HEAD_SHARDING)
  NUMERICS: ClassVar = ("root_pad", "gn_eps", "ws_eps", "ws_eps_on")
  PUBLISHED: ClassVar = published.files("BiT")

  @classmethod
  def knows(cls, variant: str) -> bool:
    return re.fullmatch(r"R[0-9]+x.*", variant) is not None

  @property
  def stages(self) -> Stages:
    """Returns units and width, overrides applied.

    Raises:
      ValueError: The variant is unknown, or of another family.
    """
    stages = parse_variant(self.variant)
    return overridden(stages, self.stage_blocks, self.stage_width)

  @property
  def norms(self) -> Norms:
    """Returns the epsilons of the norms."""
    return norms_of(self.NORMS, self.gn_eps, self.ws_eps, self.ws_eps_on)

  def errors(self) -> Iterator[str]:
    yield from super().errors()
    try:
      stages = self.stages
    except ValueError as e:
      yield f"config.model.variant: {e}"
      return
    yield from stage_errors(stages)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    return feature_map(self.stages, image_size)

  def forward_macs(self, image_size: tuple[int, int], num_classes: int) -> int:
    macs, channels = trunk_macs(self.stages, image_size)
    return macs + channels * num_classes

  def for_inference(self) -> "ModelConfig":
    return dataclasses.replace(self, dtype="float32", remat="none")

  def recomputed(self) -> tuple["ModelConfig", ...]:
    return tuple(dataclasses.replace(self, remat=r) for r in ("none", "full"))


@dataclasses.dataclass(frozen=True)
class BiTV1Config(BiTConfig):
  """ResNets in the form of the hybrids (V1): norm after a convolution."""

  name: str = "bit_v1"

  FORM: ClassVar[str] = "v1"
  NORMS: ClassVar[Norms] = V1_NORMS
  PUBLISHED: ClassVar = {}

  def errors(self) -> Iterator[str]:
    yield from super().errors()
    if self.root_pad != "zero":
      expected = "'zero' for config.model.name=bit_v1"
      yield unexpected("config.model.root_pad", repr(self.root_pad), expected)
