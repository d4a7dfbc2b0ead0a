"""Linen modules of every family: `build(config.model, num_classes)`."""

from vit_jax.families import ModelConfig


def build(model: ModelConfig, num_classes: int):
  """Returns the network that `model` describes, a `flax.linen.Module`.

  Called on images [b, h, w, c] in [-1, 1], it returns logits [b, num_classes]
  and a dict of intermediates, of which "pre_logits" is the input of the head.

  Raises:
    ValueError: The variant is unknown.
  """
  return model.build(num_classes)
