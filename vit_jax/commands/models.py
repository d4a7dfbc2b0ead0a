"""Prints every model by name: `vit-jax models`."""

import argparse
import os
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb; there is only --help."""
  parser = cli.parser(
    "models",
    "Prints a table of all models: name (--config.model.variant=NAME),"
    "\nparameters, FLOPs and tokens of an image of 224 and of 384 pixels, and"
    "\nthe published files that fit. Then prints a table of later models, from"
    "\nDINOv2 to EVA-02, and the files that vit_jax.load reads.",
    "vit-jax models",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  parse(argv)
  # Sizes are computed from shapes; the accelerators stay free.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from vit_jax.zoo import model_table

  model_table.main()
