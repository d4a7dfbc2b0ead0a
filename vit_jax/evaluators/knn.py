"""Accuracy of k nearest neighbours of frozen features.

The neighbours of a test image are the k training images with the largest cosine
similarity. The predicted class has the largest sum of exp(similarity / 0.07)
over the neighbours of this class.

Source: arXiv:1805.01978, section 3.4, with k and temperature of DINO
(arXiv:2104.14294; facebookresearch/dino, eval_knn.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vit_jax.class_names import Head
from vit_jax.evaluators.evaluator import (
  Answers,
  Context,
  Evaluator,
  Outputs,
  Params,
  Splits,
)
from vit_jax.evaluators.features import Features, FeaturesConfig
from vit_jax.options import option

TEMPERATURE = 0.07
QUERIES = 512  # test images compared at a time
CHUNK = 32_768  # training images on the device at a time
TINY = 1e-12  # smallest norm that a feature is divided by


@dataclasses.dataclass(frozen=True)
class KnnConfig(FeaturesConfig):
  """Weighted vote of the nearest neighbours of frozen features."""

  name: str = "knn"
  kind: str = "knn"
  ks: tuple[int, ...] = option(
    (20, 10, 100, 200),
    "numbers of neighbours, at most the number of images in train_split; all"
    " are scored. <name>/<k>nn is the accuracy",
  )

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    if not self.ks or min(self.ks) < 1:
      yield f"{where}.ks: got {self.ks}, expected numbers above 0, such as 20."

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields also an error if there are fewer images than neighbours."""
    yield from super().check(where, sources, head, out)
    train, most = sources["train_split"], max(self.ks, default=0)
    if most > train.num_examples:
      yield (
        f"{where}.ks: got {most} neighbours, expected at most the"
        f" {train.num_examples:,} images of {train.name!r} [{train.split}]."
      )

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Knn(context, least=max(self.ks))


class Knn(Features):
  """Scores features by the classes of their nearest neighbours."""

  def gather(self, params: Params) -> dict[str, float]:
    """Returns the scores; each process finds the neighbours on one device."""
    train, test = self.splits(params)
    # The rows lack images that have no label or could not be decoded.
    most = min(max(self.config.ks), len(train["x"]))
    similarity, label = neighbours(train["x"], train["label"], test["x"], most)
    scores = {}
    for k in self.config.ks:
      nearest = similarity[:, :k], label[:, :k]
      prediction = vote(*nearest, self.num_classes)
      is_right = prediction == test["label"]
      scores[f"{self.config.name}/{k}nn"] = float(np.mean(is_right))
      if k == self.config.ks[0]:
        self.answers = Answers(
          f"the vote of the {k} nearest",
          "share of the votes",
          test["index"],
          test["label"],
          prediction,
          share_of(*nearest, prediction),
          share_of(*nearest, test["label"]),
        )
    return scores

  def score(self, gathered: dict[str, float]) -> dict[str, float]:
    """Returns the accuracy `<name>/<k>nn` for each k of the config.

    If there are fewer than k usable images, all of them vote.
    """
    return gathered

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """See `Evaluator`."""
    num_train, num_test = (
      source.num_examples for source in (self._train, self._test)
    )
    return search_program(num_train, num_test, max(self.config.ks), width)


