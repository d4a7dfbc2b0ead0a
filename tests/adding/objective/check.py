"""Trains with the new objective on two meshes, and names its faults."""

import json
import os
import pathlib
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from vit_jax.config import defaults, freeze
from vit_jax.config.checks import faults
from vit_jax.train import train_and_evaluate


def config(**mesh):
  c = defaults()
  c.objective.kind = "rotation"
  c.model.variant, c.model.depth = "Ti/16", 1
  c.data.dataset, c.fake_data = "cifar10", True
  c.data.ops, c.data.batch_size = "decode|resize(32)", 16
  c.total_steps, c.log_steps = 2, 1
  for axis, size in mesh.items():
    c.mesh[axis] = size
  return c


def losses(workdir, **mesh):
  train_and_evaluate(freeze(config(**mesh)), workdir)
  lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert all(0 <= row["train/accuracy"] <= 1 for row in rows)
  return [row["train/loss"] for row in rows]


with tempfile.TemporaryDirectory() as folder:
  one = losses(folder + "/data", data=8)
  other = losses(folder + "/split", data=2, fsdp=2, tensor=2)
np.testing.assert_allclose(one[0], np.log(4), rtol=1e-6)
np.testing.assert_allclose(one, other, rtol=1e-5)

wrong = config()
wrong.data.ops = "decode|resize((32, 48))"
assert "expected squares" in faults(freeze(wrong))[0]
