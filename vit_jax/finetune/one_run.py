"""One of several runs of a command, as in trials and searches."""

import json
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from vit_jax.checkpointing import checkpointer
from vit_jax.config import Config, ConfigError
from vit_jax.distributed import agreement
from vit_jax.train import train_and_evaluate
from vit_jax.writers import run_info
from vit_jax.writers.metric_writer import read_metrics

RESULT = "result.json"  # file of a finished run
# The function `run`, or a stand-in for it.
Run = Callable[[Config, epath.Path, bool], dict[str, Any]]


def run(
  config: Config,
  folder: epath.Path,
  keeps_weights: bool,
  train: Callable[[Config, str], object] = train_and_evaluate,
) -> dict[str, Any]:
  """Trains a run, unless it is finished, and returns its result.

  Args:
    config: The run.
    folder: Its folder.
    keeps_weights: Whether its checkpoints stay if it does not diverge.
    train: Function that trains it.

  Returns:
    `scores` of the last step; its `step`; `error`, None unless it diverged.
  """
  if (row := read_by_first(folder / RESULT)) is None:
    print_once(f"run         {folder}")
    error = None
    try:
      train(config, str(folder))
    except FloatingPointError as e:
      error = str(e)
      print_once(f"diverged    {folder}: {error}")
    if jax.process_index() == 0:
      rows = read_metrics(str(folder))
      last = max((r["step"] for r in rows), default=0)
      scores = {k: v for r in rows if r["step"] == last for k, v in r.items()}
      row = {
        "scores": {
          k: v
          for k, v in scores.items()
          if "/" in k and not k.startswith("train/")
        },
        "step": last,
        "error": error,
      }
      run_info.write_json(str(folder), RESULT, row)
      if not (keeps_weights or error):  # an error names them
        # 19 tasks with 4 points would write 50 GB for ViT-B/16.
        (folder / checkpointer.FOLDER).rmtree(missing_ok=True)
    if error and jax.process_count() > 1:
      # Only process 0 knows that a score is not finite. The other processes
      # continue, and would wait for it for ever.
      raise ConfigError(
        [f"{folder}: {error} Run the same command again for the next point."]
      )
    # Each run compiles its own functions, which jax would keep in memory.
    jax.clear_caches()
    row = read_by_first(folder / RESULT)
  return row


def read_by_first(path: epath.Path) -> Any:
  """Returns the JSON of a file that process 0 reads; None: there is no file.

  Collective. On a shared disk other processes may see an older file.
  """
  is_first = jax.process_index() == 0
  text = path.read_text() if is_first and path.exists() else ""
  text = agreement.broadcast_text(text)
  return json.loads(text) if text else None


def print_once(text: str) -> None:
  """Prints a line, only in process 0."""
  if jax.process_index() == 0:
    print(text, flush=True)