def search_program(
  num_train: int, num_queries: int, k: int, width: int
) -> dict[str, tuple[Callable, tuple]]:
  """Returns the program of `neighbours`; see `single_device_programs`."""
  import jax

  chunk = min(CHUNK, num_train)
  block = min(QUERIES, num_queries)
  num_blocks = -(-num_queries // block)
  array = jax.ShapeDtypeStruct
  arguments = (
    (
      array((num_blocks, block, k), np.float32),
      array((num_blocks, block, k), np.int32),
    ),
    array((num_blocks, block, width), np.float32),
    array((chunk, width), np.float32),
    array((chunk,), np.int32),
    array((), np.int32),
  )
  return {"nearer": (nearer(k, chunk), arguments)}


def neighbours(
  train: np.ndarray,
  labels: np.ndarray,
  queries: np.ndarray,
  k: int,
  chunk: int = CHUNK,
  block: int = QUERIES,
) -> tuple[np.ndarray, np.ndarray]:
  """Finds the exact k nearest features by cosine similarity, on one device.

  Training features pass through the device in chunks, so that their number is
  not limited by its memory. Among equal similarities the first row is nearer.

  Args:
    train: Training features, float [n, d]; n is at least k.
    labels: Classes of the training features, int [n].
    queries: Features whose neighbours are searched, float [m, d].
    k: Number of neighbours.
    chunk: Number of training features on the device at a time.
    block: Number of queries compared with a chunk at a time, which takes
      chunk * block float32 numbers.

  Returns:
    Similarities, float32 [m, k], in falling order; classes, int32 [m, k].
  """
  import jax

  chunk, block = min(chunk, len(train)), min(block, len(queries))
  update, num_blocks = nearer(k, chunk), -(-len(queries) // block)
  with jax.default_device(jax.local_devices()[0]):
    x = _filled(_unit(queries), num_blocks * block)
    x = jax.device_put(x.reshape(num_blocks, block, -1))
    best = jax.device_put(
      (
        np.full((num_blocks, block, k), -np.inf, np.float32),
        np.zeros((num_blocks, block, k), np.int32),
      )
    )
    for start in range(0, len(train), chunk):
      keys = _unit(train[start : start + chunk])
      classes = labels[start : start + chunk].astype(np.int32)
      count = np.int32(len(keys))
      best = update(
        best, x, _filled(keys, chunk), _filled(classes, chunk), count
      )
      jax.block_until_ready(best)  # at most one chunk is on the device
  return tuple(
    np.asarray(v).reshape(-1, k)[: len(queries)] for v in jax.device_get(best)
  )


@functools.cache
def nearer(k: int, chunk: int) -> Callable:
  """Returns a jitted function (best, queries, keys, labels, count) -> best.

  The function merges the best neighbours so far with another chunk's. `best`
  has similarities float32 [blocks, block, k] and classes int32 [blocks, block,
  k]; queries are float32 [blocks, block, d], keys float32 [chunk, d], labels
  int32 [chunk].

  Args:
    k: Number of neighbours.
    chunk: Rows of `keys`, of which the first `count` are images.
  """
  import jax
  import jax.numpy as jnp

  @functools.partial(jax.jit, donate_argnums=0)
  def nearer(best, queries, keys, labels, count):
    def update_block(args):
      (values, classes), x = args
      similarity = jnp.matmul(x, keys.T, precision="highest")
      similarity = jnp.where(jnp.arange(chunk) < count, similarity, -jnp.inf)
      largest, at = jax.lax.top_k(similarity, min(k, chunk))
      values = jnp.concatenate([values, largest], 1)
      classes = jnp.concatenate([classes, labels[at]], 1)
      values, at = jax.lax.top_k(values, k)
      return values, jnp.take_along_axis(classes, at, 1)

    return jax.lax.map(update_block, (best, queries))

  return nearer


def vote(
  similarity: np.ndarray,
  labels: np.ndarray,
  num_classes: int,
  temperature: float = TEMPERATURE,
) -> np.ndarray:
  """Returns the class with the largest sum of exp(similarity / temperature).

  Args:
    similarity: Similarities of the neighbours, [m, k].
    labels: Classes of the neighbours, int [m, k].
    num_classes: Number of classes.
    temperature: Above 0; a smaller one gives near neighbours more weight.

  Returns:
    Predicted class of each query, int [m]; of equal sums, the lowest class.

  Example:
    >>> near, classes = np.array([[0.9, 0.8, 0.8]]), np.array([[2, 1, 1]])
    >>> [int(vote(near, classes, 3, t)[0]) for t in (1.0, 0.07)]
    [1, 2]
  """
  weights = _weights(similarity, temperature)
  winners = np.empty(len(labels), np.int64)
  for i in range(0, len(labels), QUERIES):
    rows = slice(i, i + QUERIES)
    sums = np.zeros((len(labels[rows]), num_classes))
    at = np.arange(len(sums))[:, None]
    np.add.at(sums, (at, labels[rows]), weights[rows])
    winners[rows] = sums.argmax(axis=1)
  return winners


def share_of(
  similarity: np.ndarray,
  labels: np.ndarray,
  classes: np.ndarray,
) -> np.ndarray:
  """Returns the share of the votes that each query gives to a class, float [m].

  Args:
    similarity: Similarities of the neighbours, [m, k].
    labels: Classes of the neighbours, int [m, k].
    classes: One class per query, int [m].

  Example:
    >>> near, labels = np.full((1, 4), 0.5), np.array([[2, 1, 1, 1]])
    >>> float(share_of(near, labels, np.array([1]))[0])
    0.75
  """
  weights = _weights(similarity, TEMPERATURE)
  counts = np.where(labels == classes[:, None], weights, 0).sum(axis=1)
  return counts / weights.sum(axis=1)


def _weights(similarity: np.ndarray, temperature: float) -> np.ndarray:
  """Returns weights of the neighbours, float64 [m, k]; the nearest has 1."""
  similarity = similarity.astype(np.float64)
  nearest = similarity.max(axis=1, keepdims=True)  # no exponential overflows
  return np.exp((similarity - nearest) / temperature)


def _unit(x: np.ndarray) -> np.ndarray:
  """Returns the rows divided by their norms, in float32."""
  x = x.astype(np.float32)
  return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), TINY)


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
  """Returns the rows, followed by zeros, `count` in all."""
  missing: Sequence = [(0, count - len(rows)), *[(0, 0)] * (rows.ndim - 1)]
  return np.pad(rows, missing)
