"""The interface of a family of models, without jax."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vit_jax.options import nearest, option

if TYPE_CHECKING:
  from flax import linen as nn


class Heads(NamedTuple):
  """Shape of self-attention for one image.

  num_tokens: Number of tokens, class token included.
  num_heads: Number of heads.
  head_dim: Width of a head.
  """

  num_tokens: int
  num_heads: int
  head_dim: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The network: options of all families, and the interface of a family.

  A family is a subclass in its own file, with its options as fields.
  `config.model.name` is its key in `FAMILIES`, or its import path.
  """

  name: str = ""
  variant: str = ""
  head_bias: float = option(
    0.0, "initial bias of the logits; -10 suits a sigmoid loss on many classes"
  )
  dtype: str = option(
    "float32",
    "type of the matrix products",
    {
      "float32": "24 bits of mantissa",
      "bfloat16": "8 bits of mantissa, the range of float32",
    },
  )

  # Sharding of parameters and of their optimizer moments: the end of a path (a
  # regular expression) -> the axes of each of its last dimensions: None,
  # "fsdp", "tensor", or both. The first match counts. Paths without a match are
  # not split.
  SHARDING: ClassVar[tuple[tuple[str, tuple], ...]] = ()
  # Kernels of matrix products (a regular expression, or None), cast to `dtype`
  # before the all-gather instead of after it.
  CAST: ClassVar[str | None] = None
  # Parameters of all blocks of a scan (a regular expression, or None), which
  # its body all-gathers block by block.
  SCANNED: ClassVar[str | None] = None
  # Name of a variant -> the published files that fit it.
  PUBLISHED: ClassVar[dict[str, tuple[str, ...]]] = {}
  # Options that change the function but no parameter. An import reports those
  # that differ from the training of the weights.
  NUMERICS: ClassVar[tuple[str, ...]] = ()

  # Values for families without these options.
  channels = 3
  patch_bias = True
  rope = None
  scan = False
  remat = "none"

  @classmethod
  def unread(cls, options: dict) -> tuple[str, ...]:
    """Returns options that have no effect beside these values, for --help."""
    return ()

  @classmethod
  def knows(cls, variant: str) -> bool:
    """Whether the variant is one of the family's."""
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

  @property
  def stride(self) -> int:
    """Pixels that a side needs for each token; 1: every image size fits."""
    return 1

  def forward_macs(self, image_size: tuple[int, int], num_classes: int) -> int:
    """Returns multiply-adds of one image's forward pass, matrix products only.

    Args:
      image_size: (height, width) in pixels.
      num_classes: Width of the head.
    """
    raise NotImplementedError

  def build(self, num_classes: int) -> "nn.Module":
    """Returns the network, for `vit_jax.models.build`, which says what it does.

    Families outside of `vit_jax` import their module here. A subclass of a
    family of `vit_jax` without this method has the family's module.

    Args:
      num_classes: Width of the head; 0: no head.
    """
    raise NotImplementedError(f"{type(self).__name__}.build")

  def train_flops(self, image_size: tuple[int, int], num_classes: int) -> int:
    """Returns FLOPs of one image's training step: 2 per multiply-add, 3 passes.

    The backward pass costs two forward passes. Recomputed products do not
    count, as is usual for model FLOPs utilisation (MFU).
    """
    return 6 * self.forward_macs(image_size, num_classes)

  def attention(self, image_size: tuple[int, int]) -> Heads | None:
    """Returns the shape of self-attention that a fused kernel may compute.

    None without attention, or if only XLA can compute it.
    """
    return None

  def num_tokens(self, image_size: tuple[int, int]) -> int | None:
    """Returns the number of tokens of an image; None without tokens."""
    return None

  @property
  def has_cls_row(self) -> bool:
    """Whether a position table begins with a row for the class token."""
    return False

  def with_patch(self, patch: int) -> "ModelConfig":
    """Returns the model with another patch size, in pixels.

    Raises:
      ValueError: The model has no patches of pixels.
    """
    raise ValueError(
      f"patch: got {patch}, but {self.variant} has no patches of pixels;"
      " expected none."
    )

  @property
  def pixel_patch(self) -> int | None:
    """Side of the patches in pixels, if a token depends on its patch alone.

    The module then has `embed` and `encode`, and the options have `size`; see
    `ViT`. None for other models.
    """
    return None

  def for_inference(self) -> "ModelConfig":
    """Returns the model without the options that only training needs."""
    return dataclasses.replace(self, dtype="float32")

  def stacked(self) -> "ModelConfig | None":
    """Returns the model with its blocks in a scan; None without blocks.

    The number of parameters is the same, but only one block is compiled.
    """
    return None

  def unstacked(self) -> "ModelConfig":
    """Returns the model with a loop over its blocks."""
    return self

  def recomputed(self) -> tuple["ModelConfig", ...]:
    """Returns the model with each value of `remat`, "none" first."""
    return (self,)
