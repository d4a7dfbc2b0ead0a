"""Trains with the new callback: its metrics, and the step at which it stops."""

import json
import os
import pathlib
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from block_updates import BlockUpdates

from vit_jax.callbacks import Stop
from vit_jax.config import defaults, freeze
from vit_jax.train import train_and_evaluate

c = defaults()
c.model.variant, c.model.depth = "Ti/16", 2
c.data.dataset, c.fake_data = "cifar10", True
c.data.ops, c.data.batch_size = "decode|resize(32)", 16
c.total_steps, c.log_steps = 3, 1
c.optim.name, c.optim.lr = "sgd", 1e-3


def run(folder: str, limit: float) -> list[dict]:
  train_and_evaluate(freeze(c), folder, callbacks=[BlockUpdates(limit)])
  lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


with tempfile.TemporaryDirectory() as folder:
  rows = run(f"{folder}/whole", np.inf)
  assert [row["step"] for row in rows] == [1, 2, 3]
  # The first update of SGD is the gradient times the learning rate; the head
  # begins with zeros, so that the blocks have no gradient before step 2.
  norms = [row["train/update_norm/encoderblock_1"] for row in rows]
  assert norms[0] == 0.0 and norms[1] > 0.0
  assert rows[1]["train/update_norm/encoderblock_0"] > 0.0
  try:
    run(f"{folder}/stopped", norms[1] / 2)
  except Stop as stop:
    assert stop.step == 2 and "update_norm/encoderblock_" in str(stop), stop
    assert pathlib.Path(folder, "stopped", "checkpoints", "2").is_dir()
  else:
    raise AssertionError("the run was not stopped")
