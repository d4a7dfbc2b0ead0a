"""Backbones after the paper, and files of other libraries, in and out."""
