"""Few-shot classification by ridge regression, in closed form, on the host.

Each feature is whitened with the mean and the standard deviation of the shots.
A constant feature is added for the bias. The targets are +1 for the class and
-1 for all others:

  x = (feature - mean) / (std + 1e-5), followed by 100
  W = argmin |X W - Y|^2 + l2 |W|^2,  prediction = argmax_k (x W)_k

The constant is 100 and not 1, so that the penalty hardly affects the bias. All
computations are in float64, because the smaller Gram matrix is near singular
for small penalties. On one core, fitting 10 shots of 1,000 classes at width 768
takes half a second, and scoring 50,000 images takes two seconds per penalty.

Source: arXiv:2010.11929, section 4.1; big_vision `evaluators/fewshot_lsr.py`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64, Integer, Num

BIAS = 100.0
STD_FLOOR = 1e-5
ROWS = 4096  # Examples scored at a time; this bounds the memory.


@dataclasses.dataclass(frozen=True)
class Ridge:
  """A fitted classifier: whitening and weights; the last row is the bias's."""

  mean: Float64[np.ndarray, " d"]
  std: Float64[np.ndarray, " d"]
  weights: Float64[np.ndarray, "d+1 classes"]


def sample_shots(
  labels: Integer[np.ndarray, " n"],
  shots: int,
  seed: int,
  num_classes: int,
) -> Int64[np.ndarray, " chosen"]:
  """Draws the same number of examples of every class.

  One generator, `numpy.random.default_rng(seed)`, permutes the indices of class
  0, then all of class 1, and so on. The first `shots` of each are taken, so
  the 5 shots of a seed are among its 10 shots. As in big_vision, a class with
  fewer examples gives all that it has.

  Args:
    labels: Class of each example; negative ones are never drawn.
    shots: Examples per class, 1 or more.
    seed: Seed of the draw; evaluations average over several.
    num_classes: Number of classes.

  Returns:
    Indices into `labels`, class after class.

  Raises:
    ValueError: More than half of the classes have fewer than `shots` examples,
      or a class has none.

  Source: big_vision `evaluators/fewshot_lsr.py`.

  Example:
    >>> indices = sample_shots(np.array([0, 1, 0, 1, 1]), 2, 0, num_classes=2)
    >>> sorted(indices[:2].tolist()), len(indices)
    ([0, 2], 4)
  """
  if shots < 1:
    raise ValueError(f"shots: got {shots}, expected 1 or more.")
  rng = np.random.default_rng(seed)
  has_label = labels >= 0
  counts = np.bincount(labels[has_label], minlength=num_classes)
  in_order = np.argsort(labels, kind="stable")[np.sum(~has_label) :]
  by_class = np.split(in_order, np.cumsum(counts))
  chosen = [rng.permutation(i)[:shots] for i in by_class[:num_classes]]
  few = np.flatnonzero(counts[:num_classes] < shots)
  if 2 * len(few) > num_classes or not counts[few].all():
    short = [f"class {k} has {counts[k]}" for k in few]
    more = f" and {len(short) - 5} more classes" if len(short) > 5 else ""
    raise ValueError(
      f"shots: got {shots} per class, but {', '.join(short[:5])}{more}. Take"
      " fewer shots, or a larger train_split to draw them from."
    )
  return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


