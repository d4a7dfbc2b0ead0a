"""Trains and evaluates on arrays on disk; what is missing is an error."""

import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from vit_jax import experiment
from vit_jax.config import ConfigError, defaults, freeze
from vit_jax.scoring.evaluate import evaluate
from vit_jax.train import train_and_evaluate


def config(dataset, **changes):
  c = defaults()
  c.model.variant, c.model.depth = "Ti/16", 1
  c.data.dataset = dataset
  c.data.ops, c.data.batch_size = "decode|resize(32)", 8
  c.total_epochs, c.optim.lr = 12.0, 1e-3
  c.evals = {
    "test": {"kind": "classification", "split": "test", "ops": c.data.ops}
  }
  c.update(changes)
  return freeze(c)


def main(folder: pathlib.Path) -> None:
  rng = np.random.default_rng(0)
  for split, count in (("train", 40), ("test", 20)):
    (folder / "data" / split).mkdir(parents=True)
    label = np.arange(count) % 2
    image = rng.integers(50, size=(count, 24, 24, 3)) + 150 * label.reshape(
      -1, 1, 1, 1
    )
    np.save(folder / "data" / split / "images.npy", image.astype(np.uint8))
    np.save(folder / "data" / split / "labels.npy", label)
  run = config(f"npy:{folder}/data")
  assert experiment.Experiment(run).run_shape.total_steps == 12 * 40 // 8
  train_and_evaluate(run, str(folder / "run"))
  scores = evaluate(run, str(folder / "run"))
  assert scores["test/count"] == 20 and scores["test/top1"] == 1
  try:
    experiment.setup(config(f"npy:{folder}"))
    raise AssertionError("no error")
  except ConfigError as e:
    assert "config.data.dataset: got data set 'npy:" in str(e)
    assert "expected <split>/images.npy and labels.npy" in str(e)


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as name:
    main(pathlib.Path(name))
