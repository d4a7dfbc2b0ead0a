"""Prints every model by name: `vit-jax models`."""

import argparse
import os
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the words after the verb: there are none."""
  parser = cli.parser(
    "models",
    "Prints every model by name (--config.model.variant=NAME):"
    "\nits parameters, the FLOPs and tokens of an image of 224 and of 384"
    "\npixels, and the published files that fit it. Then prints the later"
    "\nmodels, from DINOv2 to EVA-02, with the files that vit_jax.load reads.",
    "vit-jax models",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  parse(argv)
  # It only counts: the accelerators stay free for others.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from vit_jax.planning import model_table

  model_table.main()
