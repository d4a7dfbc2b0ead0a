"""Vision Transformers in JAX/Flax: pre-train, transfer, report."""

__version__ = "0.1.0"


def load(path, **options):
  """Loads a model with its weights; see `vit_jax.pretrained.load`."""
  from vit_jax import pretrained  # only here: jax takes a second to import

  return pretrained.load(path, **options)
