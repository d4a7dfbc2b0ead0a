"""Vision Transformers in JAX/Flax: pre-train, transfer, report."""

__version__ = "0.1.0"
