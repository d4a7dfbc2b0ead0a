"""Linen modules of the backbones after the paper."""
