"""Vision Transformers in JAX/Flax: pre-train, transfer, report."""

import os

__version__ = "0.1.0"

# TensorFlow only reads images here. It must be set up before anything imports
# it: its messages would hide what matters.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


def load(path, **options):
  """Loads a model with its weights; see `vit_jax.inference.pretrained.load`."""
  from vit_jax.inference import (
    pretrained,  # only here: jax takes a second to import
  )

  return pretrained.load(path, **options)
