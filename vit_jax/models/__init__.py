"""Every model by name."""

import flax.linen as nn

from vit_jax.config import ModelConfig, size
from vit_jax.models.vit import ViT
from vit_jax.variants import nearest


def _vit(model: ModelConfig, num_classes: int) -> ViT:
  sizes, patch = size(model)
  return ViT(
    num_classes=num_classes,
    patch=patch,
    width=sizes.width,
    depth=sizes.depth,
    mlp_dim=sizes.mlp_dim,
    num_heads=sizes.num_heads,
    pool=model.pool,
    posemb=model.posemb,
    pre_logits=model.pre_logits,
    dropout=model.dropout,
    stochastic_depth=model.stochastic_depth,
    head_bias=model.head_bias,
    dtype=model.dtype,
    scan=model.scan,
    remat=model.remat,
  )


MODELS = {"vit": _vit}


def build(model: ModelConfig, num_classes: int) -> nn.Module:
  """Returns the network that `model` describes.

  Called on images [b, h, w, c] in [-1, 1] it returns logits [b, num_classes]
  and a dict of intermediates, of which "pre_logits" is what the head sees.

  Raises:
    ValueError: The name or the variant is unknown.
  """
  if model.name not in MODELS:
    raise ValueError(
      f"config.model.name: got {model.name!r}, expected one of"
      f" {', '.join(MODELS)}.{nearest(model.name, MODELS)}"
    )
  return MODELS[model.name](model, num_classes)
