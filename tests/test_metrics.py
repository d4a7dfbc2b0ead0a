"""Counting: ties, several labels, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def test_one_of_several_labels_is_enough():
  logits = jnp.array([[0.0, 3.0, 2.0, 1.0]] * 3)
  labels = jnp.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
  for k, expected in ((1, [True, False, False]), (2, [True, True, False])):
    assert metrics.top_k_correct(logits, labels, k).tolist() == expected


def test_nan_and_padding_are_never_right():
  logits = jnp.array([[jnp.nan] * 3, [1.0, jnp.nan, 0.0], [1.0, 0.0, 0.0]])
  got = metrics.top_k_correct(logits, jnp.array([0, 0, -1]), 3)
  assert got.tolist() == [False, False, False]


def test_batches_add_up_exactly():
  # Unequal batches: the mean of their means would be 0.75.
  assert metrics.merged([Average(1.0, 2), Average(1.0, 1)]).compute() == 2 / 3
  # float32 would lose every 1.
  large = Average(np.float32(2**24), np.int32(2**24))
  ones = [Average(np.float32(1), np.int32(1))] * 3
  assert metrics.merged([large, *ones]).total == 2**24 + 3
