"""Trains a Vision Transformer: `vit-jax train --config=FILE`."""

from collections.abc import Sequence

from vit_jax.callbacks import startup
from vit_jax.callbacks.preemption import StopSignals
from vit_jax.config import cli

FLAGS = {
  "workdir": "folder of the run (default: runs/<config name>)",
  "profile": "step after which a trace of five steps is written for"
  " TensorBoard's profiler (default: none)",
  "allow_change": "options and sections, comma-separated, that may differ from"
  " those with which the run began, such as optim.lr,data",
  **cli.PROCESS_FLAGS,
}


def parse(argv: Sequence[str]) -> cli.Args:
  """Parses the words after the verb."""
  return cli.parse(
    "train",
    FLAGS,
    argv,
    several=("allow_change",),
    description="Pre-trains or fine-tunes a model, as a config says. The same"
    " command again goes on from the last checkpoint.",
    example="vit-jax train --config=vit_b16:imagenet2012 --workdir=runs/b16\n"
    "vit-jax train --config=glyphs --workdir=/tmp/try --fake_data",
  )


def main(argv: Sequence[str]) -> None:
  """Joins the other processes, checks the run, trains."""
  args = parse(argv)
  signals = StopSignals()  # before imports that take seconds
  from vit_jax import train

  train.main(args, signals, startup.BEGAN)
