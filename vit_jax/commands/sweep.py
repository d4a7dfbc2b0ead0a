"""Searches a grid of options: `vit-jax sweep --config=FILE`."""

from collections.abc import Sequence

from vit_jax.config import cli

FLAGS = {
  "grid": "values of an option to try, such as optim.lr=0.03,0.06; with several"
  " --grid every combination is tried (default: get_grid of the config file)",
  "workdir": "folder of the search (default: runs/<config name>_sweep)",
  "available": "leave out tasks whose data are not on disk",
  "against": "folder of another search, to compare in the table",
  **cli.PROCESS_FLAGS,
}


def parse(argv: Sequence[str]) -> dict[str, tuple[str, str, cli.Args]]:
  """Parses the arguments after the verb, for each task of the config file."""
  return cli.parse_tasks(
    "sweep",
    FLAGS,
    argv,
    switches=("available",),
    several=("grid",),
    description="Trains every combination of some options and scores each on"
    " held-out training images. Then trains with the best combination on all"
    " training images, and scores the test split once. The same command, run"
    " again, continues the search.",
    example="vit-jax sweep --workdir=runs/digits_sweep \\\n"
    "    --config=digits_finetune:init=runs/glyphs --grid=optim.lr=0.03,0.06",
  )


def main(argv: Sequence[str]) -> None:
  """Runs the search, or ends the process with all errors."""
  parsed = parse(argv)
  from vit_jax.tools.sweep import sweep

  sweep.main(parsed)
