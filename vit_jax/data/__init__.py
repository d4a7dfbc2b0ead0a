"""Input: sources, image operations, the deterministic pipeline."""
