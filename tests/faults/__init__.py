"""Fault injection: the trials of `make faults`, which pytest does not run.

Every module of `MODULES` has `TRIALS`. Tests use `runs`.
"""

# In the order of benchmarks/notes/reliability_trials.md.
MODULES = (
  "kill",
  "signals",
  "hangs",
  "bad_numbers",
  "checkpoints",
  "saves",
  "elsewhere",
  "bucket",
  "resume",
  "broken_data",
  "long",
)
