"""Metrics of predictions: top-k accuracy, average precision, calibration.

Masked means are `clu.metrics.Average`, a sum and a count. Batches with
different numbers of real examples therefore add up without weights.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from clu.metrics import Average
from jaxtyping import Array, Bool, Float, Int, Num, Shaped


def top_k_correct(
  logits: Float[Array, "b classes"],
  labels: Int[Array, " b"] | Shaped[Array, "b classes"],
  k: int,
) -> Bool[Array, " b"]:
  """Returns whether a label is among the k largest logits.

  Among equal logits the lower class comes first. So the result does not depend
  on the order of the examples or on the device, and a head of zeros predicts
  only class 0. A row with NaN is always wrong.

  Args:
    logits: Any float type.
    labels: The class, where -1 is never right; or a row per example with a
      positive entry for each right class. A row without a right class is always
      wrong: an evaluation that skips such examples, like ImageNet ReaL's, masks
      them with `labels.max(-1) > 0`.
    k: 1 or more; with k at least the number of classes, every example with a
      label is right.

  Example:
    >>> logits = jnp.array([[0.1, 0.7, 0.2], [0.4, 0.4, 0.2]])
    >>> top_k_correct(logits, jnp.array([2, 1]), k=1).tolist()
    [False, False]
    >>> top_k_correct(logits, jnp.array([2, 1]), k=2).tolist()
    [True, True]
  """
  num_classes = logits.shape[-1]
  _, classes = jax.lax.top_k(logits, min(k, num_classes))  # b k
  if labels.ndim == 1:
    is_hit = classes == labels[:, None]
  else:
    is_hit = jnp.take_along_axis(labels, classes, axis=-1) > 0
  is_number = ~jnp.isnan(logits).any(axis=-1)
  return is_hit.any(axis=-1) & is_number


def merged(parts: Iterable[Average]) -> Average:
  """Returns the average over all batches, added up in float64 on the host.

  A float32 count would stop at 2**24.

  Args:
    parts: The average of each batch, at least one.

  Example:
    >>> whole = merged([Average(3.0, 4), Average(1.0, 1)])
    >>> float(whole.compute()), int(whole.count)
    (0.8, 5)
  """
  return functools.reduce(
    Average.merge, (jax.tree.map(np.float64, part) for part in parts)
  )


def average_precision(
  scores: Num[np.ndarray, " n"], is_positive: Bool[np.ndarray, " n"]
) -> float:
  """Returns the average precision of a ranking, from 0 to 1.

  AP = sum_i (R_i - R_(i-1)) P_i over the distinct scores in falling order,
  where P_i and R_i are precision and recall of all examples with at least the
  i-th score. Equal scores share one threshold, so the order of the examples
  does not matter.

  Returns:
    The AP; NaN without a positive example. NaN scores rank last.

  Source: scikit-learn's `average_precision_score`, also the rule of PASCAL VOC
    since 2010. (VOC 2007 used 11 points of an interpolated curve.)

  Example:
    >>> average_precision(np.array([3, 2, 1]), np.array([True, False, True]))
    0.8333333333333333
  """
  if not is_positive.any():
    return float("nan")
  scores = np.where(np.isnan(scores), -np.inf, scores.astype(np.float64))
  order = np.argsort(-scores, kind="stable")
  scores, hits = scores[order], np.cumsum(is_positive[order])
  last = np.append(scores[1:] != scores[:-1], True)  # of equal scores
  hits, ranks = hits[last], np.flatnonzero(last) + 1
  gained = np.diff(hits, prepend=0)
  return float(np.sum(gained * hits / ranks) / hits[-1])


def calibration_error(
  confidence: Num[np.ndarray, " n"],
  is_right: Bool[np.ndarray, " n"],
  num_bins: int = 15,
) -> float:
  """Returns the expected calibration error, from 0 to 1.

  ECE = sum_b n_b / n |accuracy in b - mean confidence in b| over bins of equal
  width; bin b has the confidences in (b / num_bins, (b + 1) / num_bins].

  Args:
    confidence: Probability of the predicted class.
    is_right: Whether the predicted class is the label.
    num_bins: Number of bins; 15 in the source.

  Source: arXiv:1706.04599, section 2, equation 3.

  Example:
    >>> right = np.array([True, True, True, False])
    >>> calibration_error(np.full(4, 0.75), right)
    0.0
    >>> calibration_error(np.full(4, 1.0), right)
    0.25
  """
  bins = reliability(confidence, is_right, num_bins)
  gaps = np.abs(bins["right"] - bins["confidence"])
  return float(np.nansum(bins["count"] * gaps) / max(1, len(confidence)))


def reliability(
  confidence: Num[np.ndarray, " n"],
  is_right: Bool[np.ndarray, " n"],
  num_bins: int = 15,
) -> dict[str, np.ndarray]:
  """Returns count, mean confidence and accuracy of each bin, [num_bins].

  Mean confidence and accuracy are NaN for an empty bin. See
  `calibration_error`.
  """
  confidence = confidence.astype(np.float64)
  at = np.ceil(confidence * num_bins).astype(int) - 1
  at = np.clip(at, 0, num_bins - 1)  # 0 is in the first bin
  count = np.bincount(at, minlength=num_bins)
  sums = {"confidence": confidence, "right": is_right.astype(np.float64)}
  with np.errstate(invalid="ignore"):
    return {"count": count} | {
      k: np.bincount(at, v, num_bins) / count for k, v in sums.items()
    }
