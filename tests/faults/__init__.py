"""Fault injection: the trials of `make faults`.

Every module of `MODULES` has `TRIALS`, which test_trials.py runs. Other tests
use `runs`.
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
