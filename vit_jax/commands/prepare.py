"""Writes a data set to disk in TFDS's format: `vit-jax prepare SOURCE`.

The default format is array_record, which has random access: an epoch is a
permutation of all records. In a bucket every record is then one request.
Therefore a large data set in a bucket is better in tfrecord, which is read from
start to end and shuffled in a buffer.
"""

import argparse
from collections.abc import Sequence

from vit_jax.config import cli
from vit_jax.data.operation import MAX_PIXELS

DESCRIPTION = """\
Writes a data set to disk in TFDS's format. --name is the name of an imported
data set. An interrupted import leaves no data set."""
EXAMPLE = """\
vit-jax prepare cifar10
vit-jax prepare imagenet21k --manual_dir=/data/fall11
vit-jax prepare folder:/data/birds --name=birds"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "prepare",
    DESCRIPTION,
    EXAMPLE,
    usage="SOURCE [options]",
  )
  parser.add_argument(
    "source",
    metavar="SOURCE",
    help="name in TFDS (cifar10, imagenet2012, imagenet21k); or folder:/path;"
    " csv:/path (columns file,label; several labels: a|b); webdataset:/path"
    " (folder or glob of tars); parquet:/path; hf:NAME",
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
    help="array_record (default): random access; tfrecord: read from start to"
    " end, for a large data set in a bucket",
  )
  parser.add_argument(
    "--splits",
    help="splits to import, separated by commas (default: all of SOURCE);"
    " for csv, tars and parquet also train=PATTERN,validation=PATTERN of file"
    " names",
  )
  parser.add_argument(
    "--image",
    help="column of images (default: image, csv: or file); tars: extension",
  )
  parser.add_argument(
    "--label",
    help="column of labels (default: label)",
  )
  parser.add_argument(
    "--numbers",
    metavar="COLUMNS",
    help="columns with numbers to predict (regression), separated by commas"
    " (csv, parquet); or one column of lists",
  )
  parser.add_argument(
    "--classes",
    help="file with the class names in the order of the labels, one per line"
    " (all sources but folder)",
  )
  parser.add_argument(
    "--max_pixels",
    type=cli.positive,
    metavar="N",
    help="height x width of the largest image that is imported (default:"
    f" {MAX_PIXELS})",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Prepares a data set, or ends the process with an error."""
  args = parse(argv)
  from vit_jax.data import download_and_prepare

  download_and_prepare.main(args)
