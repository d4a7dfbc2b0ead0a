"""Draws what a model learned: `vit-jax visualize CHECKPOINT [IMAGE...]`.

It draws figures 6, 7, 10 and 14 of arXiv:2010.11929 for any checkpoint.
"""

import argparse
from collections.abc import Sequence

from vit_jax.config import cli

DESCRIPTION = """\
Draws the filters of a model's first layer, the similarity of its positions, how
far each head looks, where one patch looks, and which patches of an image the
answer uses; of a run of --config=mae also what it predicts of masked images.
Writes a page, index.html, and every picture to DIR.

IMAGE is a file, a folder, a glob in quotes, or - for a list of these on the
standard input, one a line. The first 128 images are used. Images of a folder
that cannot be read are named and left out. Without IMAGE, 128 images of the
data on which the run is scored are used. For a ResNet only the filters are
drawn."""
EXAMPLE = """\
vit-jax visualize runs/pets photos/ --out=inside
vit-jax visualize B_16.npz cat.jpg --out=inside --patch=5,7
vit-jax visualize runs/a 'photos/*.jpg' --beside=runs/b --out=inside"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser("visualize", DESCRIPTION, EXAMPLE)
  parser.add_argument("checkpoint", metavar="CHECKPOINT")
  parser.add_argument("images", nargs="*", metavar="IMAGE")
  parser.add_argument(
    "--out",
    required=True,
    type=cli.local_folder,
    metavar="DIR",
    help="folder to write to",
  )
  parser.add_argument(
    "--beside",
    action="append",
    default=[],
    metavar="CHECKPOINT",
    help="another model to draw beside it; may be repeated",
  )
  parser.add_argument(
    "--patch",
    type=_place,
    metavar="ROW,COLUMN",
    help="patch of the first image, counted from 1, whose attention is drawn"
    " for each head (default: the patch that gets the most attention)",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Draws the figures, or ends the process with all errors."""
  args = parse(argv)
  from vit_jax.tools.reporting import visualize

  visualize.main(args)


def _place(text: str) -> tuple[int, int]:
  numbers = text.split(",")
  if len(numbers) != 2 or not all(n.isdecimal() and int(n) for n in numbers):
    raise argparse.ArgumentTypeError(
      f"got {text!r}, expected ROW,COLUMN from 1, such as 5,7."
    )
  return int(numbers[0]) - 1, int(numbers[1]) - 1
