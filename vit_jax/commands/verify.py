"""Checks every checkpoint of a run: `vit-jax verify RUN [STEP]`."""

import argparse
import os
from collections.abc import Sequence

from vit_jax.config import cli

DESCRIPTION = """\
Checks every checkpoint of a run: reads all arrays and compares their digests.
The exit status is 1 if a checkpoint is damaged. The command needs no
accelerator and the memory of one checkpoint, and it changes nothing."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "verify",
    DESCRIPTION,
    "vit-jax verify runs/b16\nvit-jax verify runs/b16 5000",
  )
  parser.add_argument("run", metavar="RUN", help="folder of a run")
  parser.add_argument(
    "step", metavar="STEP", nargs="?", type=int, help="only this step"
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Prints a line for each checkpoint, the oldest first."""
  args = parse(argv)
  # The accelerators stay free for a training run on this machine, even if
  # JAX_PLATFORMS names them.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from vit_jax.checkpointing import verification

  verification.main(args.run, args.step)
