"""Classifies images: `vit-jax predict CHECKPOINT IMAGE...`."""

import argparse
from collections.abc import Sequence

from vit_jax.config import cli

DESCRIPTION = """\
Prints the most probable classes of images, or writes their features.
CHECKPOINT is anything that vit_jax.load opens: a run, one of its steps,
published weights. Images are preprocessed as the checkpoint states.

IMAGE is a file, a folder (with its sub-folders), a glob in quotes, or -. With -
the standard input has one image, or a list of files, folders and globs, one a
line. Images that cannot be read are skipped and named on the standard error.
The exit status is 0 if at least one image was read, and 1 if none was."""
EXAMPLE = """\
vit-jax predict runs/pets photos/cat.jpg
vit-jax predict B_16.npz photos/ 'more/**/*.jpg' --json > classes.jsonl
find . -name '*.jpg' | vit-jax predict runs/pets - --csv > classes.csv
vit-jax predict B_16.npz photos/ --features=features.npz"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser("predict", DESCRIPTION, EXAMPLE)
  parser.add_argument("checkpoint", metavar="CHECKPOINT")
  parser.add_argument("images", nargs="+", metavar="IMAGE")
  parser.add_argument(
    "--top",
    type=cli.positive,
    default=5,
    metavar="N",
    help="classes printed per image (default: %(default)s)",
  )
  parser.add_argument(
    "--batch_size",
    type=cli.positive,
    default=16,
    metavar="N",
    help="images per forward pass (default: %(default)s)",
  )
  parser.add_argument(
    "--image_size",
    type=cli.positive,
    metavar="N",
    help="image size of the model in pixels (default: as trained)",
  )
  parser.add_argument(
    "--mean",
    help="training normalisation: half, imagenet, clip or MEAN/STD",
  )
  parser.add_argument(
    "--background",
    metavar="COLOUR",
    help="colour behind transparent images (default: as trained)",
  )
  parser.add_argument(
    "--max_pixels",
    type=cli.positive,
    metavar="N",
    help="largest height x width of an image (default: as trained)",
  )
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16"),
    metavar="TYPE",
    help="float32 or bfloat16 (default: the faster one here)",
  )
  output = parser.add_mutually_exclusive_group()
  output.add_argument(
    "--json",
    action="store_true",
    help="print JSON lines, one object per image",
  )
  output.add_argument(
    "--csv",
    action="store_true",
    help="print CSV, one row per class and image",
  )
  output.add_argument(
    "--features",
    metavar="FILE",
    help="write features to FILE.npz or FILE.parquet",
  )
  parser.add_argument(
    "--layer",
    metavar="NAME",
    help="layer of the features (default: pre_logits)",
  )
  parser.add_argument(
    "--attention",
    action="store_true",
    help="also write each image beside its attention map",
  )
  parser.add_argument(
    "--out_dir",
    type=cli.local_folder,
    metavar="DIR",
    default="attention",
    help="folder of the attention maps (default: %(default)s)",
  )
  args = parser.parse_args(argv)
  if args.attention and args.features is not None:
    parser.error("argument --attention: not allowed with argument --features")
  if args.layer is not None and args.features is None:
    parser.error("argument --layer: needs --features=FILE")
  args.layer = args.layer or "pre_logits"
  return args


def main(argv: Sequence[str]) -> None:
  """Classifies the images; ends the process with the exit status."""
  args = parse(argv)
  from vit_jax.callbacks import startup
  from vit_jax.inference import predict

  startup.use_cache()
  predict.main(args)
