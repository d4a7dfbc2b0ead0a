"""Images kept with their predictions, for the page of a run."""

import io
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.writers import atomic_files

NUM_PREDICTIONS = 64  # test images kept with their predictions
NUM_MISTAKES = 24  # most confident mistakes kept


def save(evaluators: list[Evaluator], params: Any, workdir: str) -> None:
  """Keeps images and mistakes of the first evaluator that has predictions."""
  if jax.process_count() > 1:
    return  # this process sees only its own share of the images
  for evaluator in evaluators:
    rows = evaluator.predictions(params, NUM_PREDICTIONS, NUM_MISTAKES)
    if rows is not None:
      _write(epath.Path(workdir) / "predictions.npz", rows)
      return


def _write(path: epath.Path, rows: dict[str, np.ndarray]) -> None:
  """Writes the arrays; what was there stays if it cannot.

  Raises:
    WriteError: It cannot.
  """
  packed = io.BytesIO()
  np.savez_compressed(packed, **rows)
  try:
    atomic_files.replace_text(path, packed.getvalue())
  except OSError as e:
    raise atomic_files.WriteError(
      f"{path}: cannot be written ({atomic_files.reason(e)}); the run is done"
      " but for"
      " this: make room, and the same command writes it."
    ) from None
