"""Counting: ties, several labels, padding; average precision, calibration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from clu.metrics import Average

from vit_jax import metrics


@pytest.mark.parametrize("k", [1, 5, 9])
def test_top_k_is_the_rank_in_a_stable_sort(k):
  rng = np.random.default_rng(0)
  logits = rng.integers(0, 4, (64, 7)).astype(np.float32)  # Ties abound.
  labels = rng.integers(0, 7, 64)
  order = np.argsort(-logits, axis=-1, kind="stable")
  want = [y in row[:k] for y, row in zip(labels, order, strict=True)]
  top = jax.jit(metrics.top_k_correct, static_argnums=2)
  got = top(jnp.asarray(logits), jnp.asarray(labels), k)
  np.testing.assert_array_equal(got, want)


def test_several_labels_nan_and_padding():
  """One of several labels is enough; NaN and -1 are never right."""
  logits = jnp.array([[0.0, 3.0, 2.0, 1.0]] * 3)
  labels = jnp.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
  for k, expected in ((1, [True, False, False]), (2, [True, True, False])):
    assert metrics.top_k_correct(logits, labels, k).tolist() == expected
  logits = jnp.array([[jnp.nan] * 3, [1.0, jnp.nan, 0.0], [1.0, 0.0, 0.0]])
  got = metrics.top_k_correct(logits, jnp.array([0, 0, -1]), 3)
  assert not got.any()


def test_batches_add_up_exactly():
  # Unequal batches: the mean of their means would be 0.75.
  assert metrics.merged([Average(1.0, 2), Average(1.0, 1)]).compute() == 2 / 3
  # float32 would lose every 1.
  large = Average(np.float32(2**24), np.int32(2**24))
  ones = [Average(np.float32(1), np.int32(1))] * 3
  assert metrics.merged([large, *ones]).total == 2**24 + 3


def test_average_precision():
  """The mean over the positives of the precision at their ranks."""
  positive = np.array([1, 0, 1, 0, 0, 1], bool)
  scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
  of = metrics.average_precision
  want = (1 / 1 + 2 / 3 + 3 / 6) / 3
  assert of(scores, positive) == pytest.approx(want, rel=1e-15)
  # All scores equal: one threshold, at the share of positives.
  for order in (positive, positive[::-1]):
    assert of(np.zeros(6), order) == 0.5
  assert np.isnan(of(scores, np.zeros(6, bool)))
  assert of(np.where(positive, np.nan, scores), positive) == 0.5
  # scikit-learn's, with equal scores and without.
  rng = np.random.default_rng(0)
  for num, values in ((2, 3), (300, 3), (300, 10**6)):
    scores = rng.integers(0, values, num) / 7
    positive = rng.random(num) < 0.3
    positive[0] = True
    want = sklearn.metrics.average_precision_score(positive, scores)
    # Both add at most 300 terms in float64.
    assert of(scores, positive) == pytest.approx(want, rel=1e-13)


def test_calibration():
  """One bin each: 0.5 right of 4 at 0.6, all of 2 at 0.9, none of 2 at 1."""
  confidence = np.array([0.6] * 4 + [0.9] * 2 + [1.0] * 2)
  right = np.array([1, 0, 1, 0, 1, 1, 0, 0], bool)
  want = (4 * 0.1 + 2 * 0.1 + 2 * 1.0) / 8
  error = metrics.calibration_error
  assert error(confidence, right) == pytest.approx(want, rel=1e-12)
  # In one bin signs may cancel.
  want = abs(confidence.mean() - 0.5)
  assert error(confidence, right, num_bins=1) == pytest.approx(want, rel=1e-12)
  # A bound belongs to the bin below.
  confidence = np.array([0.0, 0.2, 0.2001, 0.4, 1.0])
  bins = metrics.reliability(confidence, np.ones(5, bool), 5)
  assert bins["count"].tolist() == [2, 2, 0, 0, 1]
  assert np.isnan(bins["right"][2]) and bins["right"][0] == 1.0
  assert bins["confidence"][1] == pytest.approx(0.30005, rel=1e-12)
