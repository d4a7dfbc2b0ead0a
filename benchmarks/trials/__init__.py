"""Trials of `make faults`: every module here has `TRIALS`."""

# In the order of benchmarks/notes/reliability_trials.md.
MODULES = (
  "kill",
  "signals",
  "hangs",
  "numbers",
  "checkpoints",
  "saves",
  "elsewhere",
  "bucket",
  "resume",
  "broken_data",
  "long",
)
