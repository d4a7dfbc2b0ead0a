"""Linen modules of every family: `build(config.model, num_classes)`."""

from typing import TYPE_CHECKING

from vit_jax.families import ModelConfig

if TYPE_CHECKING:  # flax takes a second
  import flax.linen as nn


def build(model: ModelConfig, num_classes: int) -> "nn.Module":
  """Returns the network that `model` describes, a linen module.

  It maps images [b, h, w, c] in [-1, 1] to logits [b, num_classes] and a dict
  of intermediates, of which "pre_logits" is the input of the head.

  Raises:
    ValueError: The variant is unknown.
  """
  from vit_jax.models.modern import Modern
  from vit_jax.models.resnet import ResNet
  from vit_jax.models.vit import ViT

  modules = {
    "vit": ViT,
    "modern": Modern,
    "bit": ResNet,
    "bit_v1": ResNet,
  }
  module = modules.get(model.name)
  return module(model, num_classes) if module else model.build(num_classes)
