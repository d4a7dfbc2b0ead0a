"""The commands, `vit-jax VERB`: one module a verb."""
