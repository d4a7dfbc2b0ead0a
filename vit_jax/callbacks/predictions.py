"""Saves images with their predictions at the end, for the run's report."""

import io

import jax
import numpy as np

from vit_jax.callbacks.base import Callback
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.paths import run_path
from vit_jax.step import TrainState
from vit_jax.writers import atomic_files

FILE = "predictions.npz"
NUM_PREDICTIONS = 64  # number of test images with their predictions
NUM_MISTAKES = 24  # number of the most confident mistakes


class SavePredictions(Callback):
  """Writes images and mistakes of the first evaluator that has predictions.

  Only a run of one process does: each of several processes sees only a part of
  the images.

  Args:
    evaluators: Evaluators of the run.
    workdir: Folder of the run.
  """

  def __init__(self, evaluators: list[Evaluator], workdir: str):
    self._evaluators = evaluators
    self._path = run_path(workdir) / FILE

  def on_end(self, state: TrainState) -> None:
    """Writes the file.

    Raises:
      WriteError: It cannot be written; an earlier file does not change.
    """
    if jax.process_count() > 1:
      return
    for evaluator in self._evaluators:
      params = state.eval_params
      rows = evaluator.predictions(params, NUM_PREDICTIONS, NUM_MISTAKES)
      if rows is not None:
        packed = io.BytesIO()
        np.savez_compressed(packed, **rows)
        atomic_files.replace(self._path, packed.getvalue())
        return
