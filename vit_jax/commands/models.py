"""Prints every model by name: `vit-jax models`."""

import argparse
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb; there is only --help."""
  parser = cli.parser(
    "models",
    "Prints a table of the published weights that vit_jax.load reads: model,"
    "\npixels, parameters, FLOPs, published accuracies, licence and files.",
    "vit-jax models\nvit-jax models | grep DINOv3",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  parse(argv)
  from vit_jax.tools import model_table  # not needed by --help

  model_table.main()
