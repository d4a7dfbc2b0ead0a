"""What a run writes: metrics, metadata, atomic files."""
