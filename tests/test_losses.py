"""Losses against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.utils import class_weight

from vit_jax import losses

LOGITS = jnp.array([[0.5, -1.0, 2.0], [3.0, 3.0, -4.0]])
TARGETS = jnp.array([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_value_and_gradient_are_those_written_out(name):
  """A sum over classes, a mean for "bce"; probability minus target."""
  x, t = np.asarray(LOGITS, np.float64), np.asarray(TARGETS, np.float64)
  share = 1 / 3 if name == "bce" else 1
  if name == "softmax":
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    want = -(t * np.log(p)).sum(-1)
  else:
    p = 1 / (1 + np.exp(-x))
    want = -share * (t * np.log(p) + (1 - t) * np.log(1 - p)).sum(-1)
  loss = losses.LOSSES[name]
  # A few operations in float32, each good to 6e-8.
  np.testing.assert_allclose(loss(LOGITS, TARGETS), want, rtol=1e-6)
  got = jax.grad(lambda x: loss(x, TARGETS).sum())(LOGITS)
  np.testing.assert_allclose(got, share * (p - t), atol=1e-6)
  got = losses.PROBABILITIES[name](LOGITS)
  np.testing.assert_allclose(got, p, rtol=1e-5)
  # These logits are exact in bfloat16, so nothing may be lost.
  half = loss(LOGITS.astype(jnp.bfloat16), TARGETS)
  assert half.dtype == jnp.float32
  np.testing.assert_array_equal(half, loss(LOGITS, TARGETS))
  # softmax: log 1 - (-1e4 - 1e4); sigmoid: 1e4 + 1e4 + log 2.
  large = loss(jnp.array([[1e4, -1e4, 0.0]]), jnp.array([[0.0, 1.0, 0.0]]))
  np.testing.assert_allclose(large, [share * 2e4], rtol=1e-4)


@pytest.mark.parametrize("labels", [[0, 0, 0, 2], [1] * 7 + [0, 2, 2]])
def test_balanced_weights_are_scikit_learns(labels):
  got = losses.balanced_weights(np.bincount(labels).tolist(), 4)
  want = np.zeros(4)
  classes = np.unique(labels)
  want[classes] = class_weight.compute_class_weight(
    "balanced", classes=classes, y=labels
  )
  np.testing.assert_allclose(got, want, rtol=6e-8)  # rounded to float32


def test_targets():
  """Smoothing keeps the sum of a distribution; -1 is of no class."""
  got = losses.smooth(TARGETS, 0.1)
  np.testing.assert_allclose(got, 0.9 * TARGETS + 0.1 / 3, rtol=1e-6)
  np.testing.assert_array_equal(losses.smooth(TARGETS, 0.0), TARGETS)
  rows = losses.targets_of(jnp.array([1, -1], jnp.int32), 3)
  assert rows.dtype == jnp.float32
  np.testing.assert_array_equal(rows, [[0, 1, 0], [0, 0, 0]])
  np.testing.assert_array_equal(losses.targets_of(TARGETS, 3), TARGETS)
  with pytest.raises(ValueError, match="rows of 3 classes, expected 5"):
    losses.targets_of(TARGETS, 5)
