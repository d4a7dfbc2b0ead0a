"""The interface of a family of models, without jax."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from vit_jax.options import nearest, option


class Heads(NamedTuple):
  """Self-attention of the tokens of an image.

  num_tokens: Number of tokens, class token included.
  num_heads: Number of heads.
  head_dim: Width of a head.
  """

  num_tokens: int
  num_heads: int
  head_dim: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The network: options of all families, and what a family states about it.

  A family is a subclass in its own file, with its options as fields, and a line
  in `FAMILIES`. `config.model.name` chooses it.
  """

  name: str = ""
  variant: str = ""
  head_bias: float = option(
    0.0, "initial bias of the head, logits; -10 suits sigmoid on many classes"
  )
  dtype: str = option(
    "float32",
    "type of the matrix products",
    {
      "float32": "24 bits of mantissa",
      "bfloat16": "8 bits of mantissa, the range of float32",
    },
  )

  # How parameters are split: the end of a path (a regular expression) -> the
  # axes of each of its last dimensions: None, "fsdp", "tensor", or both. The
  # first match counts, also for the optimizer's moments. Paths that no rule
  # matches are not split.
  SHARDING: ClassVar[tuple[tuple[str, tuple], ...]] = ()
  # Kernels of matrix products (a regular expression, or None), cast to `dtype`
  # before the all-gather instead of after it.
  CAST: ClassVar[str | None] = None
  # Parameters of all blocks of a scan (a regular expression, or None), which
  # its body all-gathers block by block.
  SCANNED: ClassVar[str | None] = None
  # Name of a variant -> the published files that fit it.
  PUBLISHED: ClassVar[dict[str, tuple[str, ...]]] = {}
  # Options that change no parameter but the function: an import reports those
  # with which the weights were not trained.
  NUMERICS: ClassVar[tuple[str, ...]] = ()

  # What families have that lack these options.
  channels = 3
  patch_bias = True
  rope = None
  scan = False
  remat = "none"

  @classmethod
  def unread(cls, options: dict) -> tuple[str, ...]:
    """Returns the options that have no use beside these values, for --help."""
    return ()

  @classmethod
  def knows(cls, variant: str) -> bool:
    """Whether this is the name of one of the family's sizes."""
    raise NotImplementedError

  def errors(self) -> Iterator[str]:
    """Yields errors that the options alone show."""
    for field in dataclasses.fields(self):
      choices, value = field.metadata.get("choices"), getattr(self, field.name)
      # jax has more types than a run may choose.
      if choices and value not in (None, *choices) and field.name != "dtype":
        yield (
          f"config.model.{field.name}: got {value!r}, expected one of"
          f" {', '.join(choices)}.{nearest(str(value), choices)}"
        )

  def size_errors(self, image_size: tuple[int, int]) -> Iterator[str]:
    """Yields why images of (height, width) pixels do not fit the model."""
    return iter(())

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns rows and columns of tokens, or of the last feature map."""
    raise NotImplementedError

  def forward_macs(self, image_size: tuple[int, int], num_classes: int) -> int:
    """Returns multiply-adds of one image's forward pass, products only.

    Args:
      image_size: (height, width) in pixels.
      num_classes: Width of the head.
    """
    raise NotImplementedError

  def train_flops(self, image_size: tuple[int, int], num_classes: int) -> int:
    """Returns FLOPs of one image's training step: 2 per multiply-add, 3 passes.

    The backward pass costs two forward ones; recomputed products do not count,
    as is usual for model FLOPs utilisation (MFU).
    """
    return 6 * self.forward_macs(image_size, num_classes)

  def attention(self, image_size: tuple[int, int]) -> Heads | None:
    """Returns the shape of self-attention that a fused kernel may compute.

    None: there is no attention, or one that only XLA can compute.
    """
    return None

  def num_tokens(self, image_size: tuple[int, int]) -> int | None:
    """Returns the number of tokens of an image; None: the model has none."""
    return None

  @property
  def has_cls_row(self) -> bool:
    """Whether a position table begins with a row for the class token."""
    return False

  def with_patch(self, patch: int) -> "ModelConfig":
    """Returns the model with patches of another side, in pixels.

    Raises:
      ValueError: It has no patches of pixels.
    """
    raise ValueError(
      f"patch: got {patch}, but {self.variant} has no patches of pixels;"
      " expected none."
    )

  @property
  def pixel_patch(self) -> int | None:
    """Side in pixels of the patches, if a token depends on its patch alone.

    The module then has `embed` and `encode`, and the options have `size`; see
    `ViT`. None: there are no such tokens.
    """
    return None

  def for_inference(self) -> "ModelConfig":
    """Returns the model without the options that only training needs."""
    return dataclasses.replace(self, dtype="float32")

  def stacked(self) -> "ModelConfig | None":
    """Returns the model with its blocks in a scan; None: it has no blocks.

    The number of parameters is the same, and one block is compiled.
    """
    return None

  def unstacked(self) -> "ModelConfig":
    """Returns the model with a loop over its blocks."""
    return self

  def recomputed(self) -> tuple["ModelConfig", ...]:
    """Returns the model with each value of `remat`, "none" first."""
    return (self,)
