"""Tries to lose runs: `make faults`, or `pytest -m faults tests/faults`.

Each trial runs in its own process. If it passes, a line is appended to
docs/reliability.jsonl, and the table of benchmarks/notes/reliability_trials.md
is written. A trial that has a line for the same code and versions is skipped,
so the command continues where it was stopped. $SEED is the seed of random
numbers; without it, it is taken from the clock.
"""

import json
import os
import subprocess
import sys
import time

import pytest

from faults import receipts
from faults.__main__ import FIGURE

LIMIT = 1200  # seconds of one trial
TRIALS = receipts.all_trials()
pytestmark = [pytest.mark.faults, pytest.mark.nightly]


@pytest.fixture(scope="module")
def env(tmp_path_factory):
  """The environment of trials: they share data sets and compiled programs."""
  folder = tmp_path_factory.mktemp("trials")
  path = [receipts.ROOT / name for name in ("", "tests", "benchmarks")]
  shared = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TRIALS_SHARE": str(folder),
    "TFDS_DATA_DIR": str(folder / "tfds"),
    "PYTHONPATH": os.pathsep.join(map(str, path)),
  }
  unlike_users = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
  yield {k: v for k, v in os.environ.items() if k not in unlike_users} | shared
  receipts.write_page()


# The longest first, so that no core idles at the end.
@pytest.mark.parametrize(
  "name", sorted(TRIALS, key=lambda name: -TRIALS[name].seconds)
)
def test_a_guarantee_survives_its_trial(env, name):
  if receipts.is_done(name):
    pytest.skip("passed before, with the same code and versions")
  seed = int(os.environ.get("SEED", time.time() % 10**6))
  print(f"SEED={seed}")
  began = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-m", "faults", name, str(seed)],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    timeout=LIMIT,
    text=True,
    errors="replace",
  )
  assert done.returncode == 0, done.stdout[-6000:]
  (line,) = (x for x in done.stdout.splitlines() if x.startswith(FIGURE))
  figure = json.loads(line.removeprefix(FIGURE))
  receipts.append(name, figure, time.monotonic() - began, seed)
