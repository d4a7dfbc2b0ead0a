"""Serves a page that shows the classes and the attention of dropped images.

Only this machine can open the page, unless --host allows others. Images are not
stored.
"""

import argparse
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "serve",
    __doc__,
    "vit-jax serve runs/demo/finetune\nvit-jax serve ViT-B_16.npz --port=9000",
  )
  parser.add_argument(
    "checkpoint", metavar="CHECKPOINT", help="anything that vit_jax.load reads"
  )
  parser.add_argument(
    "--host",
    default="127.0.0.1",
    help="address to listen at (default: %(default)s, this machine only;"
    " 0.0.0.0: all machines that can connect)",
  )
  parser.add_argument(
    "--port",
    type=int,
    metavar="N",
    default=8000,
    help="port (default: %(default)s; 0: any free one)",
  )
  parser.add_argument(
    "--top",
    type=cli.positive,
    metavar="N",
    default=5,
    help="classes shown (default: %(default)s)",
  )
  parser.add_argument(
    "--max_megabytes",
    type=cli.positive,
    metavar="N",
    default=20,
    help="largest file that is accepted (default: %(default)s)",
  )
  parser.add_argument(
    "--max_megapixels",
    type=cli.positive,
    metavar="N",
    default=50,
    help="largest image that is decoded (default: %(default)s); decoding takes"
    " about 14 bytes of memory a pixel",
  )
  args = parser.parse_args(argv)
  if not 0 <= args.port < 65536:
    parser.error(f"--port: got {args.port}, expected 0 to 65535.")
  return args


def main(argv: Sequence[str]) -> None:
  """Serves the page until Ctrl-C."""
  args = parse(argv)
  from vit_jax.tools import serve

  serve.main(args)
