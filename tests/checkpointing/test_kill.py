"""kill -9; the same command ends in the bits of a run that was never killed.

`make faults` does this a hundred times, at random instants.
"""

import os
import random
import shutil
import time

import pytest
from faults import runs

from vit_jax import train
from vit_jax.config import cli

STEPS = 21


@pytest.fixture(scope="module")
def want(tmp_path_factory):
  """A run that was never killed, and its config."""
  folder = tmp_path_factory.mktemp("kill")
  config = runs.write_config(folder, steps=STEPS)
  parsed = cli.parse("", {}, [f"--config={config}"]).config
  train.train_and_evaluate(parsed, str(folder / "want"))
  return config, parsed, folder / "want"


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bits(want):
  config, parsed, whole = want
  seed = time.time_ns() % 10**6
  print(f"seed {seed}")
  workdir = whole.with_name("killed")
  env = {k: v for k, v in os.environ.items() if k.startswith(("XLA", "TFDS"))}
  started = runs.start(config, workdir, env=env)
  try:
    end = time.monotonic() + 120
    while not (workdir / "checkpoints" / "7").is_dir():
      assert started[0].poll() is None, runs.output(workdir)
      assert time.monotonic() < end, runs.output(workdir)
      time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 0.5))
  finally:
    runs.kill(started)
  train.train_and_evaluate(parsed, str(workdir))
  assert runs.assert_same(workdir, whole) > 10_000


@pytest.mark.slow
def test_other_bits_and_rows_are_noticed(want, tmp_path):
  _, _, whole = want
  shutil.copytree(whole, tmp_path / "run")
  runs.assert_same(tmp_path / "run", whole)
  path = tmp_path / "run" / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([*lines[:2], *lines[1:]]))
  with pytest.raises(AssertionError, match="rows"):
    runs.assert_same(tmp_path / "run", whole)
  path.write_text("".join([*lines[:3], lines[4], lines[3], *lines[5:]]))
  with pytest.raises(AssertionError, match="rows"):
    runs.assert_same(tmp_path / "run", whole)
  path.write_text("".join(lines))
  shutil.rmtree(tmp_path / "run" / "tensorboard")
  with pytest.raises(AssertionError, match="TensorBoard"):
    runs.assert_same(tmp_path / "run", whole)
