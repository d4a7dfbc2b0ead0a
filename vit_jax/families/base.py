"""The interface of a family of models, without jax."""

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vit_jax.options import limit_errors, nearest, option, unexpected

if TYPE_CHECKING:  # flax takes a second
  import flax.linen as nn


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
      "float32": "24 bits of mantissa; on TPUs and recent GPUs, products have"
      " 8 and 11, unless JAX_DEFAULT_MATMUL_PRECISION=highest",
      "bfloat16": "8 bits of mantissa, the range of float32",
    },
  )

  # Where the parts of the model are. Paths are those of the parameters, such as
  # "block_0/mlp/fc1/kernel". What is None or empty is not declared: an option
  # that needs it is then an error.

  # Path of a block; {} stands for its number, from 0: "block_{}".
  BLOCKS: ClassVar[str | None] = None
  # Path of all blocks in a scan, whose parameters have one more dimension in
  # front; its body all-gathers them block by block.
  SCANNED: ClassVar[str | None] = None
  # All parameters before the first block, a regular expression of whole paths.
  STEM: ClassVar[str | None] = None
  # Path of the embedding of patches of pixels: a kernel [h, w, c, d] and,
  # perhaps, a bias. Its stride is its side.
  PATCHES: ClassVar[str | None] = None
  # Learned positions, resized for images of another size. The end of a path (a
  # regular expression) -> its form: "grid" [1, n, d], `num_class_rows` rows and
  # then those of the patches, row by row; "rows" or "columns" [1, n, d];
  # "relative_bias" [offsets, heads], see `models.relative_bias`.
  POSITIONS: ClassVar[dict[str, str]] = {}
  # Parameters [1, 1, d] of the class tokens, in their order.
  CLASS_TOKENS: ClassVar[tuple[str, ...]] = ()
  # Kernels of linear maps. The end of a path (a regular expression) -> numbers
  # of the kernel's dimensions that are inputs and outputs. muon orthogonalises
  # them; in blocks they may get the adapters of config.lora.
  MATRICES: ClassVar[dict[str, tuple[int, int]]] = {}
  # Kernels of query, key and value, the end of a path (a regular expression).
  # In lamb they share the ratio of an attention; without it, each kernel has
  # its own.
  QKV: ClassVar[str | None] = None
  # Modules behind the last block, in the order in which they are applied.
  BEHIND_BLOCKS: ClassVar[tuple[str, ...]] = ("head",)
  # Classifiers, with a kernel [d, classes] and a bias: the beginning of a path
  # (a regular expression).
  HEADS: ClassVar[str] = r"head/"
  # Where a forward pass leaves the attention weights [b, heads, n, n] of a
  # block: the path in the collection "intermediates", {} for the block. With
  # flax's own module it ends in attention_weights (sow_weights=True). The
  # patches are the last tokens.
  ATTENTION: ClassVar[str | None] = None
  # The tokens behind a block, a path in the intermediates that the module
  # returns, {} for the block; and the LayerNorm behind the last block, whose
  # epsilon is `ln_eps`.
  AFTER_BLOCK: ClassVar[str | None] = None
  LAST_NORM: ClassVar[str | None] = None

  # Sharding of parameters and of their optimizer moments: the end of a path (a
  # regular expression) -> the axes of each of its last dimensions: None,
  # "fsdp", "tensor", or both. The first match counts. Paths without a match are
  # not split.
  SHARDING: ClassVar[tuple[tuple[str, tuple], ...]] = ()
  # Rules before these on chips that split heads, `devices.SPLIT_BY_HEADS`.
  BY_HEADS: ClassVar[tuple[tuple[str, tuple], ...]] = ()
  # Kernels of matrix products (a regular expression, or None), cast to `dtype`
  # before the all-gather instead of after it.
  CAST: ClassVar[str | None] = None
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
  # What the head reads: "token" (the class tokens), "gap" (the mean over the
  # patches), "token_gap" (both); None: the family does not state it.
  pool = None
  # Leading tokens that are class tokens.
  num_class_tokens = 0
  # Leading rows of the position table, before those of the patches.
  num_class_rows = 0

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
    yield from limit_errors(self, "config.model")
    for field in dataclasses.fields(self):
      choices, value = field.metadata.get("choices"), getattr(self, field.name)
      # jax has more types than a run may choose.
      if choices and value not in (None, *choices) and field.name != "dtype":
        expected = f"one of {', '.join(choices)}"
        hint = nearest(str(value), choices).strip()
        yield unexpected(
          f"config.model.{field.name}", repr(value), expected, hint
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

  @classmethod
  def block_of(cls, path: str) -> int | str | None:
    """Returns the block of a parameter; None for a parameter of no block.

    It is the block's number from 0, or "all" in a scan.

    Args:
      path: Path of the parameter, from the root of the model.
    """
    if cls.SCANNED is not None and path.startswith(f"{cls.SCANNED}/"):
      return "all"
    match = cls.BLOCKS and re.match(_numbered(cls.BLOCKS), path)
    return int(match[1]) if match else None

  @classmethod
  def is_scanned(cls, path: str) -> bool:
    """Whether a parameter, or its moment, is that of all blocks of a scan."""
    return cls.SCANNED is not None and f"/{cls.SCANNED}/" in f"/{path}"

  @classmethod
  def any_block(cls, path: str) -> str:
    """Returns a path with * in place of the number of its block."""
    if cls.BLOCKS is None:
      return path
    return re.sub(_numbered(cls.BLOCKS), cls.BLOCKS.format("*") + "/", path)

  @classmethod
  def matrix(cls, path: str) -> tuple[int, int] | None:
    """Returns numbers of inputs' and outputs' dimensions, see `MATRICES`."""
    return _of_end(cls.MATRICES, path)

  @classmethod
  def positions(cls, path: str) -> str | None:
    """Returns the form of learned positions, see `POSITIONS`, or None."""
    return _of_end(cls.POSITIONS, path)

  @classmethod
  def is_head(cls, path: str) -> bool:
    """Whether a parameter is a classifier's."""
    return re.match(cls.HEADS, path) is not None

  @classmethod
  def is_behind_blocks(cls, path: str) -> bool:
    """Whether a parameter is of a module behind the last block."""
    behind = tuple(f"{name}/" for name in cls.BEHIND_BLOCKS)
    return path.startswith(behind) or cls.is_head(path)

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
    return self.num_class_rows > 0

  def with_patch(self, patch: int) -> "ModelConfig":
    """Returns the model with another patch size, in pixels.

    Raises:
      ValueError: The family has models with one patch size only.
    """
    expected = f"none for {type(self).__name__}"
    raise ValueError(unexpected("patch", patch, expected))

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


def _numbered(template: str) -> str:
  """Returns the regular expression of paths in a block, with its number."""
  before, after = map(re.escape, template.split("{}"))
  return rf"{before}(\d+){after}/"


def _of_end(table: dict, path: str):
  """Returns the value of the first expression that a path ends with."""
  return next(
    (v for end, v in table.items() if re.search(rf"(^|/)({end})$", path)), None
  )
