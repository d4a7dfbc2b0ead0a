"""RankMe and nearest neighbours: closed forms, and which images count."""

import handmade
import numpy as np
import pytest
from evaluators import in_memory

from vit_jax.self_supervised import rankme
from vit_jax.self_supervised.rankme import RankMeConfig


def test_closed_forms():
  rng = np.random.default_rng(0)
  basis, _ = np.linalg.qr(rng.normal(size=(100, 12)))
  # All singular values are equal, whatever their size and the rotation.
  turn, _ = np.linalg.qr(rng.normal(size=(12, 12)))
  assert rankme.rankme(1e4 * basis @ turn) == pytest.approx(12, rel=1e-4)
  assert rankme.rankme(basis[:, :1] @ turn[:1]) == pytest.approx(1, abs=1e-3)
  # Two of them in the ratio 1 to 3.
  p = np.array([0.25, 0.75])
  two = basis[:, :2] @ (p[:, None] * turn[:2])
  expected = np.exp(-(p * np.log(p)).sum())
  assert rankme.rankme(two) == pytest.approx(expected, abs=1e-3)
  assert rankme.rankme(np.zeros((9, 12))) == pytest.approx(1, abs=1e-3)
  # The definition, of more columns than rows.
  x = rng.normal(1, 2, (7, 60)).astype(np.float32)
  values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
  p = values / values.sum() + 1e-7
  assert rankme.rankme(x) == pytest.approx(np.exp(-(p * np.log(p)).sum()))


def test_nearest_is_that_of_brute_force():
  x = np.random.default_rng(0).normal(0.5, 1, (50, 6)).astype(np.float32)
  x[7] = 3 * x[30]  # of the same direction
  unit = x / np.linalg.norm(x, axis=1, keepdims=True)
  similarity = unit @ unit.T
  np.fill_diagonal(similarity, -2)
  distance = 1 - similarity.max(1)
  assert rankme.nearest(x) == pytest.approx(distance.mean(), abs=1e-6)
  some = distance[np.arange(8) * 50 // 8]
  assert rankme.nearest(x, 8) == pytest.approx(some.mean(), abs=1e-6)


def _run(x, labels, **options):
  source = handmade.records(labels, 3)
  evaluator = in_memory.evaluator(RankMeConfig(name="r", **options), source)
  return evaluator.run({"features": x})


def test_images_without_labels_count():
  x = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32)
  assert _run(x, np.full(30, -1)) == {
    "r/rankme": pytest.approx(rankme.rankme(x)),
    "r/nearest": pytest.approx(rankme.nearest(x)),
    "r/count": 30.0,
  }
  # More than max_images: some of all parts of the split.
  scores = _run(x, np.arange(30) % 3, max_images=10)
  assert scores["r/count"] == 10
  assert scores["r/rankme"] == pytest.approx(rankme.rankme(x[::3]))


def test_errors():
  source, out = handmade.records([0, 1, 0]), dict(pre_logits=np.zeros((1, 2)))
  assert not in_memory.errors(RankMeConfig(), source, **out)
  wrong = RankMeConfig(max_images=1, layer="prelogits")
  first, second = in_memory.errors(wrong, source, **out)
  assert "max_images: got 1" in first and "layer: got 'prelogits'" in second
