"""Few-shot accuracy: ridge regression on frozen features.

A linear map from a layer's output to {-1, 1} targets is solved in closed form
for a few examples per class, then scored on a whole split (section 4.1 of
arXiv:2010.11929). Every draw of the shots takes one eigendecomposition,
whatever the number of L2 weights. All weights are fixed in the config, and the
first of them gives the main score: nothing is chosen on the split that is
scored.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from vit_jax.batch import DataError, normalise
from vit_jax.evaluators.evaluator import Answers, Context, Evaluator
from vit_jax.evaluators.features import (
  Features,
  FeaturesConfig,
  Rows,
  extract,
)
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class FewshotConfig(FeaturesConfig):
  """Closed-form ridge regression on frozen features."""

  name: str = "fewshot"
  kind: str = "fewshot"
  train_split: str = option("train", "split the shots are drawn from")
  shots: tuple[int, ...] = option(
    (1, 5, 10, 25),
    "examples per class; 0: all of train_split, as <name>/all. A class with"
    " fewer gives all of its own, where most have enough",
  )
  seeds: tuple[int, ...] = option((0, 1, 2), "draws of the shots, averaged")
  l2: tuple[float, ...] = option(
    (1024.0,),
    "weights of the L2 penalty, fixed beforehand: the first gives"
    " <name>/<k>shot, each other one <name>/l2=<weight>/<k>shot",
  )
  baselines: bool = option(
    False, "also score random weights and raw pixels, once"
  )

  LEFT_OUT_BY: ClassVar[tuple[str, str] | None] = ("fewshot", "available")

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    if not self.l2 or min(self.l2) <= 0:
      yield (
        f"{where}.l2: got {self.l2}, expected numbers above 0 such as 16,1024."
      )
    if not self.shots or min(self.shots) < 0:
      yield (
        f"{where}.shots: got {self.shots}, expected numbers such as 1,5, or 0"
        " for all examples."
      )
    if not self.seeds or min(self.seeds) < 0:
      yield f"{where}.seeds: got {self.seeds}, expected numbers such as 0,1."

  def check(
    self, where: str, sources: Mapping[str, Any], head: Any, out: Any
  ) -> Iterator[str]:
    """Yields also a fault for more shots than there are examples.

    Where labels are in files, whose reading may take minutes, only for more
    than there can be, given the numbers of images and classes.
    """
    from vit_jax.ridge import fewest_examples, sample_shots

    yield from super().check(where, sources, head, out)
    train, shots = sources["train_split"], max(self.shots, default=0)
    if train.is_multilabel or not shots:
      return
    least = fewest_examples(shots, train.num_classes)
    if train.knows_labels:
      try:
        sample_shots(
          train.labels(), shots, 0, train.num_classes, allow_fewer=True
        )
      except ValueError as e:
        yield f"{where}.{e}"
    elif train.num_examples < least:
      yield (
        f"{where}.shots: got {shots} per class, but {train.num_examples:,}"
        f" images of {train.num_classes:,} classes in {train.name!r}"
        f" [{train.split}], expected {least:,} or more: {shots} for half of the"
        " classes, and one for each of the others. Take fewer shots, or a"
        " larger train_split to draw them from."
      )

  def num_images(self, sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Counts the shots of all draws of train_split, as if none were alike."""
    train, test = (sources[option] for option in self.SPLITS)
    drawn = max(self.shots) * train.num_classes * len(self.seeds)
    is_whole = 0 in self.shots or drawn > train.num_examples
    return train.num_examples if is_whole else drawn, test.num_examples

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Fewshot(context)


