"""Checks every checkpoint of a run: `vit-jax verify RUN [STEP]`.

Reads all arrays of every step, on the host, and compares their digests with
those that were written beside them. Nothing is changed. The exit status is 1 if
a checkpoint is damaged, or there is none.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from vit_jax.config import cli


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the words after the verb."""
  parser = cli.parser(
    "verify",
    "Checks every checkpoint of a run: reads all arrays and compares their"
    " digests.\nThe exit status is 1 if one is damaged. Needs no accelerator"
    " and the memory of\none checkpoint; changes nothing.",
    "vit-jax verify runs/b16\nvit-jax verify runs/b16 5000",
  )
  parser.add_argument("run", metavar="RUN", help="folder of a run")
  parser.add_argument(
    "step", metavar="STEP", nargs="?", type=int, help="only this step"
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Prints a line for each checkpoint, the oldest first."""
  args = parse(argv)
  # A training run on this machine has its accelerators for itself, also where
  # JAX_PLATFORMS names them for all commands.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from etils import epath

  from vit_jax.checkpointing import checkpointer, layout, retention
  from vit_jax.paths import absolute

  base = absolute(epath.Path(args.run))
  folder = (
    base if base.name == checkpointer.FOLDER else base / checkpointer.FOLDER
  )
  try:
    found = layout.step_folders(folder)
    if args.step is not None:
      found = {s: path for s, path in found.items() if s == args.step}
    if not found:
      there = ", ".join(map(str, sorted(layout.step_folders(folder))))
      if not there:
        sys.exit(f"{folder}: got no checkpoint, expected those of a run.")
      sys.exit(f"{folder}: got no step {args.step}; there is {there}.")
    damaged = 0
    for step, path in sorted(found.items()):
      why = checkpointer.verify(path)
      if why and not path.is_dir():
        continue  # a training run has removed it meanwhile
      damaged += why is not None
      if why:
        text = f"damaged: {why}"
      else:
        number = sum(map(len, layout.read_digests(path).values()))
        text = f"ok: {number:,} arrays"
      print(f"step {step:<10,} {text}", flush=True)
    for path in sorted(folder.iterdir()) if args.step is None else ():
      if retention.is_set_aside(path.name):
        print(f"{path.name:<15} set aside as damaged when the run went on")
  except OSError as e:
    sys.exit(f"{folder}: cannot be read ({type(e).__name__}: {e}).")
  if damaged:
    sys.exit(f"{damaged} of {len(found)} damaged")
