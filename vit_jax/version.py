"""The version of vit_jax."""

__version__ = "0.1.0"
