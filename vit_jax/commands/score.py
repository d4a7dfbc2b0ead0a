"""Scores files of weights: `vit-jax score FILE... --on=imagenet2012,v2`."""

import argparse
from collections.abc import Sequence

from vit_jax.config import cli

DESCRIPTION = """\
Scores files of weights beside the scores published for them, with the
preprocessing of their publisher."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "score",
    DESCRIPTION,
    "vit-jax score B_16.npz --on=imagenet2012,real,v2",
    usage="FILE... [--on=SETS] [options]",
  )
  parser.add_argument(
    "files", nargs="+", metavar="FILE", help="anything that vit_jax.load reads"
  )
  # `SETS` of tools/scoring/published_scores.py.
  parser.add_argument(
    "--on",
    metavar="SETS",
    default="imagenet2012",
    help="sets of images, separated by commas: imagenet2012, real, v2, a, r,"
    " sketch, a_clean, r_clean; any data set with its split, such as"
    " digits[test] or folder:/path[val]; or available, for all named sets that"
    " are on disk (default: %(default)s)",
  )
  parser.add_argument(
    "--protocol",
    choices=("auto", "own", "timm", "google", "big_vision"),
    metavar="HOW",
    default="auto",
    help="preprocessing. own: as the file states; timm: shorter side, bicubic"
    " by Pillow, centre crop; google: the whole image to the model's size,"
    " bilinear; big_vision: shorter side, area, centre crop; auto (default): as"
    " the file states, else as for the published score, else as usual for the"
    " format",
  )
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16"),
    metavar="TYPE",
    default="float32",
    help="type of the products: float32 (default) or bfloat16",
  )
  parser.add_argument(
    "--batch_size",
    type=cli.positive,
    metavar="N",
    default=128,
    help="images per batch, over all devices (default: %(default)s)",
  )
  parser.add_argument(
    "--data_dir",
    metavar="DIR",
    help="folder of TFDS data (default: $TFDS_DATA_DIR or"
    " ~/tensorflow_datasets)",
  )
  parser.add_argument(
    "--workdir",
    metavar="DIR",
    default="runs/score",
    help="folder of score.json (default: %(default)s)",
  )
  parser.add_argument(
    "--fake_data",
    action="store_true",
    help="score fake records made in memory, to try the command",
  )
  for name, doc in cli.PROCESS_FLAGS.items():
    parser.add_argument(f"--{name}", metavar="VALUE", help=doc)
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Scores the files, or ends the process with all errors."""
  args = parse(argv)
  from vit_jax.tools.scoring import score

  score.main(args)
