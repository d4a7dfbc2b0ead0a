"""Models in the formats of other programs: `vit-jax convert`."""
