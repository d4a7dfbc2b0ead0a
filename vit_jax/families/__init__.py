"""What is known of the models without jax: sizes, grids, arithmetic."""
