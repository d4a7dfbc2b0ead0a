"""Trains by rotation on a mesh, resumes, scores few-shot, fine-tunes."""

import dataclasses
import os
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
  [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

import vit_jax
from vit_jax.config import ConfigError, build, defaults, freeze
from vit_jax.config.checks import errors
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

OPS = "decode|resize(16)"


def config(**mesh):
  c = defaults()
  c.objective.kind, c.objective.turns = "rotation", 4
  c.model.variant, c.model.depth = "Ti/8", 1
  c.data.dataset, c.fake_data, c.data.ops = "cifar10", True, OPS
  c.data.batch_size = 16
  c.mesh.update(mesh)
  c.total_steps, c.log_steps, c.checkpoint.every_steps = 2, 1, 2
  few = {"kind": "fewshot", "ops": OPS, "shots": (1,), "seeds": (0,)}
  c.evals = {"few": few}
  return c


def losses(workdir):
  rows = [r for r in read_metrics(workdir) if "train/loss" in r]
  assert all(0 <= r["train/accuracy"] <= 1 for r in rows)
  return [r["train/loss"] for r in rows]


def main(folder: str) -> None:
  run = freeze(config())
  train_and_evaluate(run, folder + "/a")
  longer = dataclasses.replace(run, total_steps=4)
  state = train_and_evaluate(
    longer, folder + "/a", allow_change=("total_steps",)
  )
  assert int(state.step) == 4
  assert any("few/1shot" in r for r in read_metrics(folder + "/a"))
  split = config(fsdp=2, tensor=2)
  split.optim.microbatch = 1
  train_and_evaluate(freeze(split), folder + "/b")
  np.testing.assert_allclose(
    losses(folder + "/a")[:2], losses(folder + "/b"), rtol=1e-5
  )

  assert vit_jax.load(folder + "/a", verbose=False).num_classes == 4
  fine = config()
  fine.objective.kind, fine.init, fine.evals = (
    "classification",
    folder + "/a",
    None,
  )
  state = train_and_evaluate(freeze(fine), folder + "/c")
  assert state.params["head"]["kernel"].shape == (192, 10)

  wrong = config()
  wrong.objective.turns, wrong.data.ops = 5, "decode|resize((16, 24))"
  wrong.evals = {"val": {"kind": "classification", "ops": wrong.data.ops}}
  texts = "\n".join(errors(freeze(wrong)))
  assert "config.objective.turns: got 5" in texts
  assert "config.data.ops: got images of 16x24 pixels, expected sq" in texts
  assert "config.evals.val.kind: got 'classification', which scores" in texts
  _, messages = build({"objective": {"kind": "rotation", "turn": 2}})
  assert "Did you mean 'turns'" in messages[0]
  try:
    freeze({"objective": {"kind": "rotation", "loss": "sigmoid"}})
  except ConfigError as e:
    assert "config.objective.loss: got 'sigmoid'" in str(e)


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as name:
    main(name)
  print("ok")
