"""Scores files of weights: `vit-jax score FILE... --on=imagenet2012,v2`.

FILE is anything that `vit_jax.load` reads. Model, size of the images and
preprocessing are read from it; beside each score is the one that was published
for the file, where it is known by its name. With --explain, what the score owes
to the decoder, the resizing, the crop, the form of GELU, epsilons and the type
of the products.
"""

import argparse
from collections.abc import Sequence

from vit_jax.config import cli
from vit_jax.scoring.ablation import STEPS
from vit_jax.scoring.published_scores import AVAILABLE, SETS

PROTOCOLS = ("auto", "own", "timm", "google", "big_vision")
FLAGS = {
  "on": "sets of images, with commas between: "
  + ", ".join(SETS)
  + "; any data set with its split, digits[test] or folder:/path[val]; or"
  f" {AVAILABLE}: those of the named that are on disk (default: imagenet2012)",
  "protocol": "preprocessing. own: the file's, if it states one; timm: shorter"
  " side, bicubic by Pillow, centre; google: the whole image to the model's"
  " size, bilinear; big_vision: shorter side, area, centre; auto (default):"
  " own, else that of the published score, else that of the format",
  "steps": "with --explain: those that are exchanged, with commas between:"
  f" {', '.join(STEPS)} (default: all that the model has)",
  "dtype": "type of the products: float32 (default) or bfloat16",
  "batch_size": "images per batch, over all devices (default: 128)",
  "data_dir": "folder of TFDS data (default: $TFDS_DATA_DIR or"
  " ~/tensorflow_datasets)",
  "workdir": "folder of score.json (default: runs/score)",
  **cli.PROCESS_FLAGS,
}
METAVARS = {
  "on": "SETS",
  "protocol": "HOW",
  "steps": "STEPS",
  "dtype": "TYPE",
  "batch_size": "N",
  "data_dir": "DIR",
  "workdir": "DIR",
  "coordinator": "ADDRESS",
  "num_processes": "N",
  "process_id": "N",
}
DEFAULTS = {
  "steps": ",".join(STEPS),
  "on": "imagenet2012",
  "protocol": "auto",
  "dtype": "float32",
  "batch_size": 128,
  "workdir": "runs/score",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the words after the verb."""
  parser = cli.parser(
    "score",
    "Scores files of weights beside the scores published for them, with the"
    "\npreprocessing of their publisher; --explain says what makes the"
    " difference.",
    "vit-jax score B_16.npz --on=imagenet2012,real,v2",
    usage="FILE... [--on=SETS] [options]",
  )
  parser.add_argument(
    "files", nargs="+", metavar="FILE", help="anything that vit_jax.load reads"
  )
  choices = {"protocol": PROTOCOLS, "dtype": ("float32", "bfloat16")}
  types = {"batch_size": cli.positive}
  for name, doc in FLAGS.items():
    parser.add_argument(
      f"--{name}",
      help=doc,
      default=DEFAULTS.get(name),
      choices=choices.get(name),
      type=types.get(name),
      metavar=METAVARS.get(name),
    )
  parser.add_argument(
    "--explain",
    action="store_true",
    help="score once more for each step of the pixels' path, and each of the"
    " model's numerics, exchanged alone",
  )
  parser.add_argument(
    "--fake_data",
    action="store_true",
    help="score fake records, made in memory, to try the command",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Scores, or ends the process with all that is wrong."""
  args = parse(argv)
  from vit_jax.scoring import score

  score.main(args)
