"""Writes a report on runs: `vit-jax report RUN [RUN...]`.

Writes `report.html` (one file with its pictures, which needs no network),
`figures/*.svg` and `summary.json`. The files of one RUN are written to its
folder, those of several to `report/` in the folder that contains all of them.
A part of the page for which the runs have no data is replaced by a line that
says so. Runs that are not complete are marked.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "report",
    __doc__.partition("\n\n")[2],
    "vit-jax report runs/demo\nvit-jax report runs/a runs/b --out=runs/a_b",
  )
  parser.add_argument(
    "runs", nargs="+", metavar="RUN", help="a run, or a folder of runs"
  )
  parser.add_argument("--out", type=cli.local_folder, help="folder to write to")
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Writes the report, and prints the paths of its files."""
  args = parse(argv)
  # Tables are read on the host; a GPU may be busy with the run itself.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from vit_jax.tools.reporting.report import write_report

  try:
    path = write_report(*args.runs, out=args.out)
  except ValueError as e:
    sys.exit(str(e))
  except OSError as e:
    where = e.filename or args.out or args.runs[0]
    sys.exit(f"{where}: {e.strerror or e}; --out=DIR writes elsewhere.")
  print(f"wrote {path}, {path.parent / 'summary.json'}, {path.parent}/figures/")
