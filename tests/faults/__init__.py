"""Fault injection: the trials of `make faults`.

test_trials.py runs those of every module of `MODULES`. Other tests use `runs`.
"""

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
  "long",
)
