"""Few-shot accuracy: ridge regression on frozen features.

A linear map from a layer's output to {-1, 1} targets is solved in closed form
for a few examples per class, then scored on a whole split (section 4.1 of
arXiv:2010.11929). The L2 weight is fixed in the config: nothing is picked on
the split that is scored.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import ridge
from vit_jax.config import Config, FewshotConfig
from vit_jax.data.pipeline import eval_batches
from vit_jax.data.sources import Source, open_source
from vit_jax.sharding import replicated, to_global
from vit_jax.step import normalise


class Fewshot:
  """Scores features of a model by what a few labels make of them.

  Args:
    config: What to score; dataset and batch_size are set.
    run: The run it belongs to.
    predict: (params, uint8 images) -> (logits, out).
    mesh: Where it runs.
    random_params: Makes freshly initialised parameters, for the baseline.
  """

  def __init__(
    self,
    config: FewshotConfig,
    run: Config,
    predict: Callable,
    mesh: Mesh,
    random_params: Callable,
  ):
    self.config = config
    self._mesh = mesh
    self._random_params = random_params
    self._baselines: dict[str, float] = {}
    self._support, self._test = (
      open_source(config.dataset, split, run.data.data_dir, fake=run.fake_data)
      for split in (config.train_split, config.split)
    )

    def features(params, batch):
      _, out = predict(params, batch["image"])
      return layer_of(out, config.layer)

    def pixels(params, batch):
      del params
      return normalise(batch["image"]).reshape(len(batch["image"]), -1)

    # Every process gets all rows, and solves the same equations.
    self._features, self._pixels = (
      jax.jit(
        lambda params, batch, fn=fn: {
          "x": fn(params, batch),
          **{k: batch[k] for k in ("label", "mask", "index")},
        },
        out_shardings=replicated(mesh),
      )
      for fn in (features, pixels)
    )

  def run(self, params: Any) -> dict[str, float]:
    """Returns `<name>/<k>shot`: accuracy, the mean over the seeds.

    With config.baselines also `<name>/random_init/<k>shot`, the same network
    with random weights, and `<name>/raw_pixels/<k>shot`; these stay the same
    and are computed once.
    """
    name = self.config.name
    if self.config.baselines and not self._baselines:
      random = self._accuracies(self._features, self._random_params())
      pixels = self._accuracies(self._pixels, None)
      self._baselines = {
        **{f"{name}/random_init/{k}": v for k, v in random.items()},
        **{f"{name}/raw_pixels/{k}": v for k, v in pixels.items()},
      }
    scores = self._accuracies(self._features, params)
    return {f"{name}/{k}": v for k, v in scores.items()} | self._baselines

  def _accuracies(self, extract: Callable, params) -> dict[str, float]:
    chosen = self._chosen
    wanted = np.unique(np.concatenate(list(chosen.values())))
    support = self._extract(self._support, extract, params, wanted)
    test = self._extract(self._test, extract, params, None)
    found = {}
    for shots in self.config.shots:
      scores = []
      for seed in self.config.seeds:
        # What could not be decoded is not among the rows.
        rows = np.isin(support["index"], chosen[shots, seed])
        fit = ridge.fit(
          support["x"][rows],
          support["label"][rows],
          self._support.num_classes,
          self.config.l2,
        )
        scores.append(ridge.accuracy(fit, test["x"], test["label"]))
      found[f"{shots}shot"] = float(np.mean(scores))
    return found

  @functools.cached_property
  def _chosen(self) -> dict[tuple[int, int], np.ndarray]:
    """(shots, seed) -> record numbers; reads the labels of the split once."""
    labels = self._support.labels()
    return {
      (shots, seed): ridge.sample_shots(labels, shots, seed)
      for shots in self.config.shots
      for seed in self.config.seeds
    }

  def _extract(
    self,
    source: Source,
    extract: Callable,
    params,
    indices: np.ndarray | None,
  ) -> dict[str, np.ndarray]:
    """Features, labels and record numbers, in the order of the records."""
    batches = eval_batches(
      source,
      self.config.ops,
      batch_size=self.config.batch_size,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
      indices=indices,
    )
    parts = [
      jax.device_get(extract(params, to_global(b, self._mesh))) for b in batches
    ]
    rows = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    rows = {k: v[rows["mask"]] for k, v in rows.items()}
    order = np.argsort(rows["index"])
    return {k: v[order] for k, v in rows.items()}


def layer_of(out: dict, path: str) -> jax.Array:
  """Finds "encoderblock_3/mlp" in nested dicts, the mean over tokens if any.

  Raises:
    ValueError: There is none; the message lists the names.
  """
  found = out
  for key in path.split("/"):
    if not isinstance(found, dict) or key not in found:
      known = sorted(found) if isinstance(found, dict) else []
      raise ValueError(
        f"got {path!r}, expected a name among {', '.join(known)} at {key!r}."
      )
    found = found[key]
  if isinstance(found, dict):
    raise ValueError(f"got {path!r}, expected {path}/ and {', '.join(found)}.")
  return found.mean(axis=tuple(range(1, found.ndim - 1)))
