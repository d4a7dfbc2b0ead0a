"""The Vision Transformer and its hybrids: options, sizes, multiply-adds.

"B/16" is a Transformer of size B on patches of 16 pixels. "R50+B/16" is the
same Transformer on the feature map of a ResNet-50 that is 16 times smaller than
the image.

Source: Table 1 of arXiv:2010.11929 (B, L, H), Table 1 of arXiv:2106.10270 (Ti,
  S), Table 2 of arXiv:2106.04560 (g, G), big_vision, models/vit.py (So400m, e);
  section 4.1 of arXiv:2010.11929 for the hybrids.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from vit_jax.families import published, resnet
from vit_jax.families.base import Heads, ModelConfig
from vit_jax.families.resnet import Norms, Stages
from vit_jax.options import ABOVE_0, SHARE, check_choice, option, unexpected


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


# Larger ones, far above any Transformer, are errors.
MAX_DEPTH, MAX_WIDTH = 1000, 1_000_000


class Variant(NamedTuple):
  """The parts of a variant's name.

  size: Size of the Transformer.
  patch: Side of a patch, in pixels, or in points of a ResNet's feature map.
  stages: Stages of the ResNet, or None.
  """

  size: Size
  patch: int
  stages: Stages | None


def parse_variant(variant: str, sizes: Mapping[str, Size] = SIZES) -> Variant:
  """Parses a name such as "B/16" or "R50+B/16".

  The number after the slash is the ratio of the image's side to that of the
  token grid. "R50+B/32" has patches of 1 on the last of four stages. For
  "R50+B/16" the units of the fourth stage move to the third. "R+Ti/16" has only
  the root block and, as in the published code, patches of 8. The root shrinks
  an image by 4, so its grid is 32 times smaller, contrary to the name.

  Args:
    variant: The name.
    sizes: The known sizes by name.

  Raises:
    ValueError: The text has another form, or a part of it is unknown.

  Source: arXiv:2010.11929, section 4.1; vision_transformer, configs/models.py.

  Example:
    >>> parse_variant("R50+B/16").stages
    Stages(blocks=(3, 4, 9), width=1.0)
  """
  match = re.fullmatch(
    r"(?:R([0-9]*)\+)?([A-Za-z0-9]+\+?)/([1-9][0-9]*)", variant
  )
  if not match:
    expected = "'<size>/<patch in pixels>' such as 'B/16', or 'R50+B/16'"
    raise ValueError(f"got {variant!r}, expected {expected}.")
  depth, name, patch = match[1], match[2], int(match[3])
  check_choice(name, sizes, "size")
  if depth is None:
    return Variant(sizes[name], patch, None)
  if not depth:
    if patch % 2:
      raise ValueError(f"got {variant!r}, expected an even number after '/'.")
    return Variant(sizes[name], patch // 2, Stages(()))
  if patch not in (16, 32):
    raise ValueError(f"got {variant!r}, expected /16 or /32 for a hybrid.")
  blocks = resnet.units(int(depth))
  if patch == 16:
    blocks = (*blocks[:2], blocks[2] + blocks[3])
  return Variant(sizes[name], 1, Stages(blocks))


@dataclasses.dataclass(frozen=True)
class ViTConfig(ModelConfig):
  """Transformers on patches of pixels, or behind a ResNet (hybrids)."""

  name: str = "vit"
  variant: str = option(
    "B/16", f"size ({' '.join(SIZES)}) / patch in pixels: B/16, R50+B/16"
  )
  width: int | None = option(None, "width of a token; None: the variant's")
  depth: int | None = option(None, "number of blocks; None: the variant's")
  mlp_dim: int | None = option(
    None, "hidden width of the MLP; None: the variant's"
  )
  num_heads: int | None = option(
    None, "attention heads; None: the variant's; must divide the width"
  )
  pool: str = option(
    "token",
    "what the head gets",
    {
      "token": "the class token",
      "gap": "the mean over all tokens",
      "map": "the tokens pooled by attention",
    },
  )
  posemb: str = option(
    "learn",
    "positions of tokens",
    {
      "learn": "a learned table, added to the tokens",
      "learn2d": "a learned table of rows and one of columns, added",
      "relative": "learned vectors of offsets, in every attention",
      "sincos2d": "fixed sines and cosines, added",
      "none": "no positions",
    },
  )
  posemb_at: str = option(
    "stem",
    "where learned tables are added",
    {
      "stem": "to the tokens, before the first block",
      "blocks": "at the beginning of every block, each with its own",
      "shared": "at the beginning of every block, the same",
    },
  )
  cls_row: bool = option(
    True,
    "whether the learned table has a row for the class token; files of"
    " big_vision and some of timm have none",
  )
  channels: int = option(
    3,
    "channels of an image; 1: images become grey; other numbers need your own"
    " loader. The patch embedding of weights is adapted",
  )
  pre_logits: bool = option(
    False, "tanh layer, as wide as a token, before the head"
  )
  gelu: str = option(
    "tanh",
    "form of GELU",
    {
      "tanh": "tanh approximation, as in Google's weights",
      "erf": "exact, as in PyTorch's libraries",
    },
  )
  ln_eps: float = option(
    1e-6,
    "epsilon of LayerNorm; Hugging Face's ViT files have 1e-12",
    limit=ABOVE_0,
  )
  dropout: float = option(0.0, "dropout rate, 0 to 1", limit=SHARE)
  stochastic_depth: float = option(
    0.0,
    "drop path rate of the last block, 0 to 1; linear in depth",
    limit=SHARE,
  )
  scan: bool = option(
    False,
    "scan over stacked blocks: one block is compiled for any depth, and with"
    " mesh.fsdp parameters are all-gathered block by block",
  )
  remat: str = option(
    "none",
    "what the backward pass recomputes, to save memory",
    {
      "none": "nothing; in a scan all but products and sums",
      "dots": "all but products with weights",
      "full": "whole blocks",
    },
  )
  stage_blocks: tuple[int, ...] | None = option(
    None, "units in each stage of a hybrid's ResNet; None: the variant's"
  )
  stage_width: float | None = option(
    None, "factor of the widths of a hybrid's ResNet; None: the variant's"
  )
  gn_eps: float | None = option(
    None,
    "epsilon of a hybrid's GroupNorm; None: 1e-6",
    is_rare=True,
    limit=ABOVE_0,
  )
  ws_eps: float | None = option(
    None,
    "epsilon of a hybrid's weight standardisation; None: 1e-5",
    is_rare=True,
    limit=ABOVE_0,
  )
  ws_eps_on: str | None = option(
    None,
    "what a hybrid's ws_eps is added to; None: the deviation",
    {"var": "the variance", "std": "the standard deviation"},
    is_rare=True,
  )

  NUMERICS: ClassVar = ("gelu", "ln_eps", "posemb_at")
  BLOCKS: ClassVar = "Transformer/encoderblock_{}"
  SCANNED: ClassVar = "Transformer/encoderblock"
  STEM: ClassVar = (
    r"(embedding|conv_root|gn_root|block\d+)/.*|cls|dist|registers"
    r"|Transformer/(posembed_input|pre_norm)/.*"
  )
  PATCHES: ClassVar = "embedding"
  POSITIONS: ClassVar = {
    r"posembed_input/pos_embedding": "grid",
    r"posembed_input/pos_embedding_x": "columns",
    r"posembed_input/pos_embedding_y": "rows",
    r".*/relative_bias": "relative_bias",
  }
  CLASS_TOKENS: ClassVar = ("cls", "dist")
  MATRICES: ClassVar = {
    r"(query|key|value)/kernel": (1, 2),
    r"out/kernel": (2, 1),
    r"MlpBlock_0/\w+/kernel": (1, 1),
  }
  QKV: ClassVar = r"(query|key|value)/kernel"
  BEHIND_BLOCKS: ClassVar = (
    "Transformer/encoder_norm",
    "MAPHead_0",
    "pooled_norm",
    "projection",
    "pre_logits",
    "head",
  )
  HEADS: ClassVar = r"head(_dist)?/"
  AFTER_BLOCK: ClassVar = "encoderblock_{}/after_mlp"
  LAST_NORM: ClassVar = "Transformer/encoder_norm"
  SHARDING: ClassVar = (
    # Factors of adapters, with the inputs or the outputs of their kernels.
    (r"(query|key|value)/lora_b", (None, "tensor", "fsdp")),
    (r"out/lora_a", ("tensor", "fsdp", None)),
    (r"(Dense_0|Gate)/lora_b", (None, ("fsdp", "tensor"))),
    (r"Dense_1/lora_a", (("fsdp", "tensor"), None)),
    (r"(query|key|value)/kernel", ("fsdp", "tensor", None)),
    (r"(query|key|value)/bias", ("tensor", None)),
    (r"out/kernel", ("tensor", None, "fsdp")),
    (r"MlpBlock_0/Dense_0/kernel", ("fsdp", "tensor")),
    (r"MlpBlock_0/Dense_0/bias", ("tensor",)),
    (r"MlpBlock_0/Dense_1/kernel", ("tensor", "fsdp")),
    (r"embedding/kernel", (None, None, None, ("fsdp", "tensor"))),
    *resnet.CONV_SHARDING,
    (r"pos_embedding(_[xy])?", (None, None, "fsdp")),
    (r"offsets", (None, "tensor", "fsdp")),
    (r"pre_logits/kernel", ("fsdp", "tensor")),
    *resnet.HEAD_SHARDING,
  )
  BY_HEADS: ClassVar = (
    (r"(query|key|value)/kernel", (None, ("tensor", "fsdp"), None)),
  )
  CAST: ClassVar = r"(^|/)((Transformer|MAPHead_0)/.*|embedding/)kernel$"
  PUBLISHED: ClassVar = published.files("ViT")

  @classmethod
  def unread(cls, options: dict) -> tuple[str, ...]:
    """Returns the options of the ResNet if the model has none."""
    if str(options.get("variant", "")).startswith("R"):
      return ()
    return ("stage_blocks", "stage_width", "gn_eps", "ws_eps", "ws_eps_on")

  @classmethod
  def knows(cls, variant: str) -> bool:
    return "/" in variant

  @property
  def _parsed(self) -> Variant:
    return parse_variant(self.variant)

  @property
  def size(self) -> Size:
    """Returns the sizes of the Transformer, overrides applied.

    Raises:
      ValueError: The variant is unknown.
    """
    fields = [f.name for f in dataclasses.fields(Size)]
    given = {f: getattr(self, f) for f in fields}
    given = {f: v for f, v in given.items() if v is not None}
    return dataclasses.replace(self._parsed.size, **given)

  @property
  def patch(self) -> int:
    """Side of a patch: pixels, or points of the feature map of a ResNet."""
    return self._parsed.patch

  @property
  def pixel_patch(self) -> int | None:
    return None if self.stages else self.patch

  @property
  def stages(self) -> Stages | None:
    """Returns the ResNet before the Transformer, overrides applied, or None."""
    stages = self._parsed.stages
    if stages is None:
      return None
    return resnet.overridden(stages, self.stage_blocks, self.stage_width)

  @property
  def norms(self) -> Norms:
    """Returns the epsilons of the ResNet's norms."""
    return resnet.norms_of(
      resnet.V1_NORMS, self.gn_eps, self.ws_eps, self.ws_eps_on
    )

  @property
  def num_class_tokens(self) -> int:
    """Number of leading tokens that may have rows in the position table."""
    return int(self.pool == "token")

  @property
  def has_cls_row(self) -> bool:
    return self.num_class_tokens > 0 and self.posemb == "learn" and self.cls_row

  @property
  def num_class_rows(self) -> int:
    """Number of rows of the position table before those of the patches."""
    return self.num_class_tokens * self.has_cls_row

  def feature_map(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns the sides of the map, or image, that is cut into patches."""
    stages = self.stages
    return resnet.feature_map(stages, image_size) if stages else image_size

  @property
  def stride(self) -> int:
    probe = 2**14  # pixels; every ResNet of up to 13 halvings divides it
    return self.patch * probe // self.feature_map((probe, probe))[0]

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    height, width = self.feature_map(image_size)
    return height // self.patch, width // self.patch

  def num_tokens(self, image_size: tuple[int, int]) -> int:
    rows, columns = self.grid(image_size)
    return rows * columns + self.num_class_tokens

  def attention(self, image_size: tuple[int, int]) -> Heads | None:
    if self.posemb == "relative":  # only XLA adds the scores of offsets
      return None
    size = self.size
    tokens = self.num_tokens(image_size)
    return Heads(tokens, size.num_heads, size.width // size.num_heads)

  def forward_macs(self, image_size: tuple[int, int], num_classes: int) -> int:
    size, patch = self.size, self.patch
    stages = self.stages
    trunk, channels = (
      resnet.trunk_macs(stages, image_size) if stages else (0, self.channels)
    )
    d, mlp, tokens = size.width, size.mlp_dim, self.num_tokens(image_size)
    block = tokens * (4 * d * d + 2 * d * mlp) + 2 * tokens * tokens * d
    if self.posemb == "relative":
      block += tokens * (2 * tokens - 1) * d
    rows, columns = self.grid(image_size)
    pool, patches = 0, rows * columns
    if self.pool == "map":  # one query attends to all patches, then an MLP
      pool = 2 * patches * d * d + 2 * d * d + 2 * patches * d + 2 * d * mlp
    head = d * num_classes + (d * d if self.pre_logits else 0)
    stem = patches * patch * patch * channels * d
    return trunk + stem + size.depth * block + pool + head

  def with_patch(self, patch: int) -> "ModelConfig":
    if self.stages is not None:
      raise ValueError(unexpected("patch", patch, f"none for {self.variant}"))
    size = self.variant.split("/")[0]
    return dataclasses.replace(self, variant=f"{size}/{patch}")

  def for_inference(self) -> "ModelConfig":
    return dataclasses.replace(
      self,
      dtype="float32",
      scan=False,
      remat="none",
      dropout=0.0,
      stochastic_depth=0.0,
    )

  def stacked(self) -> "ModelConfig":
    return dataclasses.replace(self, scan=True)

  def unstacked(self) -> "ModelConfig":
    return dataclasses.replace(self, scan=False)

  def recomputed(self) -> tuple["ModelConfig", ...]:
    choices = ("none", "dots", "full")
    return tuple(dataclasses.replace(self, remat=r) for r in choices)

  def errors(self) -> Iterator[str]:
    yield from super().errors()
    try:
      size, stages = self.size, self.stages
    except ValueError as e:
      yield f"config.model.variant: {e}"
      return
    if stages:
      yield from resnet.stage_errors(stages)
    for key, value, expected in self._misfits(size, stages):
      yield unexpected(f"config.model.{key}", value, expected)

  def _misfits(
    self, size: Size, stages: Stages | None
  ) -> Iterator[tuple[str, object, str]]:
    """Yields options that do not fit: name, value, expected value."""
    if self.channels < 1 or stages and self.channels != 3:
      expected = "3 for a ResNet" if stages else "1 or more"
      yield "channels", self.channels, expected
    for key in ("stage_blocks", "stage_width"):
      if not stages and getattr(self, key) is not None:
        expected = f"None for config.model.variant={self.variant!r}"
        yield key, getattr(self, key), expected
    if self.posemb_at != "stem" and self.posemb not in ("learn", "learn2d"):
      expected = f"'stem' for config.model.posemb={self.posemb!r}"
      yield "posemb_at", repr(self.posemb_at), expected
    sizes = dataclasses.asdict(size)
    for key, value in sizes.items():
      largest = MAX_DEPTH if key == "depth" else MAX_WIDTH
      if not 1 <= value <= largest:
        yield key, value, f"1 to {largest:,}"
        return
    if size.width % size.num_heads:
      yield "num_heads", size.num_heads, f"a divisor of the width {size.width}"
    if self.posemb == "sincos2d" and (size.width % 4 or size.width < 8):
      expected = (
        "a multiple of 4, 8 or more, for config.model.posemb='sincos2d'"
      )
      yield "width", size.width, expected
    if self.posemb == "learn2d" and size.width % 2:
      expected = "an even number for config.model.posemb='learn2d'"
      yield "width", size.width, expected

  def size_errors(self, image_size: tuple[int, int]) -> Iterator[str]:
    if not any(side % self.patch for side in self.feature_map(image_size)):
      return
    patch = self.stride
    near = [max(1, round(s / patch)) * patch for s in image_size]
    of_patch = f"the patch of {patch} (config.model.variant={self.variant!r})"
    expected = f"multiples of {of_patch}, such as {near[0]}x{near[1]}"
    got = f"images of {image_size[0]}x{image_size[1]} pixels"
    yield unexpected("config.data.ops", got, expected)
