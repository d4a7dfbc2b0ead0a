"""Sizes of the models by name: "B/16", "R50+B/16", "R50x2".

"B/16" is a Transformer of size B on patches of 16 pixels, "R50+B/16" the same
on the feature map of a ResNet-50 that is 16 times smaller than the image, and
"R50x2" a ResNet-50 with all widths doubled.

Source: Table 1 of arXiv:2010.11929 (B, L, H), Table 1 of arXiv:2106.10270
(Ti, S), Table 2 of arXiv:2106.04560 (g, G), big_vision, models/vit.py (So400m,
e); section 4.1 of arXiv:2010.11929 and arXiv:1912.11370 for the ResNets.
"""

import dataclasses
import re

from vit_jax.options import nearest


@dataclasses.dataclass(frozen=True)
class Size:
  """Width of the tokens, number of blocks, hidden width of the MLP, heads."""

  width: int
  depth: int
  mlp_dim: int
  num_heads: int


SIZES = {
  "Ti": Size(192, 12, 768, 3),
  "S": Size(384, 12, 1536, 6),
  "B": Size(768, 12, 3072, 12),
  "L": Size(1024, 24, 4096, 16),
  "H": Size(1280, 32, 5120, 16),
  "g": Size(1408, 40, 6144, 16),
  "G": Size(1664, 48, 8192, 16),
  "e": Size(1792, 56, 15360, 16),
  "So400m": Size(1152, 27, 4304, 16),
}


@dataclasses.dataclass(frozen=True)
class Stages:
  """Units in each stage of a ResNet, and the factor of all its widths."""

  blocks: tuple[int, ...]
  width: float = 1.0


RESNETS = {
  26: (2, 2, 2, 2),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),
}


@dataclasses.dataclass(frozen=True)
class Variant:
  """What a name stands for.

  Attributes:
    size: Of the Transformer; None for a ResNet.
    patch: Side of a patch: in pixels, or, behind a ResNet, in points of its
      feature map; None for a ResNet.
    stages: Of the ResNet; None where there is none.
  """

  size: Size | None
  patch: int | None
  stages: Stages | None


def parse_variant(variant: str) -> Variant:
  """Returns what a name such as "B/16", "R50+B/16" or "R50x2" stands for.

  The number after the slash is how much smaller than the image the grid of
  tokens is. "R50+B/32" puts patches of 1 on the last of four stages; for
  "R50+B/16" the units of the fourth stage are moved to the third. "R+Ti/16" has
  the root block alone and, as in the published code, patches of 8: since the
  root shrinks an image by 4, its grid is 32 times smaller, whatever the name
  says.

  Raises:
    ValueError: The text has another form, or a part of it is unknown.

  Source: arXiv:2010.11929, section 4.1; vision_transformer, configs/models.py.

  Example:
    >>> parse_variant("R50+B/16").stages
    Stages(blocks=(3, 4, 9), width=1.0)
  """
  resnet = re.fullmatch(r"R([0-9]+)x([0-9]+(?:\.[0-9]+)?)", variant)
  if resnet:
    depth, width = int(resnet[1]), float(resnet[2])
    if width <= 0:
      raise ValueError(f"got {variant!r}, expected a width factor above 0.")
    return Variant(None, None, Stages(_blocks(depth), width))
  match = re.fullmatch(
    r"(?:R([0-9]*)\+)?([A-Za-z][A-Za-z0-9]*)/([1-9][0-9]*)", variant
  )
  if not match:
    raise ValueError(
      f"got {variant!r}, expected '<size>/<patch in pixels>' such as 'B/16',"
      f" 'R50+B/16' or 'R50x1', with a size of {', '.join(SIZES)}."
    )
  depth, name, patch = match[1], match[2], int(match[3])
  if name not in SIZES:
    raise ValueError(
      f"got size {name!r}, expected one of {', '.join(SIZES)}."
      + nearest(name, SIZES)
    )
  if depth is None:
    return Variant(SIZES[name], patch, None)
  if not depth:
    if patch % 2:
      raise ValueError(f"got {variant!r}, expected an even number after '/'.")
    return Variant(SIZES[name], patch // 2, Stages(()))
  if patch not in (16, 32):
    raise ValueError(
      f"got {variant!r}, expected /16 or /32 behind a ResNet, such as"
      f" 'R{depth}+{name}/16'."
    )
  blocks = _blocks(int(depth))
  if patch == 16:
    blocks = (*blocks[:2], blocks[2] + blocks[3])
  return Variant(SIZES[name], 1, Stages(blocks))


def family(variant: str) -> str:
  """Returns config.model.name of a variant: "bit" for a ResNet, else "vit".

  Example:
    >>> family("R50x1"), family("R50+B/16")
    ('bit', 'vit')
  """
  return "bit" if re.fullmatch(r"R[0-9]+x.*", variant) else "vit"


def _blocks(depth: int) -> tuple[int, ...]:
  if depth not in RESNETS:
    raise ValueError(
      f"got a ResNet-{depth}, expected one of"
      f" {', '.join(f'R{d}' for d in RESNETS)}."
    )
  return RESNETS[depth]
