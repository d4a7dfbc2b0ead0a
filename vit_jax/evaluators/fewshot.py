"""Few-shot accuracy: ridge regression on frozen features.

Ridge regression maps the features of a few examples per class to {-1, 1}
targets in closed form. It is then scored on a whole split (section 4.1 of
arXiv:2010.11929). One eigendecomposition per draw of the shots serves all L2
weights. The config fixes the weights, and the first one gives the main score,
so that nothing is chosen on the split that is scored.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from vit_jax.batch import DataError, normalise
from vit_jax.class_names import Head
from vit_jax.evaluators.evaluator import (
  Answers,
  Context,
  Evaluator,
  Outputs,
  Params,
  Splits,
)
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
  train_split: str = option("train", "split from which the shots are drawn")
  shots: tuple[int, ...] = option(
    (1, 5, 10, 25),
    "examples per class; 0: all of train_split, written as <name>/all. If at"
    " least half of the classes have enough examples, the others give all of"
    " theirs",
  )
  seeds: tuple[int, ...] = option(
    (0, 1, 2), "seeds of the draws of the shots; scores are averaged over them"
  )
  l2: tuple[float, ...] = option(
    (1024.0,),
    "weights of the L2 penalty; all are scored. The first gives"
    " <name>/<k>shot, each other one <name>/l2=<weight>/<k>shot",
  )
  baselines: bool = option(
    False, "whether random weights and raw pixels are also scored, once"
  )

  LEFT_OUT_BY: ClassVar[tuple[str, str] | None] = ("fewshot", "available")

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    if not self.l2 or min(self.l2) <= 0:
      yield (
        f"{where}.l2: got {self.l2}, expected numbers above 0, such as 16,1024."
      )
    if not self.shots or min(self.shots) < 0:
      yield (
        f"{where}.shots: got {self.shots}, expected examples per class, such as"
        " 1,5; 0 means all examples."
      )
    if not self.seeds or min(self.seeds) < 0:
      yield f"{where}.seeds: got {self.seeds}, expected seeds, such as 0,1."

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields also an error if there are fewer examples than shots.

    If the labels are in the records, only the number of images is checked,
    because it may take minutes to read the labels.
    """
    from vit_jax.ridge import fewest_examples, sample_shots

    yield from super().check(where, sources, head, out)
    train, shots = sources["train_split"], max(self.shots, default=0)
    if train.is_multilabel or not shots:
      return
    least = fewest_examples(shots, train.num_classes)
    if train.knows_labels:
      try:
        sample_shots(train.labels(), shots, 0, train.num_classes)
      except ValueError as e:
        yield f"{where}.{e}"
    elif train.num_examples < least:
      yield (
        f"{where}.shots: got {shots} per class, but {train.num_examples:,}"
        f" images of {train.num_classes:,} classes in {train.name!r}"
        f" [{train.split}], expected {least:,} or more: {shots} for half of the"
        " classes, and one for each of the others. Take fewer shots, or a"
        " larger train_split."
      )

  def num_images(self, sources: Splits) -> tuple[int, ...]:
    """See `EvaluatorConfig`; assumes that no two draws share an image."""
    train, test = (sources[option] for option in self.SPLITS)
    drawn = max(self.shots) * train.num_classes * len(self.seeds)
    is_whole = 0 in self.shots or drawn > train.num_examples
    return train.num_examples if is_whole else drawn, test.num_examples

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Fewshot(context)


