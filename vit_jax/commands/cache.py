"""Lists the caches, or removes one: `vit-jax cache --remove=shrunk`."""

import argparse
import pathlib
import shutil
from collections.abc import Sequence

from vit_jax.config import cli

# Folder in the user's cache -> contents.
CACHES = {
  "shrunk": "large images of folders, shrunk (config.data.shrink)",
  "weights": "weights from the web",
  "xla": "compiled programs",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the arguments after the verb."""
  parser = cli.parser(
    "cache",
    "Lists the caches on this disk, with size and path. The next run that"
    "\nneeds a removed cache makes or downloads it again.",
    "vit-jax cache\nvit-jax cache --remove=shrunk",
  )
  parser.add_argument("--remove", choices=CACHES, help="cache to remove")
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Removes the cache of --remove, then prints a line for each cache."""
  args = parse(argv)
  from vit_jax.paths import cache_folder

  if args.remove:
    shutil.rmtree(cache_folder(args.remove), ignore_errors=True)
  for name, about in CACHES.items():
    folder = cache_folder(name)
    size = sum(map(_num_bytes, folder.rglob("*"))) / 2**20
    print(f"{name:<8}{size:>12,.1f} MiB  {about}: {folder}")


def _num_bytes(path: pathlib.Path) -> int:
  """Returns the size of a file; 0 for a folder, or if a run has moved it."""
  try:
    return path.stat().st_size if path.is_file() else 0
  except OSError:
    return 0
