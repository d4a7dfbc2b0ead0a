"""Trains and evaluates with the evaluator; its errors and options are there."""

import contextlib
import io
import math
import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"

from vit_jax import experiment
from vit_jax.config import ConfigError, cli, defaults, freeze
from vit_jax.scoring.evaluate import evaluate
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics


def config(**options):
  c = defaults()
  c.model.variant, c.model.depth = "Ti/16", 1
  c.data.dataset, c.fake_data = "cifar10", True
  c.data.ops, c.data.batch_size = "decode|resize(32)", 8
  c.total_steps = 2
  own = {"kind": "entropy", "split": "test[:50]", "ops": "decode|resize(32)"}
  c.evals = {"unsure": own | options}
  return freeze(c)


def main(workdir: str) -> None:
  train_and_evaluate(config(), workdir)
  last = read_metrics(workdir)[-1]["unsure/entropy"]
  assert 0 < last < math.log(10)
  assert evaluate(config(), workdir) == {"unsure/entropy": last}
  try:
    experiment.setup(config(temperature=-1.0, split="tset"))
    raise AssertionError("no error")
  except ConfigError as e:
    message = str(e)
  assert (
    "config.evals.unsure.temperature: got -1.0, expected above 0" in message
  )
  assert "config.evals.unsure.split: got split 'tset'" in message
  with (
    contextlib.redirect_stdout(io.StringIO()) as out,
    contextlib.suppress(SystemExit),
  ):
    cli.parse("train", {}, ["--help=evals"])
  assert "options of an evaluator of kind 'entropy'" in out.getvalue()
  assert "config.evals.<name>.temperature = 1.0" in out.getvalue()


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as folder:
    main(folder)
