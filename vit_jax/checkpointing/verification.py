"""Checks every checkpoint of a run, for `vit-jax verify`."""

import sys

from vit_jax.checkpointing import checkpointer, layout
from vit_jax.paths import absolute, run_path


def main(run: str, only: int | None = None) -> None:
  """Prints a line for each checkpoint, the oldest first.

  It ends the process with status 1 if a checkpoint is damaged, or if there is
  none.

  Args:
    run: Folder of a run, or its folder of checkpoints.
    only: The step to check; None for all.
  """
  folder = absolute(run_path(run))
  if folder.name != checkpointer.FOLDER:
    folder /= checkpointer.FOLDER
  try:
    steps = layout.step_folders(folder)
    if not steps:
      sys.exit(f"{folder}: got no checkpoint, expected a run's.")
    if only is not None and only not in steps:
      there = ", ".join(map(str, sorted(steps)))
      sys.exit(f"{folder}: got no step {only}; there is {there}.")
    wanted = sorted(steps) if only is None else [only]
    num_damaged = 0
    for step in wanted:
      error = checkpointer.verify(steps[step])
      if error and not steps[step].is_dir():
        continue  # a training run has removed it meanwhile
      if error:
        num_damaged += 1
        text = f"damaged: {error}"
      else:
        num_arrays = sum(map(len, layout.read_digests(steps[step]).values()))
        text = f"ok: {num_arrays:,} arrays"
      print(f"step {step:<10,} {text}", flush=True)
  except OSError as e:
    sys.exit(f"{folder}: cannot be read ({type(e).__name__}: {e}).")
  if num_damaged:
    sys.exit(f"{num_damaged} of {len(wanted)} damaged")
