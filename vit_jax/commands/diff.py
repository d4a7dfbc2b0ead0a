"""Shows where two runs diverge: `vit-jax diff RUN RUN`.

Prints the options, versions and data that differ. Prints the first row of
metrics.jsonl that differs, and the number of rows that differ. For each
checkpoint that both runs have, prints the first array that differs, and the
number of arrays that differ. Metrics that measure the machine, such as images
per second, are ignored. Arrays are compared by their stored digests.

The exit status is 0 if everything that both runs have is equal, 1 if anything
differs, 2 if nothing can be compared.
"""

import argparse
import sys
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "diff", __doc__.partition("\n\n")[2], "vit-jax diff runs/a runs/b"
  )
  parser.add_argument("runs", nargs=2, metavar="RUN", help="folder of a run")
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
  """Prints the comparison; returns the exit status."""
  args = parse(argv)
  from vit_jax.tools.reporting import run_diff

  try:
    comparison = run_diff.compare(*args.runs)
  except (FileNotFoundError, ValueError) as e:
    print(e, file=sys.stderr)
    return 2
  print("\n".join(comparison.lines))
  if not comparison.is_compared:
    return 2
  return 0 if comparison.is_equal else 1