class Fewshot(Features):
  """Scores the features of a model by a classifier learned from few labels.

  The head is not used: the data set's own classes are learned. With fake data,
  two batches of each split are read.
  """

  def __init__(self, context: Context):
    super().__init__(context)
    self._baselines: dict[str, float] = {}
    self._has_baselines = False  # in all processes; one alone scores
    self.note += self._fewer

    def pixels(params, batch):
      del params
      found = normalise(batch["image"]).reshape(len(batch["image"]), -1)
      return {"x": found, **{k: batch[k] for k in ("label", "mask", "index")}}

    self._pixels = context.once("raw_pixels", lambda: context.jit(pixels))

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    pixels = {"pixels": self._pixels} if self.config.baselines else {}
    return super().programs() | pixels

  def gather(self, params: Any) -> dict[str, tuple[Rows, Rows]]:
    """Returns the features by their origin ("": the model).

    Each split is passed through once, for all shots and seeds together. The
    pair has the rows of all shots, and those of the split to score.
    """
    features = {"": (self._features, params)}
    if self.config.baselines and not self._has_baselines:
      self._has_baselines = True
      features["random_init/"] = (self._features, self.context.random_params())
      features["raw_pixels/"] = (self._pixels, params)
    wanted = np.unique(np.concatenate(list(self._chosen.values())))
    return {
      of: (
        extract(self.context, self._train, fn, params, wanted),
        extract(self.context, self._test, fn, params),
      )
      for of, (fn, params) in features.items()
    }

  def score(self, gathered: dict[str, tuple[Rows, Rows]]) -> dict[str, float]:
    """Returns `<name>/<k>shot`: accuracy, the mean over the seeds.

    `<name>/all` is that of a map learned from the whole train_split.

    That is with the first L2 weight; `<name>/l2=<weight>/<k>shot` with each of
    the others. With config.baselines also `<name>/random_init/...`, the same
    network with random weights, and `<name>/raw_pixels/...`; these stay the
    same and are computed once.
    """
    scores: dict[str, float] = {}
    for of, (support, test) in gathered.items():
      found = self._baselines if of else scores
      of_shots = self._accuracies(support, test, is_model=not of)
      for metric, value in of_shots.items():
        found[f"{self.config.name}/{of}{metric}"] = value
    return scores | self._baselines

  def _accuracies(
    self, support: Rows, test: Rows, is_model: bool
  ) -> dict[str, float]:
    from vit_jax import ridge

    l2s, found = self.config.l2, {}
    for shots in self.config.shots:
      draws = [key for key in self._chosen if key[0] == shots]
      scores = np.zeros((len(draws), len(l2s)))
      for i, draw in enumerate(draws):
        # Images without a label, or not decoded, are not among the rows.
        rows = np.isin(support["index"], self._chosen[draw])
        fits = ridge.fit(
          support["x"][rows],
          support["label"][rows],
          self.num_classes,
          l2s,
        )
        scores[i] = [ridge.accuracy(f, test["x"], test["label"]) for f in fits]
        if not shots and is_model:
          by = f"learned from all examples, L2 {l2s[0]:g}"
          found_of = ridge.scores(fits[0], test["x"], test["label"])
          self.answers = Answers(
            by, "score", test["index"], test["label"], *found_of
          )
      for l2, value in zip(l2s, scores.mean(axis=0), strict=True):
        prefix = "" if l2 == l2s[0] else f"l2={l2:g}/"
        found[prefix + (f"{shots}shot" if shots else "all")] = float(value)
    return found

  @functools.cached_property
  def _chosen(self) -> dict[tuple[int, int], np.ndarray]:
    """(shots, seed) -> record numbers; reads the labels of the split once.

    Raises:
      DataError: There are more shots than images, see `ridge.sample_shots`.
    """
    from vit_jax import ridge

    if self.context.config.fake_data:  # whose labels are 0, 1, ... in turn
      few = self._train.num_examples
      return {
        (k, seed): np.arange(min(few, k * self.num_classes or few))
        for k in self.config.shots
        for seed in (self.config.seeds if k else (0,))
      }
    everything = np.arange(self._train.num_examples)
    drawn = {(0, 0): everything} if 0 in self.config.shots else {}
    if shots := [k for k in self.config.shots if k]:
      labels = self.context.labels(self._train)
      try:
        drawn |= {
          (k, seed): ridge.sample_shots(
            labels, k, seed, self.num_classes, allow_fewer=True
          )
          for k in shots
          for seed in self.config.seeds
        }
      except ValueError as e:  # of files whose labels were not read before
        raise DataError(f"config.evals.{self.config.name}.{e}") from None
    return drawn

  @property
  def _fewer(self) -> str:
    """A text on classes with fewer examples than shots, or ""."""
    # Of the whole split, with fake data too, as `learns_from` counts it.
    source, most = self.context.sources["train_split"], max(self.config.shots)
    if not (most and source.knows_labels):
      return ""
    labels = source.labels()
    counts = np.bincount(labels[labels >= 0])
    if not (few := np.count_nonzero(counts < most)):
      return ""
    return f"; {few} classes have fewer than {most} images, {counts.min()}"
