"""Checkpoints of a run: saving, checking, restoring and removing them."""
