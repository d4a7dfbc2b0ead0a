"""Models with their weights, applied to images."""
