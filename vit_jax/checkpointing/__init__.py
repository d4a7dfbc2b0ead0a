"""Checkpoints of a run: written, kept, checked and restored."""
