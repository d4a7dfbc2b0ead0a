"""Input: sources of records, image operations, the deterministic pipeline."""
