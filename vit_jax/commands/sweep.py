"""Searches a grid of options: `vit-jax sweep --config=FILE`."""

from collections.abc import Sequence

from vit_jax.config import cli

FLAGS = {
  "grid": "option=value,value,... without config., to be tried in every"
  " combination with those of further --grid (default: the config file's"
  " get_grid)",
  "workdir": "folder of the search (default: runs/<config name>_sweep)",
  "available": "leave out tasks whose data are not on disk",
  "against": "folder of another search, to be compared with in the table",
  **cli.PROCESS_FLAGS,
}


def parse(argv: Sequence[str]) -> dict[str, tuple[str, str, cli.Args]]:
  """Parses the words after the verb, for each task of the config file."""
  return cli.parse_tasks(
    "sweep",
    FLAGS,
    argv,
    switches=("available",),
    several=("grid",),
    description="Trains every combination of some options, scores each on"
    " held-out training images, trains with the best on all of them, and scores"
    " the test split once. The same command again goes on where it stopped.",
    example="vit-jax sweep --workdir=runs/digits_sweep \\\n"
    "    --config=digits_finetune:init=runs/glyphs --grid=optim.lr=0.03,0.06",
  )


def main(argv: Sequence[str]) -> None:
  """Searches, or ends the process with all that is wrong."""
  parsed = parse(argv)
  from vit_jax.sweep import sweep

  sweep.main(parsed)
