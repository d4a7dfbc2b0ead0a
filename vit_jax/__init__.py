"""Vision Transformers in JAX/Flax: pre-train, transfer, report."""

import os
import pathlib

from vit_jax.version import __version__

__all__ = ["LETTERS", "__version__", "load"]

# The weights of a small ViT that names 92 letters and symbols, for examples.
# configs/glyphs.py trained it: 32 pixels, patches of 8, 0.8 million parameters.
LETTERS = pathlib.Path(__file__).with_name("letters.npz")

# TensorFlow only reads images here. It must be set up before anything imports
# it: its messages would hide what matters.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# TensorFlow reads 64 MB of every file that is open in a bucket, also where
# less is asked for; shuffled streams open up to a thousand files.
os.environ.setdefault("GCS_READ_CACHE_BLOCK_SIZE_MB", "4")


def __getattr__(name: str):
  """Imports `load` lazily, because importing jax takes a second."""
  if name == "load":
    from vit_jax.inference.pretrained import load

    return load
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*globals(), "load"]
