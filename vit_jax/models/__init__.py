"""Linen modules of every family: `build(config.model, num_classes)`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vit_jax.families import (
  BiTConfig,
  BiTV1Config,
  ModelConfig,
  ModernConfig,
  ViTConfig,
)

if TYPE_CHECKING:  # flax takes a second
  import flax.linen as nn


def build(model: ModelConfig, num_classes: int) -> "nn.Module":
  """Returns the network that `model` describes, a linen module.

  It maps images [b, h, w, c] in [-1, 1] to logits [b, num_classes] and a dict
  of intermediates, of which "pre_logits" is the input of the head. With 0
  classes there is no head, and the logits are the features.

  Raises:
    ValueError: The variant is unknown.
  """
  from vit_jax.models.resnet import ResNet
  from vit_jax.models.vit import ViT
  from vit_jax.zoo.models.modern import Modern

  modules = {
    ViTConfig: ViT,
    ModernConfig: Modern,
    BiTConfig: ResNet,
    BiTV1Config: ResNet,
  }
  for cls in type(model).__mro__:
    if cls in modules:
      return modules[cls](model, num_classes)
    if "build" in vars(cls):  # one's own family, or ModelConfig
      break
  return model.build(num_classes)


def attention_positions(
  options: ViTConfig,
  grid: tuple[int, int],
  params: dict[str, Any],
  num_tokens: int,
) -> tuple[Callable[[Any], Any], Any]:
  """Returns what the positions of a block change in its attention.

  Args:
    options: The model's options.
    grid: Rows and columns of patches.
    params: Parameters of the block's attention.
    num_tokens: Number of tokens.

  Returns:
    A function of queries, and of keys, [b, n, heads, d]; and what is added to
    the scores, [heads, n, n], or None.
  """
  if not isinstance(options, ModernConfig):
    return (lambda x: x), None
  from vit_jax.zoo.models import modern

  return modern.attention_positions(options, grid, params, num_tokens)
