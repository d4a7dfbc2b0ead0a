"""Model families: every family by its name in `config.model.name`.

The file of a family has its options and what follows from them, without jax:
sizes, token grid, multiply-adds, sharding, errors, published files. Its linen
module is in `vit_jax.models`.
"""

from vit_jax.families.base import ModelConfig
from vit_jax.families.resnet import BiTConfig, BiTV1Config
from vit_jax.families.vit import ViTConfig
from vit_jax.zoo.families.modern import ModernConfig

FAMILIES: dict[str, type[ModelConfig]] = {
  "vit": ViTConfig,
  "modern": ModernConfig,
  "bit": BiTConfig,
  "bit_v1": BiTV1Config,
}

PUBLISHED = {
  name: files
  for cls in FAMILIES.values()
  for name, files in cls.PUBLISHED.items()
}


def family(variant: str) -> str:
  """Returns config.model.name for a variant.

  It is the first family other than "vit" that knows the variant. Otherwise it
  is "vit", whose errors list the known variants.

  Example:
    >>> family("R50x1"), family("R50+B/16")
    ('bit', 'vit')
  """
  others = (k for k in FAMILIES if k != "vit")
  return next((k for k in others if FAMILIES[k].knows(variant)), "vit")


def model_config(name: str = "vit", **options) -> ModelConfig:
  """Returns the options of a family.

  Args:
    name: A key of `FAMILIES`.
    **options: Its fields; absent ones have their defaults.
  """
  return FAMILIES[name](**options)


def by_variant(variant: str) -> ModelConfig:
  """Returns the model of a variant with defaults for all other options."""
  return model_config(family(variant), variant=variant)
