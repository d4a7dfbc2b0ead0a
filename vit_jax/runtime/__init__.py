"""What surrounds the steps of a run: processes, phases, files, progress."""
