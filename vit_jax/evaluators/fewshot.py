"""Few-shot accuracy: ridge regression on frozen features.

A linear map from a layer's output to {-1, 1} targets is solved in closed form
for a few examples per class, then scored on a whole split (section 4.1 of
arXiv:2010.11929). The L2 weight is fixed in the config: nothing is picked on
the split that is scored.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import ridge
from vit_jax.config import Config, FewshotConfig
from vit_jax.data.pipeline import eval_batches
from vit_jax.data.sources import open_source
from vit_jax.sharding import replicated, to_global


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
      return {"features": _layer(out, config.layer), **batch}

    self._features = jax.jit(features, out_shardings=replicated(mesh))

  def run(self, params: Any) -> dict[str, float]:
    """Returns `<name>/<k>shot`: accuracy, the mean over the seeds.

    With config.baselines also `<name>/random_init/<k>shot`, the same network
    with random weights, and `<name>/raw_pixels/<k>shot`, which stay the same
    and are computed once.
    """
    name = self.config.name
    scores = self._accuracies(name, self._extract(params))
    if self.config.baselines and not self._baselines:
      sides = self._extract(self._random_params())
      pixels = [(_flat_pixels(rows["image"]), rows) for _, rows in sides]
      self._baselines = {
        **self._accuracies(f"{name}/random_init", sides),
        **self._accuracies(f"{name}/raw_pixels", pixels),
      }
    return scores | self._baselines

  def _extract(self, params) -> list[tuple[np.ndarray, dict]]:
    """Features and rows of the support's split and of the scored one."""
    sides = []
    for source in (self._support, self._test):
      batches = eval_batches(
        source,
        self.config.ops,
        batch_size=self.config.batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
      )
      parts = [
        jax.device_get(self._features(params, to_global(b, self._mesh)))
        for b in batches
      ]
      rows = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
      keep = rows["mask"]
      rows = {k: v[keep] for k, v in rows.items()}
      sides.append((rows["features"], rows))
    return sides

  def _accuracies(self, prefix: str, sides) -> dict[str, float]:
    (x, train), (x_test, test) = sides
    found = {}
    for shots in self.config.shots:
      scores = []
      for seed in self.config.seeds:
        chosen = ridge.sample_shots(train["label"], shots, seed)
        fit = ridge.fit(
          x[chosen],
          train["label"][chosen],
          self._support.num_classes,
          self.config.l2,
        )
        scores.append(ridge.accuracy(fit, x_test, test["label"]))
      found[f"{prefix}/{shots}shot"] = float(np.mean(scores))
    return found


def _flat_pixels(images: np.ndarray) -> np.ndarray:
  """uint8 [n, h, w, c] -> float32 [n, h * w * c] in [-1, 1]."""
  return images.reshape(len(images), -1).astype(np.float32) / 127.5 - 1


def _layer(out: dict, path: str) -> jax.Array:
  """Finds "encoder/block03/+mlp" in nested dicts, mean over tokens if any."""
  found = out
  for key in path.split("/"):
    if not isinstance(found, dict) or key not in found:
      known = sorted(found) if isinstance(found, dict) else []
      raise ValueError(
        f"config.evals.*.layer: got {path!r}, expected a name among"
        f" {', '.join(known)} at {key!r}."
      )
    found = found[key]
  return found if found.ndim == 2 else found.mean(axis=1)
