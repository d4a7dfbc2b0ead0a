"""The linear probe: what it learns from, what chooses, what is scored."""

import re

import handmade
import in_memory
import numpy as np
import pytest

from vit_jax.evaluators import linear
from vit_jax.evaluators.linear import LinearConfig


def _train(x, y, grid=((0.1, 0.0),), **changes):
  given = {"steps": 60, "step_images": 16, "seed": 0, **changes}
  return linear.train_heads(x, y, int(y.max()) + 1, list(grid), **given)


def _separable(num, seed=0):
  """Three classes in the plane, far apart, of very unlike units."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, 3, num)
  centres = np.array([[0, 0], [1, 0], [0, 1]])
  x = centres[y] + rng.uniform(-0.2, 0.2, (num, 2))
  return (x * [1000, 0.001] + [5e4, 3]).astype(np.float32), y.astype(np.int32)


def test_steps_are_those_of_numpy(monkeypatch):
  """Whitening, momentum, decay, schedule and order of images, in float64.

  Heads do not know of each other, nor of how many steps are sent at a time.
  """
  monkeypatch.setattr(linear, "FETCHED", 10 * 16 * 3)
  rng = np.random.default_rng(1)
  x = rng.normal(3, 2, (40, 3)).astype(np.float32)
  y = rng.integers(0, 4, 40).astype(np.int32)
  grid = [(0.3, 0.0), (0.1, 0.05)]
  heads = _train(x, y, grid, steps=25, step_images=16, seed=3)
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


def _options(**changes):
  own = {"steps": 60, "lrs": (0.1,), "weight_decays": (0.0,)}
  return LinearConfig(**{"name": "l", **own, **changes})


def _run(options, x, train_labels, test_labels):
  """Scores features whose first rows are those of both splits."""
  probe = in_memory.probe(options, train_labels, test_labels, 3)
  return probe.run({"features": x})


def test_a_data_set_is_learned_without_what_is_held_out():
  """Labels of the held-out images are wrong; the head is none the worse."""
  x, y = _separable(200)
  rows = {"x": x, "label": y, "index": np.arange(200)}
  learned, held_out = linear.divided(rows, seed=1)
  assert len(held_out["x"]) == 20
  both = np.concatenate([learned["index"], held_out["index"]])
  assert sorted(both.tolist()) == list(range(200))
  other = linear.divided(rows, seed=0)[1]["index"]
  assert {*other} != {*held_out["index"]}
  wrong = y.copy()
  wrong[held_out["index"]] = (y[held_out["index"]] + 1) % 3
  scores = _run(_options(seed=1), x, wrong, y[:50])
  assert scores["l/held_out"] == 0.0 and scores["l/top1"] == 1.0
  assert scores["l/count"] == 50 and scores["l/lr"] == 0.1


def test_heads_that_diverged_are_not_taken():
  x, y = _separable(200)
  probe = in_memory.probe(_options(lrs=(3e38, 0.1)), y, y, 3)
  heads, held_out, test = probe.gather({"features": x})
  # One that diverged is not taken, though it comes first.
  assert probe.score((heads, held_out, test))["l/lr"] == 0.1
  assert "learning rate 0.1," in probe.answers.by
  none = heads._replace(kernels=np.full_like(heads.kernels, np.nan))
  scores = probe.score((none, held_out, test))
  assert {k for k, v in scores.items() if v == v} == {"l/count"}
  assert probe.answers is None  # none are left of those before


def test_it_is_chosen_on_what_is_held_out():
  """The first head is right on the test split, and it is not taken."""
  options, labels = _options(lrs=(0.1, 0.2, 0.3)), [0, 1, 2]
  probe = in_memory.probe(options, labels, labels, 3)
  turned = np.roll(np.eye(3, dtype=np.float32), 1, axis=1)
  heads = linear.Heads(
    mean=np.zeros(3, np.float32),
    std=np.ones(3, np.float32),
    kernels=np.stack([np.eye(3, dtype=np.float32), turned, turned]),
    biases=np.zeros((3, 3), np.float32),
  )
  x = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
  right = np.array([0, 1, 2, 0])
  held_out = {"x": x, "label": np.array([1, 2, 0, 2])}  # one no head gets
  test = {"x": x, "label": right, "index": np.arange(4)}
  scores = probe.score((heads, held_out, test))
  assert scores == {
    "l/top1": 0.0,
    "l/held_out": 0.75,
    "l/lr": 0.2,  # of two equal ones the first
    "l/weight_decay": 0.0,
    "l/count": 4.0,
  }


@pytest.mark.parametrize(
  "options, num_images, words",
  [
    ({}, 10, []),
    ({"layers": ("cls*2", "encoded")}, 10, []),
    ({"lrs": (0.1, 0.0), "steps": 0}, 10, ["lrs: got", "steps: got"]),
    ({"weight_decays": (), "seed": -1}, 10, ["weight_decays: got", "seed: "]),
    ({"layer": "x"}, 10, ["layer: "]),
    ({"train_ops": "decode|resize(4)"}, 10, ["whiten: got True"]),
    ({"layers": ("pre_logits", "cls")}, 10, ["layers: .* 2, cls of 3"]),
    ({}, 9, ["train_split: got 9"]),
  ],
)
def test_errors_name_their_options(options, num_images, words):
  source = handmade.records(np.arange(num_images) % 2)
  out = {"pre_logits": np.zeros((1, 2)), "encoded": np.zeros((1, 5, 3))}
  errors = in_memory.errors(_options(**options), source, **out)
  assert len(errors) == len(words)
  for text in words:
    assert any(re.match(f"evals.e.{text}", e) for e in errors), text


# DINOv2's protocol.


def test_a_head_of_a_layer_is_that_of_its_features():
  rng = np.random.default_rng(0)
  x = rng.normal(2, 3, (50, 6)).astype(np.float32)
  y = rng.integers(0, 3, 50).astype(np.int32)
  layers = np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]], np.float32)
  rates = [(0.1, 0.01), (0.05, 0.0)]
  both = _train(x, y, rates, layers=layers)
  for i, part in enumerate((slice(0, 2), slice(2, 6))):
    alone = _train(x[:, part], y, [rates[i]])
    np.testing.assert_allclose(
      both.kernels[i, part], alone.kernels[0], rtol=1e-4, atol=1e-5
    )
    assert not both.kernels[i, layers[i] == 0].any()


def test_images_that_do_not_count_have_no_loss():
  x, y = _separable(64)
  x = x / [1000, 0.001]
  wrong = np.where(np.arange(64) % 2, y, -1).astype(np.int32)
  half = linear.train_heads(
    x, wrong, 3, [(0.1, 0.0)], steps=1, seed=0, step_images=64, whiten=False
  )
  whole = linear.train_heads(
    x[1::2], y[1::2], 3, [(0.1, 0.0)], steps=1, seed=0, whiten=False
  )
  assert whole.kernels.any() and not whole.mean.any()
  np.testing.assert_allclose(half.kernels, whole.kernels, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_augmented_images_are_drawn_in_each_pass_and_none_is_held_out():
  """The features of the model are looked up by the image's number."""
  x, y = _separable(200)
  x = (x - x.mean(0)) / x.std(0)
  held_out = linear.is_held_out(200, 0)
  wrong = np.where(held_out, (y + 1) % 3, y)
  options = _options(
    train_ops=handmade.OPS + "|flip_lr", whiten=False, steps=90
  )
  scores = _run(options, x, wrong, y)
  assert scores["l/held_out"] == 0.0 and scores["l/top1"] == 1.0
  assert scores == _run(options, x, wrong, y)
  source = handmade.records(y, 3)
  context = handmade.context(options, {"train_split": source, "split": source})
  batches = context.augmented(
    source, np.flatnonzero(~held_out), options.train_ops, 0
  )
  seen = np.concatenate([next(batches)["index"] for _ in range(45)])
  assert sorted(seen[:180].tolist()) == sorted(seen[180:].tolist())
  assert (seen[:180] != seen[180:]).any()
  sources = {"train_split": source, "split": source}
  assert options.num_images(sources) == (20 + 90 * 180, 200)
  assert _options().num_images(sources) == (200, 200)


def test_steps_are_cut_from_batches():
  """Whatever the sizes of both; the last rows of a batch begin a step."""
  x = np.arange(40, dtype=np.float32).reshape(20, 2)
  mask = np.arange(20) != 3
  batches = [
    {
      "x": x[i : i + 8],
      "label": np.arange(20)[i : i + 8],
      "mask": mask[i : i + 8],
    }
    for i in (0, 8, 16)
  ]
  steps = list(linear.steps_of(batches, steps=6, rows=3, width=2))
  np.testing.assert_array_equal(
    np.concatenate([s for s, _ in steps]).reshape(18, 2), x[:18]
  )
  labels = np.concatenate([s for _, s in steps]).ravel()
  assert labels.tolist() == [0, 1, 2, -1, *range(4, 18)]