class Fewshot(Features):
  """Scores features by ridge regression on a few labelled images."""

  def __init__(self, context: Context):
    super().__init__(context)
    self._baselines: dict[str, float] = {}
    self._has_baselines = False  # set in all processes, also if one scores
    self.note += self._few_note

    def pixels(params, batch):
      del params
      x = normalise(batch["image"]).reshape(len(batch["image"]), -1)
      return {"x": x, **{k: batch[k] for k in ("label", "mask", "index")}}

    self._pixels = context.once("raw_pixels", lambda: context.jit(pixels))

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    pixels = {"pixels": self._pixels} if self.config.baselines else {}
    return super().programs() | pixels

  def gather(self, params: Params) -> dict[str, tuple[Rows, Rows]]:
    """Returns origin -> (features of all shots, features of the scored split).

    The origin "" is the model; the others are baselines. Each split passes
    through the model once, for all shots and seeds together.
    """
    features = {"": (self._features, params)}
    if self.config.baselines and not self._has_baselines:
      self._has_baselines = True
      features["random_init/"] = (self._features, self.context.random_params())
      features["raw_pixels/"] = (self._pixels, params)
    drawn = np.unique(np.concatenate(list(self._draws.values())))
    return {
      origin: (
        extract(self.context, self._train, fn, params, drawn),
        extract(self.context, self._test, fn, params),
      )
      for origin, (fn, params) in features.items()
    }

  def score(self, gathered: dict[str, tuple[Rows, Rows]]) -> dict[str, float]:
    """Returns accuracies, averaged over the seeds.

    `<name>/<k>shot` has the first L2 weight, `<name>/l2=<weight>/<k>shot` has
    another one. `<name>/all` is learned from the whole train_split. With
    config.baselines, `<name>/random_init/...` (the same network with random
    weights) and `<name>/raw_pixels/...` are computed once.
    """
    scores: dict[str, float] = {}
    for origin, (support, test) in gathered.items():
      accuracies = self._accuracies(support, test, is_model=not origin)
      into = self._baselines if origin else scores
      for metric, value in accuracies.items():
        into[f"{self.config.name}/{origin}{metric}"] = value
    return scores | self._baselines

  def _accuracies(
    self, support: Rows, test: Rows, is_model: bool
  ) -> dict[str, float]:
    from vit_jax import ridge

    l2s, accuracies = self.config.l2, {}
    for shots in self.config.shots:
      draws = [key for key in self._draws if key[0] == shots]
      scores = np.zeros((len(draws), len(l2s)))
      for i, draw in enumerate(draws):
        # The rows lack images that have no label or could not be decoded.
        rows = np.isin(support["index"], self._draws[draw])
        fits = ridge.fit(
          support["x"][rows],
          support["label"][rows],
          self.num_classes,
          l2s,
        )
        scores[i] = [ridge.accuracy(f, test["x"], test["label"]) for f in fits]
        if not shots and is_model:
          self.answers = Answers(
            f"the regression on all examples, L2 {l2s[0]:g}",
            "score",
            test["index"],
            test["label"],
            *ridge.scores(fits[0], test["x"], test["label"]),
          )
      for l2, value in zip(l2s, scores.mean(axis=0), strict=True):
        prefix = "" if l2 == l2s[0] else f"l2={l2:g}/"
        name = f"{shots}shot" if shots else "all"
        accuracies[prefix + name] = float(value)
    return accuracies

  @functools.cached_property
  def _draws(self) -> dict[tuple[int, int], np.ndarray]:
    """(shots, seed) -> indices of the records; reads the labels once.

    Raises:
      DataError: There are fewer images than shots, see `ridge.sample_shots`.
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
          (k, seed): ridge.sample_shots(labels, k, seed, self.num_classes)
          for k in shots
          for seed in self.config.seeds
        }
      except ValueError as e:  # `check` does not read labels in records
        raise DataError(f"config.evals.{self.config.name}.{e}") from None
    return drawn

  @property
  def _few_note(self) -> str:
    """A note about classes with fewer examples than shots, or ""."""
    source, most = self.context.sources["train_split"], max(self.config.shots)
    if not (most and source.knows_labels):
      return ""
    labels = source.labels()
    counts = np.bincount(labels[labels >= 0], minlength=source.num_classes)
    few = few_classes(counts, most, source.class_names)
    return f"; {few}" if few else ""


def few_classes(
  counts: np.ndarray,
  shots: int,
  names: Sequence[str] | None = None,
) -> str:
  """Returns a text about the classes with fewer images than shots, or "".

  Args:
    counts: Number of images of each class, [classes].
    shots: Examples per class.
    names: Names of the classes; None: their numbers.

  Example:
    >>> few_classes(np.array([40, 3, 12]), 25, "abc")
    '2 of 3 classes have fewer than 25 images, the fewest b: 3'
  """
  if not (few := np.count_nonzero(counts < shots)):
    return ""
  rarest = int(np.argmin(counts))
  return (
    f"{few:,} of {len(counts):,} classes {'has' if few == 1 else 'have'} fewer"
    f" than {shots} images, the fewest"
    f" {names[rarest] if names else f'class {rarest}'}: {counts[rarest]:,}"
  )
