"""Top-1, top-5 and loss over a whole split, every example exactly once."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.batch import Batch
from vit_jax.config import ClassificationConfig, Config
from vit_jax.data.pipeline import eval_batches
from vit_jax.data.sources import open_source
from vit_jax.evaluators.forward import forward
from vit_jax.losses import LOSSES, targets_of
from vit_jax.metrics import mean, sum_and_count, top_k_correct
from vit_jax.sharding import replicated, to_global
from vit_jax.weights import Head, match


class Classification:
  """Scores the head of a model on a split.

  Args:
    config: What to score; dataset and batch_size are set.
    run: The run it belongs to: its loss, and whether data are made up, of
      which two batches are scored.
    predict: (params, uint8 images) -> (logits, out).
    mesh: Where it runs.
    random_params: Not needed here.
    head: The classes of the logits; labels are matched with them.
  """

  def __init__(
    self,
    config: ClassificationConfig,
    run: Config,
    predict: Callable,
    mesh: Mesh,
    random_params: Callable,
    head: Head,
  ):
    del random_params
    self.config = config
    self._mesh = mesh
    source = open_source(
      config.dataset, config.split, run.data.data_dir, fake=run.fake_data
    )
    if run.fake_data:  # a trial: two batches show that it works
      few = min(source.num_examples, 2 * config.batch_size)
      source = dataclasses.replace(source, num_examples=few)
    self._source = source
    self._columns, how = match(source, head)
    self.note = f"{source.name} [{source.split}], {how}"
    loss_fn = LOSSES[run.loss]

    def sums(params, batch):
      """Sums over the rows that count, and how many they are."""
      logits, _ = predict(params, batch["image"])
      labels = batch["label"]
      per_example = {
        "top1": top_k_correct(logits, labels, 1),
        "top5": top_k_correct(logits, labels, 5),
        "loss": loss_fn(logits, targets_of(labels, logits.shape[-1])),
      }
      return {
        k: sum_and_count(v, batch["mask"]) for k, v in per_example.items()
      }

    def probabilities(params, batch):
      return jax.nn.softmax(predict(params, batch["image"])[0])

    self._sums = jax.jit(sums, out_shardings=replicated(mesh))
    self._probabilities = jax.jit(probabilities, out_shardings=replicated(mesh))

  def run(self, params: Any) -> dict[str, float]:
    """Returns `<name>/top1`, `top5` (shares), `loss` (nats), `count`."""
    return self.score(self.gather(params))

  def gather(self, params: Any) -> list[dict[str, Any]]:
    """Runs on the devices: the sums of every batch."""
    return list(forward(self._sums, params, self._batches(), self._mesh))

  def score(self, sums: list[dict[str, Any]]) -> dict[str, float]:
    """Runs on the host; returns what `run` does."""
    scores = {k: mean([s[k] for s in sums]) for k in sums[0]}
    scores["count"] = float(sum(s["top1"][1] for s in sums))
    return {f"{self.config.name}/{k}": v for k, v in scores.items()}

  def predictions(self, params: Any, limit: int) -> dict[str, np.ndarray]:
    """Returns the first images with what the model says; one process only.

    Args:
      params: Of the model.
      limit: How many at most.

    Returns:
      image uint8 [n, h, w, 3], label int [n], prediction int [n] and its
      probability float [n]; label and prediction are columns of the head.
    """
    rows: dict[str, list] = {"image": [], "label": [], "probabilities": []}
    for batch in self._batches():
      probabilities = self._probabilities(params, to_global(batch, self._mesh))
      keep = batch["mask"]
      rows["image"].append(batch["image"][keep])
      rows["label"].append(batch["label"][keep])
      rows["probabilities"].append(np.asarray(probabilities)[keep])
      if sum(len(r) for r in rows["label"]) >= limit:
        break
    found = {k: np.concatenate(v)[:limit] for k, v in rows.items()}
    probabilities = found.pop("probabilities")
    return found | {
      "prediction": probabilities.argmax(-1),
      "probability": probabilities.max(-1),
    }

  def _batches(self) -> Iterator[Batch]:
    """Yields the split with the head's columns for labels."""
    for batch in eval_batches(
      self._source,
      self.config.ops,
      batch_size=self.config.batch_size,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    ):
      yield {**batch, "label": self._columns[batch["label"]]}
