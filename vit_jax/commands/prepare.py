"""Puts a data set on disk in TFDS's format: `vit-jax prepare SOURCE`.

A name of TFDS is downloaded and prepared by TFDS; `imagenet21k` and
`imagenet2012` are made from tars in --manual_dir. Images of one's own are
imported once, under a name of their own:

  vit-jax prepare imagenet21k --manual_dir=/data/fall11
  vit-jax prepare folder:/data/birds --name=birds
  vit-jax train --config=... --config.data.dataset=birds

Files are written as array_record, whose records are read by number, so that
their order is a permutation that the seed decides. A bucket answers a request
for every record then, so for a large data set there is --file_format=tfrecord,
which is read from start to end. An import that stops half way leaves no data
set.
"""

import argparse
import functools
import sys
from collections.abc import Sequence

from vit_jax.config import cli


def main(argv: Sequence[str]) -> None:
  """Prepares a data set, and prints its sizes and what was left out."""
  args = parse(argv)
  from vit_jax.data import (  # TensorFlow: seconds
    dataset_info,
    download_and_prepare,
    imports,
  )

  # TFDS's own output to sys.stdout is discarded; these lines are not.
  say = functools.partial(print, file=sys.stdout, flush=True)

  try:
    options = _options(args)
    prefix = dataset_info.prefix_of(args.source)
    if prefix in imports.KINDS:
      if not args.name:
        sys.exit("--name: got none, expected a name for the new data set.")
      name = args.name
      done = download_and_prepare.import_source(
        args.source, name, args.data_dir, options, say, args.file_format
      )
    elif prefix:
      sys.exit(download_and_prepare.unknown_prefix(args.source))
    else:
      name = args.source
      if errors := [k for k, v in _only_imports(args).items() if v]:
        sys.exit(
          f"{', '.join(errors)}: only for imports, not for TFDS's names."
        )
      done = download_and_prepare.prepare(
        name, args.data_dir, args.manual_dir, say, args.file_format
      )
  except (ValueError, OSError, AssertionError) as e:  # TFDS asserts
    sys.exit(str(e))
  for split, count in done.splits.items():
    say(f"{split:<12}{count:>12,} records")
  if done.num_classes is not None:
    say(f"{'classes':<12}{done.num_classes:>12,}")
  say(f"{'left out':<12}{done.left_out:>12,}")
  where = f" --config.data.data_dir={args.data_dir}" if args.data_dir else ""
  say(f"in {done.folder}; to use it: --config.data.dataset={name}{where}")


def _only_imports(args: argparse.Namespace) -> dict[str, str | None]:
  return {
    "--name": args.name,
    "--splits": args.splits,
    "--image": args.image,
    "--label": args.label,
    "--classes": args.classes,
  }


def _options(args: argparse.Namespace):
  from vit_jax.data.imports.listing import Options, read_names

  splits = {}
  for part in args.splits.split(",") if args.splits else ():
    name, _, pattern = part.strip().partition("=")
    if name in splits:
      raise ValueError(
        f"--splits: got {name} twice, expected it once, with one pattern."
      )
    splits[name] = pattern or None
  classes = None
  if args.classes:
    classes = read_names(args.classes)
  return Options(splits, args.image, args.label, classes)


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "prepare",
    "Puts a data set on disk in TFDS's format. Images of one's own are imported"
    " once,\nunder a name of their own. An import that stops half way leaves no"
    " data set.",
    "vit-jax prepare cifar10\n"
    "vit-jax prepare imagenet21k --manual_dir=/data/fall11\n"
    "vit-jax prepare folder:/data/birds --name=birds",
    usage="SOURCE [options]",
  )
  parser.add_argument(
    "source",
    metavar="SOURCE",
    help="name in TFDS (cifar10, imagenet2012, imagenet21k); or folder:/path;"
    " webdataset:/path (folder or glob of tars); parquet:/path; hf:NAME",
  )
  parser.add_argument("--name", help="name of an imported data set")
  parser.add_argument(
    "--data_dir",
    help="folder of TFDS data (default: $TFDS_DATA_DIR or ~/tensorflow_datasets"
    ")",
  )
  parser.add_argument(
    "--manual_dir",
    help="folder of the tars of imagenet2012, imagenet21k (default:"
    " downloads/manual in --data_dir)",
  )
  parser.add_argument(
    "--file_format",
    choices=("array_record", "tfrecord"),
    help="array_record (default), read by number in a random order; or"
    " tfrecord, read from start to end, for a large data set in a bucket",
  )
  parser.add_argument(
    "--splits",
    help="splits to import, separated by commas (default: all that are found);"
    " for tars and parquet also train=PATTERN,validation=PATTERN of file names",
  )
  parser.add_argument("--image", help="column of the images (parquet, hf)")
  parser.add_argument("--label", help="column of the labels (parquet, hf)")
  parser.add_argument(
    "--classes",
    help="file with the names of the classes by label, one a line (all kinds"
    " but folder)",
  )
  return parser.parse_args(argv)
