"""What happens around a step of a run, one file each."""
