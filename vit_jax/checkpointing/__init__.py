"""Checkpoints of a run: written, checked, restored and removed."""
