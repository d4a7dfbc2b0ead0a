"""Few-shot regression: stored results, normal equations, drawing of shots."""

import pathlib

import numpy as np
import pytest

from vit_jax import ridge

DATA = pathlib.Path(__file__).parent / "data" / "fewshot_lsr.npz"


def _case(num_examples, num_features):
  rng = np.random.default_rng(0)
  x = 5 + rng.normal(size=(num_examples, num_features)) * rng.uniform(
    0.1, 9, num_features
  )
  return x.astype(np.float32), rng.integers(0, 3, num_examples)


def test_accuracies_of_big_vision():
  """`fewshot_lsr.npz`: results of big_vision's evaluator on random features.

  It solves in float32, this module in float64: one test example may flip.
  """
  with np.load(DATA) as data:
    x, y = data["features_train"], data["labels_train"]
    x_test, y_test = data["features_test"], data["labels_test"]
    wanted = {k: float(data[k]) for k in data.files if k.startswith("acc_")}
  assert len(wanted) == 24
  for name, want in wanted.items():
    _, seed, shots, _, l2 = name.split("_")
    seed, shots = int(seed[len("seed") :]), int(shots[len("shots") :])
    chosen = ridge.sample_shots(y, shots, seed, num_classes=12)
    (model,) = ridge.fit(x[chosen], y[chosen], 12, [float(l2)])
    got = ridge.accuracy(model, x_test, y_test)
    assert abs(got - want) < 1.5 / len(y_test), name


@pytest.mark.parametrize("of_class", [None, np.array([0.5, 1.0, 3.0])])
@pytest.mark.parametrize("sizes", [(8, 7), (5, 30), (40, 12)])
def test_normal_equations(sizes, of_class, monkeypatch):
  """(X'DX + l2) W = X'DY, with D the weight of each row's class.

  With more features than rows, XX' is decomposed. One feature is constant.
  """
  x, y = _case(*sizes)
  x[:, 2] = 4
  l2s = [2.0**-6, 1.0, 2.0**10]
  models = ridge.fit(x, y, 3, l2s, of_class)
  mean, std = x.mean(0, np.float64), x.std(0, dtype=np.float64) + 1e-5
  if of_class is not None:
    mean, std = models[0].mean, models[0].std
  z = np.concatenate([(x - mean) / std, np.full((len(x), 1), 100.0)], axis=1)
  d = np.ones((len(x), 1)) if of_class is None else of_class[y][:, None]
  targets = 2.0 * np.eye(3)[y] - 1.0
  for l2, model in zip(l2s, models, strict=True):
    gram = z.T @ (d * z) + l2 * np.eye(z.shape[1])
    want = np.linalg.solve(gram, z.T @ (d * targets))
    # Condition up to 4e5 / 0.016 (constant feature): 1e-16 * 3e7, with room.
    np.testing.assert_allclose(model.weights, want, rtol=1e-6, atol=1e-8)
  # In parts, as a large split is scored.
  whole = ridge.predict(models[0], x)
  monkeypatch.setattr(ridge, "ROWS", 7)
  np.testing.assert_array_equal(ridge.predict(models[0], x), whole)


def test_shots_are_the_first_of_each_class_in_turn():
  labels = np.array([2, 0, 1, 0, 1, 2, 0, 1, 2])
  rng = np.random.default_rng(5)
  want = [rng.permutation(np.flatnonzero(labels == k))[:2] for k in range(3)]
  got = ridge.sample_shots(labels, 2, 5, num_classes=3)
  np.testing.assert_array_equal(got, np.concatenate(want))
  assert labels[got].tolist() == [0, 0, 1, 1, 2, 2]
  hidden = np.insert(labels, 4, -1)  # no label
  got_of_labelled = ridge.sample_shots(hidden, 2, 5, num_classes=3)
  np.testing.assert_array_equal(got_of_labelled, got + (got >= 4))
  # Fewer shots of the same seed are among them.
  assert set(ridge.sample_shots(labels, 1, 5, 3)) < set(got)


def test_classes_of_few_examples():
  """All of them are taken; more shots than the largest has are refused."""
  few = np.array([0, 0, 0, 2, 2, 2, 1])
  got = ridge.sample_shots(few, 2, seed=0, num_classes=3)
  assert few[got].tolist() == [0, 0, 1, 2, 2]
  for labels, shots, word in (
    (few, 4, "class 1 has 1"),
    (few[:6], 1, "class 1 has 0"),
    (few, 0, "shots: got 0"),
  ):
    with pytest.raises(ValueError, match=word):
      ridge.sample_shots(labels, shots, seed=0, num_classes=3)


def test_wrong_input():
  x, y = _case(20, 6)
  broken = x.copy()
  broken[4, 1] = np.nan
  for features, num_classes, l2, word in (
    (x, 3, 0.0, "l2: got 0"),
    (x, 2, 1.0, "classes from 0 to 2"),
    (broken, 3, 1.0, "row 4"),
  ):
    with pytest.raises(ValueError, match=word):
      ridge.fit(features, y, num_classes, [1.0, l2])
