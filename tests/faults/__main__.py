"""Runs a trial in this process: `python -m faults NAME SEED`.

Prints a line with its figure. Needs PYTHONPATH=.:tests:benchmarks. With $KEEP
its folder stays.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile

from faults import receipts

FIGURE = "figure: "  # begins the line; threads may print more after it

if __name__ == "__main__":
  _, name, seed = sys.argv
  folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}."))
  try:
    trial = receipts.all_trials()[name]
    figure = trial.run(folder, int(seed) + trial.part)
  finally:
    if not os.environ.get("KEEP"):
      shutil.rmtree(folder, ignore_errors=True)
  print(FIGURE + json.dumps(figure), flush=True)
