"""Losses against closed forms."""

import doctest
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.utils import class_weight

from vit_jax import losses

LOGITS = jnp.array([[0.5, -1.0, 2.0], [3.0, 3.0, -4.0]])
TARGETS = jnp.array([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])


def test_examples():
  assert doctest.testmod(losses).failed == 0


def test_softmax_is_the_written_out_sum():
  x, t = np.asarray(LOGITS, np.float64), np.asarray(TARGETS, np.float64)
  p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  want = -(t * np.log(p)).sum(-1)
  # A few operations in float32, each good to 6e-8.
  np.testing.assert_allclose(
    losses.softmax_xent(LOGITS, TARGETS), want, rtol=1e-6
  )


def test_sigmoid_is_the_written_out_sum_over_classes():
  x, t = np.asarray(LOGITS, np.float64), np.asarray(TARGETS, np.float64)
  p = 1 / (1 + np.exp(-x))
  want = -(t * np.log(p) + (1 - t) * np.log(1 - p)).sum(-1)
  np.testing.assert_allclose(
    losses.sigmoid_xent(LOGITS, TARGETS), want, rtol=1e-6
  )


def test_binary_is_the_mean_over_classes():
  want = np.asarray(losses.sigmoid_xent(LOGITS, TARGETS)) / 3
  # One division, rounded to float32.
  np.testing.assert_allclose(losses.binary_xent(LOGITS, TARGETS), want, 2e-7)


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_gradient_is_probability_minus_target(name):
  loss, squash = losses.LOSSES[name], losses.PROBABILITIES[name]
  got = jax.grad(lambda x: loss(x, TARGETS).sum())(LOGITS)
  want = (squash(LOGITS) - TARGETS) / (3 if name == "bce" else 1)
  np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_large_logits_stay_finite(name):
  logits = jnp.array([[1e4, -1e4, 0.0]])
  got = losses.LOSSES[name](logits, jnp.array([[0.0, 1.0, 0.0]]))
  assert np.isfinite(got).all()
  # softmax: log 1 - (-1e4 - 1e4); sigmoid: 1e4 + 1e4 + log 2.
  want = 2e4 / 3 if name == "bce" else 2e4
  np.testing.assert_allclose(got, [want], rtol=1e-4)


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_bfloat16_logits_give_a_float32_loss(name):
  logits = LOGITS.astype(jnp.bfloat16)
  got = losses.LOSSES[name](logits, TARGETS)
  assert got.dtype == jnp.float32
  # These logits are exact in bfloat16, so nothing else may be lost.
  np.testing.assert_array_equal(got, losses.LOSSES[name](LOGITS, TARGETS))


@pytest.mark.parametrize("labels", [[0, 0, 0, 2], [1] * 7 + [0, 2, 2]])
def test_balanced_weights_are_scikit_learns(labels):
  got = losses.balanced_weights(np.bincount(labels).tolist(), 4)
  want = np.zeros(4)
  classes = np.unique(labels)
  want[classes] = class_weight.compute_class_weight(
    "balanced", classes=classes, y=labels
  )
  np.testing.assert_allclose(got, want, rtol=6e-8)  # rounded to float32
  assert got[labels].mean() == pytest.approx(1, rel=1e-6)


def test_untrained_head_of_21843_classes_with_bias_minus_ten():
  classes = 21843
  logits = jnp.full((1, classes), -10.0)
  want = 10 + classes * math.log1p(math.exp(-10))
  got = losses.sigmoid_xent(logits, jax.nn.one_hot(jnp.array([7]), classes))
  np.testing.assert_allclose(got, [want], rtol=1e-5)


def test_smoothing_keeps_the_sum_of_a_distribution():
  got = losses.smooth(TARGETS, 0.1)
  np.testing.assert_allclose(got.sum(-1), [1.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose(got, 0.9 * TARGETS + 0.1 / 3, rtol=1e-6)
  np.testing.assert_array_equal(losses.smooth(TARGETS, 0.0), TARGETS)


def test_smoothing_refuses_what_is_no_share():
  with pytest.raises(ValueError, match=r"label_smoothing: got 1.5"):
    losses.smooth(TARGETS, 1.5)


def test_targets():
  rows = losses.targets_of(jnp.array([1, -1], jnp.int32), 3)
  assert rows.dtype == jnp.float32
  np.testing.assert_array_equal(rows, [[0, 1, 0], [0, 0, 0]])
  np.testing.assert_array_equal(losses.targets_of(TARGETS, 3), TARGETS)
  with pytest.raises(ValueError, match="rows of 3 classes, expected 5"):
    losses.targets_of(TARGETS, 5)
