"""Nearest neighbours: in any blocks what brute force finds."""

import in_memory
import numpy as np
import pytest

from vit_jax.evaluators import knn
from vit_jax.evaluators.knn import KnnConfig


def clusters(num, seed=0):
  """Features of 5 classes, whose lengths play no part, and the labels."""
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, 5, num).astype(np.int32)
  centres = np.random.default_rng(9).normal(size=(5, 12))
  x = centres[labels] + rng.normal(size=(num, 12))
  return (x * rng.uniform(0.1, 30, (num, 1))).astype(np.float32), labels


def brute(train, labels, queries):
  """Similarities and classes of all training images, the nearest first."""
  unit = lambda x: x / np.linalg.norm(x.astype(np.float64), axis=1)[:, None]
  similarity = unit(queries) @ unit(train).T
  order = np.argsort(-similarity, axis=1, kind="stable")
  return np.take_along_axis(similarity, order, 1), labels[order]


@pytest.mark.parametrize("chunk, block", [(64, 7), (5, 16), (200, 50)])
def test_neighbours_are_those_of_brute_force(chunk, block):
  """Chunks smaller than k, a last one that is not full, and one that is."""
  (train, labels), (queries, _) = clusters(200), clusters(50, seed=1)
  got = knn.neighbours(train, labels, queries, 11, chunk, block)
  similarity, classes = brute(train, labels, queries)
  # float32 products of unit vectors.
  np.testing.assert_allclose(got[0], similarity[:, :11], atol=1e-6)
  np.testing.assert_array_equal(got[1], classes[:, :11])
  everyone = knn.neighbours(train, labels, queries, 200, chunk, block)
  np.testing.assert_allclose(everyone[0], similarity, atol=1e-6)


def test_equally_near_ones_come_in_their_order():
  train = np.tile(np.eye(3, dtype=np.float32), (4, 1))
  labels = np.arange(12, dtype=np.int32)
  for chunk in (12, 5, 1):
    _, classes = knn.neighbours(train, labels, np.eye(3)[1:2], 4, chunk)
    assert classes.tolist() == [[1, 4, 7, 10]]


def test_the_vote_by_hand():
  # Two of class 0, exp(10) + exp(9) = 30,130, against one of class 1:
  # exp(10.3) = 29,733 is less, exp(10.5) = 36,316 is more.
  for nearest, winner in ((1.03, 0), (1.05, 1)):
    near = np.array([[nearest, 1.0, 0.9]])
    assert knn.vote(near, np.array([[1, 0, 0]]), 2, 0.1).tolist() == [winner]
  # Where the temperature is large the majority decides; among equals the first.
  majority = np.array([[2, 1, 1], [2, 1, 0]])
  near = np.array([[0.9, 0.1, 0.0], [0.5, 0.5, 0.5]])
  assert knn.vote(near, majority, 3, 1e6).tolist() == [1, 0]
  # No overflow where it is small.
  assert knn.vote(near, majority, 3, 1e-4)[0] == 2


def test_accuracies_of_a_data_set():
  """Images without a label, and padding, neither vote nor count."""
  x, labels = clusters(120)
  hidden = np.where(np.arange(120) % 10, labels, -1)
  train = np.where(np.arange(120) < 30, -1, hidden)
  options = KnnConfig(name="k", ks=(3, 1, 7))
  scores = in_memory.probe(options, train, hidden[:30], 5).run({"features": x})
  voting, scored = train >= 0, hidden[:30] >= 0
  similarity, classes = brute(x[voting], labels[voting], x[:30][scored])
  want = {}
  for k in (3, 1, 7):
    sums = np.zeros((27, 5))
    weights = np.exp(similarity[:, :k] / 0.07)
    np.add.at(sums, (np.arange(27)[:, None], classes[:, :k]), weights)
    want[f"k/{k}nn"] = np.mean(sums.argmax(1) == labels[:30][scored])
  assert scores == want and len({*scores.values()}) > 1
