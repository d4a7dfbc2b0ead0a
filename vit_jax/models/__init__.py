"""Every model by name.

The modules are imported when they are built, so that `python -m vit_jax.models
--help` need not wait for jax and flax.
"""

from vit_jax.config import ModelConfig
from vit_jax.families.geometry import norms, size, stages
from vit_jax.options import nearest


def _vit(model: ModelConfig, num_classes: int):
  from vit_jax.models.resnet import Norms
  from vit_jax.models.vit import ViT

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
    cls_row=model.cls_row,
    stages=stages(model),
    norms=Norms(*norms(model)),
    gelu=model.gelu,
    ln_eps=model.ln_eps,
    pre_logits=model.pre_logits,
    dropout=model.dropout,
    stochastic_depth=model.stochastic_depth,
    head_bias=model.head_bias,
    dtype=model.dtype,
    scan=model.scan,
    remat=model.remat,
  )


def _resnet(model: ModelConfig, num_classes: int):
  from vit_jax.models.resnet import Norms, ResNet

  return ResNet(
    num_classes=num_classes,
    stages=stages(model),
    form="v1" if model.name == "bit_v1" else "v2",
    norms=Norms(*norms(model)),
    root_pad=model.root_pad,
    head_bias=model.head_bias,
    dtype=model.dtype,
    remat=model.remat == "full",
  )


MODELS = {"vit": _vit, "bit": _resnet, "bit_v1": _resnet}


def build(model: ModelConfig, num_classes: int):
  """Returns the network that `model` describes, a `flax.linen.Module`.

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
