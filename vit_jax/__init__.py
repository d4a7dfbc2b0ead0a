"""Vision Transformers in JAX/Flax: pre-train, transfer, report."""

import importlib
import os
import pathlib
from typing import TYPE_CHECKING

from vit_jax.version import __version__

# What docs/api.md lists. The first two are functions, the others modules.
_FUNCTIONS = {"build": "models", "load": "inference.pretrained"}
_MODULES = ("batch", "callbacks", "config", "evaluate", "options", "train")

__all__ = ["LETTERS", "__version__", "batch", "build", "callbacks", "config"]
__all__ += ["evaluate", "load", "options", "train"]

# The weights of a small ViT that names 92 letters and symbols, for examples.
# configs/glyphs.py trained it: 32 pixels, patches of 8, 0.8 million parameters.
LETTERS = pathlib.Path(__file__).with_name("letters.npz")

if TYPE_CHECKING:  # at run time `__getattr__` imports them
  from vit_jax import batch, callbacks, config, evaluate, options, train
  from vit_jax.inference.pretrained import load
  from vit_jax.models import build

# TensorFlow only reads images here. It must be set up before anything imports
# it: its messages would hide what matters.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# TensorFlow reads 64 MB of every file that is open in a bucket, also where
# less is asked for; shuffled streams open up to a thousand files.
os.environ.setdefault("GCS_READ_CACHE_BLOCK_SIZE_MB", "4")


def __getattr__(name: str):
  """Imports public names at their first use, because jax takes a second."""
  if name in _FUNCTIONS:
    module = importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}")
    return getattr(module, name)
  if name in _MODULES:
    return importlib.import_module(f"{__name__}.{name}")
  public = ", ".join(sorted(__all__))
  raise AttributeError(f"module {__name__!r} has no {name!r}, only {public}.")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
