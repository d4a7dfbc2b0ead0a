"""Options of the backbones after the paper, without jax."""
