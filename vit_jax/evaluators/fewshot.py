"""Few-shot accuracy: ridge regression on frozen features.

A linear map from a layer's output to {-1, 1} targets is solved in closed form
for a few examples per class, then scored on a whole split (section 4.1 of
arXiv:2010.11929). Every draw of the shots takes one eigendecomposition,
whatever the number of L2 weights. All weights are fixed in the config, and the
first of them is the one that counts: nothing is picked on the split that is
scored.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import ridge
from vit_jax.batch import normalise
from vit_jax.config import Config, FewshotConfig
from vit_jax.data.pipeline import eval_batches
from vit_jax.data.sources import Source, open_source
from vit_jax.evaluators.forward import forward
from vit_jax.sharding import replicated
from vit_jax.weights import Head

Rows = dict[str, np.ndarray]  # x float [n, d]; label, index int [n]


class Fewshot:
  """Scores features of a model by what a few labels make of them.

  Args:
    config: What to score; dataset and batch_size are set.
    run: The run it belongs to.
    predict: (params, uint8 images) -> (logits, out).
    mesh: Where it runs.
    random_params: Makes freshly initialised parameters, for the baseline.
    head: Not needed here: the data set's own classes are learned.
  """

  def __init__(
    self,
    config: FewshotConfig,
    run: Config,
    predict: Callable,
    mesh: Mesh,
    random_params: Callable,
    head: Head,
  ):
    del head
    self.config = config
    self._mesh = mesh
    self._random_params = random_params
    self._baselines: dict[str, float] = {}
    self._support, self._test = (
      open_source(config.dataset, split, run.data.data_dir, fake=run.fake_data)
      for split in (config.train_split, config.split)
    )
    self.note = (
      f"{config.dataset}, learns from [{config.train_split}]"
      f" ({self._support.num_examples:,} images,"
      f" {self._support.num_classes:,} classes), scored on [{config.split}]"
      f" ({self._test.num_examples:,})"
    )

    def features(params, batch):
      _, out = predict(params, batch["image"])
      return layer_of(out, config.layer)

    def pixels(params, batch):
      del params
      return normalise(batch["image"]).reshape(len(batch["image"]), -1)

    # Rows are split over the mesh; of `out` only one layer is computed to the
    # end, gathered and fetched.
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

    `<name>/all` is that of a map learned from the whole train_split.

    That is with the first L2 weight; `<name>/l2=<weight>/<k>shot` with each of
    the others. With config.baselines also `<name>/random_init/...`, the same
    network with random weights, and `<name>/raw_pixels/...`; these stay the
    same and are computed once.
    """
    return self.score(self.gather(params))

  def gather(self, params: Any) -> dict[str, tuple[Rows, Rows]]:
    """Runs on the devices: features by what they are of ("": the model).

    Each split is passed through once, for all shots and seeds together. The
    pair holds the rows of all shots, and those of the split to score.
    """
    features = {"": (self._features, params)}
    if self.config.baselines and not self._baselines:
      features["random_init/"] = (self._features, self._random_params())
      features["raw_pixels/"] = (self._pixels, None)
    wanted = np.unique(np.concatenate(list(self._chosen.values())))
    return {
      of: (
        self._extract(self._support, fn, params, wanted),
        self._extract(self._test, fn, params, None),
      )
      for of, (fn, params) in features.items()
    }

  def score(self, gathered: dict[str, tuple[Rows, Rows]]) -> dict[str, float]:
    """Runs on the host, maybe in a thread; returns what `run` does."""
    scores: dict[str, float] = {}
    for of, (support, test) in gathered.items():
      found = self._baselines if of else scores
      for metric, value in self._accuracies(support, test).items():
        found[f"{self.config.name}/{of}{metric}"] = value
    return scores | self._baselines

  def _accuracies(self, support: Rows, test: Rows) -> dict[str, float]:
    l2s, found = self.config.l2, {}
    for shots in self.config.shots:
      draws = [key for key in self._chosen if key[0] == shots]
      scores = np.zeros((len(draws), len(l2s)))
      for i, draw in enumerate(draws):
        # What could not be decoded is not among the rows.
        rows = np.isin(support["index"], self._chosen[draw])
        fits = ridge.fit(
          support["x"][rows],
          support["label"][rows],
          self._support.num_classes,
          l2s,
        )
        scores[i] = [ridge.accuracy(f, test["x"], test["label"]) for f in fits]
      for l2, value in zip(l2s, scores.mean(axis=0), strict=True):
        prefix = "" if l2 == l2s[0] else f"l2={l2:g}/"
        found[prefix + (f"{shots}shot" if shots else "all")] = float(value)
    return found

  @functools.cached_property
  def _chosen(self) -> dict[tuple[int, int], np.ndarray]:
    """(shots, seed) -> record numbers; reads the labels of the split once."""
    everything = np.arange(self._support.num_examples)
    drawn = {(0, 0): everything} if 0 in self.config.shots else {}
    if shots := [k for k in self.config.shots if k]:
      labels = self._support.labels()
      drawn |= {
        (k, seed): ridge.sample_shots(labels, k, seed)
        for k in shots
        for seed in self.config.seeds
      }
    return drawn

  def _extract(
    self,
    source: Source,
    extract: Callable,
    params,
    indices: np.ndarray | None,
  ) -> Rows:
    """Features, labels and record numbers, in the order of the records."""
    batches = eval_batches(
      source,
      self.config.ops,
      batch_size=self.config.batch_size,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
      indices=indices,
    )
    parts = list(forward(extract, params, batches, self._mesh))
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