def fewest_examples(shots: int, num_classes: int) -> int:
  """Returns the fewest examples that `sample_shots` needs.

  Half of the classes must have all shots, each of the others one.

  Example:
    >>> fewest_examples(shots=25, num_classes=1000)
    13000
  """
  num_full = -(-num_classes // 2)
  return num_full * shots + num_classes - num_full


def fit(
  features: Num[np.ndarray, "n d"],
  labels: Integer[np.ndarray, " n"],
  num_classes: int,
  l2s: Sequence[float],
  class_weights: Float64[np.ndarray, " classes"] | None = None,
) -> list[Ridge]:
  """Fits several penalties from one eigendecomposition.

  With n shots of d features (the constant included), the smaller Gram matrix is
  decomposed once. Then a penalty costs two matrix products:

    n >= d:  X'X = V S V',  W = V (S + l2)^-1 V' X'Y
    n < d:   XX' = U S U',  W = X' U (S + l2)^-1 U' Y

  Args:
    features: Features of the shots.
    labels: Their classes, 0 to num_classes - 1.
    num_classes: Columns of the targets. A class without shots has only targets
      of -1.
    l2s: Penalties, more than 0; not divided by the number of shots.
    class_weights: Factor of the squared errors of each class's shots; None for
      1.

  Returns:
    One classifier per penalty, in their order.

  Raises:
    ValueError: A penalty is not positive, a label is out of range, or a feature
      is not finite.

  Example:
    >>> x = np.array([[-2.0], [-1.0], [1.0], [2.0]])
    >>> y = np.array([0, 0, 1, 1])
    >>> weak, strong = fit(x, y, num_classes=2, l2s=[0.1, 10.0])
    >>> predict(weak, x).tolist()
    [0, 0, 1, 1]
  """
  if wrong := [l2 for l2 in l2s if not l2 > 0]:
    raise ValueError(f"l2: got {wrong[0]}, expected a number above 0.")
  if labels.size == 0 or labels.min() < 0 or labels.max() >= num_classes:
    raise ValueError(
      f"labels: got {_range(labels)}, expected classes from 0 to"
      f" {num_classes - 1}."
    )
  features = features.astype(np.float64)
  if not np.isfinite(features).all():
    rows = np.flatnonzero(~np.isfinite(features).all(axis=1))
    raise ValueError(
      f"features: {len(rows)} of {len(features)} rows have NaN or infinity,"
      f" the first is row {rows[0]}. The model that made them has diverged,"
      " or its dtype overflows."
    )
  mean = features.mean(axis=0)
  std = features.std(axis=0) + STD_FLOOR
  x = _whiten(features, mean, std)
  weighted = lambda rows: rows
  if class_weights is not None:
    roots = np.sqrt(class_weights[labels])[:, None]
    weighted = lambda rows: roots * rows
  x = weighted(x)
  num_examples, num_features = x.shape
  if num_examples >= num_features:
    s, v = np.linalg.eigh(x.T @ x)
    left, right = v, v.T @ _times_targets(weighted(x), labels, num_classes)
  else:
    s, u = np.linalg.eigh(x @ x.T)
    left, right = x.T @ u, _times_targets(weighted(u), labels, num_classes)
  # Rounding may leave an eigenvalue of 0 slightly below it.
  s = np.maximum(s, 0.0)[:, None]
  return [Ridge(mean, std, left @ (right / (s + l2))) for l2 in l2s]


def predict(
  ridge: Ridge, features: Num[np.ndarray, "n d"]
) -> Int64[np.ndarray, " n"]:
  """Returns the class with the largest score, the lowest of equal ones."""
  classes = np.empty(len(features), np.int64)
  for part, products in _products(ridge, features):
    classes[part] = products.argmax(axis=-1)
  return classes


def scores(
  ridge: Ridge,
  features: Num[np.ndarray, "n d"],
  labels: Integer[np.ndarray, " n"],
) -> tuple[
  Int64[np.ndarray, " n"], Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]
]:
  """Returns the class with the largest score, that score, and the label's.

  A score is x W. It has no bounds, although the targets are 1 and -1.
  """
  best = np.empty(len(features), np.int64)
  largest, of_label = np.empty(len(features)), np.empty(len(features))
  for part, values in _products(ridge, features):
    best[part], largest[part] = values.argmax(axis=-1), values.max(axis=-1)
    of_label[part] = values[np.arange(len(values)), labels[part]]
  return best, largest, of_label


def accuracy(
  ridge: Ridge,
  features: Num[np.ndarray, "n d"],
  labels: Integer[np.ndarray, " n"],
) -> float:
  """Returns the share of examples that are predicted right, 0 to 1."""
  return float(np.mean(predict(ridge, features) == labels))


def _products(ridge, features):
  """Yields slices of `ROWS` examples, and their scores [n, k]."""
  for i in range(0, len(features), ROWS):
    part = slice(i, i + ROWS)
    x = _whiten(features[part].astype(np.float64), ridge.mean, ridge.std)
    yield part, x @ ridge.weights


def _whiten(features, mean, std):
  bias = np.full((len(features), 1), BIAS)
  return np.concatenate([(features - mean) / std, bias], axis=1)


def _times_targets(rows, labels, num_classes):
  """Returns rows' Y without storing the targets Y (+1 and -1)."""
  sums = np.zeros((num_classes, rows.shape[1]))
  np.add.at(sums, labels, rows)
  return (2.0 * sums - rows.sum(axis=0)).T


def _range(labels) -> str:
  if not labels.size:
    return "no examples"
  return f"classes from {labels.min()} to {labels.max()}"
