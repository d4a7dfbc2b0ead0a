"""Tells where two runs part: `vit-jax diff RUN RUN`.

Names the first step at which they differ, and how: other records, the same in
another order, other pixels, or another loss or gradient of the same images; at
checkpoints the first array that differs, and how many do; and what differs
between the runs: config, devices, mesh, processes, versions, commit. Nothing is
computed, and no array is read. Every run writes what is compared:
`fingerprints.bin`, and digests in its checkpoints.

The exit status is 0 if all is equal that both have, 1 if anything differs, 2 if
nothing can be compared.
"""

import argparse
import sys
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the words after the verb."""
  parser = cli.parser(
    "diff", __doc__.partition("\n\n")[2], "vit-jax diff runs/a runs/b"
  )
  parser.add_argument("runs", nargs=2, metavar="RUN", help="folder of a run")
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
  """Prints the comparison; returns the exit status."""
  args = parse(argv)
  from vit_jax.reporting import first_divergence

  try:
    found = first_divergence.compare(*args.runs)
  except FileNotFoundError as e:
    print(e, file=sys.stderr)
    return 2
  print("\n".join(found.lines))
  if not found.is_compared:
    return 2
  return 0 if found.is_equal else 1
