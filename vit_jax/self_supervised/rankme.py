"""RankMe and the nearest neighbours of features: collapse without labels.

RankMe is the effective rank of the features z of n images, [n, d]:

  p_k = s_k / sum_j s_j + 1e-7, rankme = exp(-sum_k p_k log p_k)

s are the singular values of z, which is not centred. It is d if all directions
are used alike, and 1 if all features are multiples of one. It is at most n:
compare only scores of equally many images, at least several times d.

Source: arXiv:2210.02885, section 3.2; 25,600 images suffice there.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from vit_jax.class_names import Head
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  EvaluatorConfig,
  Outputs,
  Params,
  Splits,
)
from vit_jax.evaluators.features import (
  TOKENS,
  extract,
  features_fn,
  layer_of,
  tokens_error,
)
from vit_jax.evaluators.knn import neighbours, search_program
from vit_jax.options import option

EPSILON = 1e-7
QUERIES = 2048  # images whose nearest other image is searched


@dataclasses.dataclass(frozen=True)
class RankMeConfig(EvaluatorConfig):
  """Effective rank of features, and nearest neighbours; needs no labels."""

  name: str = "rankme"
  kind: str = "rankme"
  split: str = option("train", "split to score; labels are not used")
  layer: str = option(
    "pre_logits",
    "intermediate that is the feature, or cls, cls*4, each also with +patches",
  )
  max_images: int = option(
    25_000, "images that are scored, at equal distances in the split"
  )

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    if self.max_images < 2:
      yield f"{where}.max_images: got {self.max_images}, expected 2 or more."

  def kind_errors(
    self, where: str, sources: Splits, head: Head
  ) -> Iterator[str]:
    """Yields no error: images may have classes, numbers or nothing."""
    return iter(())

  def model_errors(self, where: str, model) -> Iterator[str]:
    """Yields an error if the model lacks the tokens of the layer."""
    if error := tokens_error(self.layer, model):
      yield f"{where}.layer: {error}"

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields an error for an unknown layer, or for a single image."""
    import jax

    try:
      if not TOKENS.fullmatch(self.layer):
        jax.eval_shape(lambda out: layer_of(out, self.layer), out)
    except ValueError as e:
      yield f"{where}.layer: {e}"
    if (num := sources["split"].num_examples) < 2:
      yield f"{where}.split: got {num} image, expected 2 or more."

  def num_images(self, sources: Splits) -> tuple[int, ...]:
    """See `EvaluatorConfig`."""
    return (min(self.max_images, sources["split"].num_examples),)

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return RankMe(context)


class RankMe(Evaluator):
  """Scores features by their singular values and nearest neighbours.

  With fake data only the first two batches are read.
  """

  def __init__(self, context: Context):
    super().__init__(context)
    self._source = self.few_if_fake(context.sources["split"])
    num = self._source.num_examples
    self._num = min(self.config.max_images, num)
    self.note += f", {self._num:,} of {num:,} images"
    self._features = features_fn(context, (self.config.layer,))

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"features": self._features}

  def gather(self, params: Params) -> tuple[np.ndarray, float]:
    """Returns the features [n, d], and the mean distance `nearest`.

    Each process searches the neighbours on one device.
    """
    num = self._source.num_examples
    # Folders are sorted by class, so that the first images may be of one.
    chosen = np.arange(self._num) * num // self._num
    x = extract(
      self.context,
      self._source,
      self._features,
      params,
      chosen if self._num < num else None,
      needs_labels=False,
    )["x"]
    return x, nearest(x)

  def score(self, gathered: tuple[np.ndarray, float]) -> dict[str, float]:
    """Returns `<name>/rankme`, `nearest` and `count`.

    `rankme` is from 1 to the width of the features. `nearest` is the mean
    cosine distance (1 - similarity, 0 to 2) of 2,048 images to their nearest
    other image among all: 0 if all features have one direction. `count` is the
    number of images.
    """
    x, distance = gathered
    scores = {"rankme": rankme(x), "nearest": distance, "count": len(x)}
    return {f"{self.config.name}/{k}": float(v) for k, v in scores.items()}

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """See `Evaluator`."""
    return search_program(self._num, min(QUERIES, self._num), 2, width)


def rankme(x: np.ndarray) -> float:
  """Returns the effective rank of features, float [n, d].

  Example:
    >>> one = np.outer(np.arange(1, 4), [3.0, 4.0])
    >>> round(rankme(np.eye(8)), 3), round(rankme(one), 3)
    (8.0, 1.0)
  """
  x = np.asarray(x, np.float64)
  # Squares lose digits below 1e-8 of the largest value, less than EPSILON; they
  # take 1 s for 25,000 x 768, where LAPACK takes 8 s for a third of the rows.
  squares = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
  values = np.sqrt(np.maximum(np.linalg.eigvalsh(squares), 0))
  total = values.sum()
  p = (values / total if total else values) + EPSILON
  return float(np.exp(-(p * np.log(p)).sum()))


def nearest(x: np.ndarray, most: int = QUERIES) -> float:
  """Returns the mean cosine distance to the nearest other feature.

  Args:
    x: Features, float [n, d].
    most: Features whose neighbour is searched, at equal distances in x; the
      mean is over them. All n can be the neighbour.
  """
  num = min(most, len(x))
  queries = x[np.arange(num) * len(x) // num]
  # The most similar one is the feature itself, or one that is equal to it.
  similarity, _ = neighbours(x, np.zeros(len(x), np.int32), queries, 2)
  return float(np.mean(1 - similarity[:, 1], dtype=np.float64))
