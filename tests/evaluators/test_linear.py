"""The linear probe: what it learns from, what chooses, what is scored."""

import handmade
import in_memory
import numpy as np
import pytest

from vit_jax.evaluators import linear
from vit_jax.evaluators.linear import LinearConfig


def trained(x, y, grid=((0.1, 0.0),), **changes):
  given = {"steps": 60, "step_images": 16, "seed": 0, **changes}
  return linear.train_heads(x, y, int(y.max()) + 1, list(grid), **given)


def test_steps_are_those_of_numpy(monkeypatch):
  """Whitening, momentum, decay, schedule and order of images, in float64.

  Heads do not know of each other, nor of how many steps are sent at a time.
  """
  monkeypatch.setattr(linear, "FETCHED", 10 * 16 * 3)
  rng = np.random.default_rng(1)
  x = rng.normal(3, 2, (40, 3)).astype(np.float32)
  y = rng.integers(0, 4, 40).astype(np.int32)
  grid = [(0.3, 0.0), (0.1, 0.05)]
  heads = trained(x, y, grid, steps=25, seed=3)
  order = np.concatenate(
    [np.random.default_rng((3, e)).permutation(40) for e in range(11)]
  )
  white = (x - x.astype(float).mean(0)) / (x.astype(float).std(0) + 1e-5)
  for i, (lr, decay) in enumerate(grid):
    w, b = np.zeros((3, 4)), np.zeros(4)
    vw, vb = 0.0, 0.0
    for step in range(25):
      rows = order[step * 16 : step * 16 + 16]
      logits = white[rows] @ w + b
      p = np.exp(logits - logits.max(1, keepdims=True))
      error = (p / p.sum(1, keepdims=True) - np.eye(4)[y[rows]]) / 16
      vw = 0.9 * vw + white[rows].T @ error + decay * w
      vb = 0.9 * vb + error.sum(0)
      rate = lr * (1 + np.cos(np.pi * step / 25)) / 2
      w, b = w - rate * vw, b - rate * vb
    # 25 steps of float32.
    np.testing.assert_allclose(heads.kernels[i], w, rtol=0, atol=2e-5)
    np.testing.assert_allclose(heads.biases[i], b, rtol=0, atol=2e-5)


def test_a_head_of_a_layer_is_that_of_its_features():
  """As in DINOv2's protocol, where heads read parts of the features."""
  rng = np.random.default_rng(0)
  x = rng.normal(2, 3, (50, 6)).astype(np.float32)
  y = rng.integers(0, 3, 50).astype(np.int32)
  layers = np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]], np.float32)
  rates = [(0.1, 0.01), (0.05, 0.0)]
  both = trained(x, y, rates, layers=layers)
  for i, part in enumerate((slice(0, 2), slice(2, 6))):
    alone = trained(x[:, part], y, [rates[i]])
    np.testing.assert_allclose(
      both.kernels[i, part], alone.kernels[0], rtol=1e-4, atol=1e-5
    )
    assert not both.kernels[i, layers[i] == 0].any()


def options_of(**changes):
  own = {"steps": 60, "lrs": (0.1,), "weight_decays": (0.0,)}
  return LinearConfig(**{"name": "l", **own, **changes})


def separable(num):
  """Three classes in the plane, far apart, of very unlike units."""
  rng = np.random.default_rng(0)
  y = rng.integers(0, 3, num)
  centres = np.array([[0, 0], [1, 0], [0, 1]])
  x = centres[y] + rng.uniform(-0.2, 0.2, (num, 2))
  return (x * [1000, 0.001] + [5e4, 3]).astype(np.float32), y.astype(np.int32)


X, Y = separable(200)


def test_images_that_do_not_count_have_no_loss():
  x = X[:64] / [1000, 0.001]
  hidden = np.where(np.arange(64) % 2, Y[:64], -1).astype(np.int32)
  one = dict(steps=1, whiten=False)
  half = trained(x, hidden, **one, step_images=64)
  whole = trained(x[1::2], Y[1:64:2], **one, step_images=32)
  assert whole.kernels.any() and not whole.mean.any()
  np.testing.assert_allclose(half.kernels, whole.kernels, rtol=1e-4, atol=1e-5)


def test_a_data_set_is_learned_without_what_is_held_out():
  """Labels of the held-out images are wrong; the head is none the worse."""
  rows = {"x": X, "label": Y, "index": np.arange(200)}
  learned, held_out = linear.divided(rows, seed=1)
  assert len(held_out["x"]) == 20
  both = np.concatenate([learned["index"], held_out["index"]])
  assert sorted(both.tolist()) == list(range(200))
  other = linear.divided(rows, seed=0)[1]["index"]
  assert {*other} != {*held_out["index"]}
  wrong = Y.copy()
  wrong[held_out["index"]] = (Y[held_out["index"]] + 1) % 3
  probe = in_memory.probe(options_of(seed=1), wrong, Y[:50], 3)
  scores = probe.run({"features": X})
  assert scores["l/held_out"] == 0.0 and scores["l/top1"] == 1.0
  assert scores["l/count"] == 50 and scores["l/lr"] == 0.1


def test_heads_that_diverged_are_not_taken():
  probe = in_memory.probe(options_of(lrs=(3e38, 0.1)), Y, Y, 3)
  heads, held_out, test = probe.gather({"features": X})
  # One that diverged is not taken, though it comes first.
  assert probe.score((heads, held_out, test))["l/lr"] == 0.1
  assert "learning rate 0.1," in probe.answers.by
  none = heads._replace(kernels=np.full_like(heads.kernels, np.nan))
  scores = probe.score((none, held_out, test))
  assert {k for k, v in scores.items() if v == v} == {"l/count"}
  assert probe.answers is None  # none are left of those before


def test_it_is_chosen_on_what_is_held_out():
  """The first head is right on the test split, and it is not taken."""
  options, labels = options_of(lrs=(0.1, 0.2, 0.3)), [0, 1, 2]
  probe = in_memory.probe(options, labels, labels, 3)
  identity = np.eye(3, dtype=np.float32)
  turned = np.roll(identity, 1, axis=1)
  heads = linear.Heads(
    mean=np.zeros(3, np.float32),
    std=np.ones(3, np.float32),
    kernels=np.stack([identity, turned, turned]),
    biases=np.zeros((3, 3), np.float32),
  )
  right = np.array([0, 1, 2, 0])
  x = identity[right]
  held_out = {"x": x, "label": np.array([1, 2, 0, 2])}  # one no head gets
  test = {"x": x, "label": right, "index": np.arange(4)}
  assert probe.score((heads, held_out, test)) == {
    "l/top1": 0.0,
    "l/held_out": 0.75,
    "l/lr": 0.2,  # of two equal ones the first
    "l/weight_decay": 0.0,
    "l/count": 4.0,
  }


@pytest.mark.nightly
def test_augmented_images_are_drawn_in_each_pass_and_none_is_held_out():
  """The features of the model are looked up by the image's number."""
  x = (X - X.mean(0)) / X.std(0)
  held_out = linear.is_held_out(200, 0)
  wrong = np.where(held_out, (Y + 1) % 3, Y)
  ops = handmade.OPS + "|flip_lr"
  options = options_of(train_ops=ops, whiten=False, steps=90)
  first, again = (
    in_memory.probe(options, wrong, Y, 3).run({"features": x}) for _ in range(2)
  )
  assert first == again
  assert first["l/held_out"] == 0.0 and first["l/top1"] == 1.0
  source = handmade.records(Y, 3)
  sources = {"train_split": source, "split": source}
  context = handmade.context(options, sources)
  batches = context.augmented(source, np.flatnonzero(~held_out), ops, 0)
  seen = np.concatenate([next(batches)["index"] for _ in range(45)])
  assert sorted(seen[:180].tolist()) == sorted(seen[180:].tolist())
  assert (seen[:180] != seen[180:]).any()
  assert options.num_images(sources) == (20 + 90 * 180, 200)
  assert options_of().num_images(sources) == (200, 200)


def test_steps_are_cut_from_batches():
  """Whatever the sizes of both; the last rows of a batch begin a step."""
  x, label = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20)
  rows = {"x": x, "label": label, "mask": label != 3}
  batches = [{k: v[i : i + 8] for k, v in rows.items()} for i in (0, 8, 16)]
  steps = list(linear.steps_of(batches, steps=6, rows=3, width=2))
  got, labels = (np.concatenate(part) for part in zip(*steps, strict=True))
  np.testing.assert_array_equal(got.reshape(18, 2), x[:18])
  assert labels.ravel().tolist() == [0, 1, 2, -1, *range(4, 18)]
