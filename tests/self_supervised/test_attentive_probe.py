"""The attentive probe: its formula, what it learns from, what is scored."""

import handmade
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from evaluators import in_memory

from vit_jax.evaluators.linear import is_held_out
from vit_jax.self_supervised import attentive_probe as lib
from vit_jax.self_supervised.attentive_probe import AttentiveConfig

# The width and the heads of the tiny model.
SIZES = lib.Sizes(width=32, num_heads=4, num_classes=3)


def _options(**changes):
  # One that diverges, one that does not learn, and one that does.
  own = {"steps": 60, "lrs": (3e38, 1e-9, 0.02), "weight_decay": 0.01}
  return AttentiveConfig(**{"name": "a", **own, **changes})


def _found(num, seed=0):
  """Tokens of which one, at any place, says the class; the others are noise."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, 3, num).astype(np.int32)
  x = rng.normal(size=(num, 8, 32))
  # Only channel 0 says which token it is; its noise would hide the mean.
  x[..., 0] = 0
  place = rng.integers(0, 8, num)
  x[np.arange(num), place] = 0.1 * rng.normal(size=(num, 32))
  x[np.arange(num), place, 0] = 8
  x[np.arange(num), place, 1 + y] = 3
  return x.astype(np.float32), y


def _plain(probe, x):
  """Multi-head attention as it is written in papers, all keys and values."""
  keys = jnp.einsum("bnd,dhe->bnhe", x, probe["key"])
  values = jnp.einsum("bnd,dhe->bnhe", x, probe["value"])
  products = jnp.einsum("he,bnhe->bhn", probe["query"], keys)
  weights = jax.nn.softmax(products / np.sqrt(8), axis=-1)
  pooled = jnp.einsum("bhn,bnhe->bhe", weights, values).reshape(len(x), -1)
  return pooled @ probe["kernel"] + probe["bias"][None]


def test_steps_are_those_of_plain_attention():
  """Three steps of two probes, whitened, with rows that do not count."""
  x, y = _found(48)
  labels = np.where(np.arange(48) % 5, y, -1).reshape(3, 16)
  steps = x.reshape(3, 16, -1)
  options = _options(lrs=(0.01, 0.03), weight_decay=0.1)
  batches = [(steps[:2], labels[:2]), (steps[2:], labels[2:])]
  probes = lib.fitted(batches, SIZES, options, 3)
  first = steps[:2][labels[:2] >= 0].reshape(-1, 32)
  white = (x - first.mean(0)) / (first.std(0) + 1e-5)

  @jax.jit
  def step(probe, state, x, labels, rate):
    def loss(probe):
      y, counts = _plain(probe, x), labels >= 0
      losses = optax.softmax_cross_entropy_with_integer_labels(y, labels)
      return (losses * counts).sum() / counts.sum()

    optimizer = optax.adamw(rate, weight_decay=0.1)
    grads = jax.grad(loss)(probe)
    updates, state = optimizer.update(grads, state, probe)
    return optax.apply_updates(probe, updates), state

  for i, lr in enumerate(options.lrs):
    start, _ = lib.initial(SIZES, 0, 1)
    probe = jax.tree.map(lambda v: v[0], start)
    state = optax.adamw(0.0).init(probe)
    for t in range(3):
      rate = lr * (1 + np.cos(np.pi * t / 3)) / 2
      tokens = white.reshape(3, 16, 8, 32)[t]
      probe, state = step(probe, state, tokens, labels[t], rate)
    y = lib.logits(SIZES)(probes, x.reshape(48, -1))[i]
    np.testing.assert_allclose(y, _plain(probe, white), atol=2e-4)


X, Y = _found(200)


def _run(options, train_labels, test_labels):
  """Scores tokens whose first rows are those of both splits."""
  evaluator = in_memory.probe(options, train_labels, test_labels, 3)
  return evaluator, evaluator.run({"tokens": X, "features": X.mean(1)})


def test_the_best_on_what_is_held_out_is_scored():
  hidden = np.where(np.arange(200) % 7, Y, -1)
  probe, scores = _run(_options(), Y, hidden[:50])
  assert scores.pop("a/held_out") > 0.8
  assert scores == {"a/top1": 1, "a/lr": 0.02, "a/count": 50 - 8}
  labelled = np.flatnonzero(hidden[:50] >= 0)
  assert probe.answers.index.tolist() == labelled.tolist()
  assert (probe.answers.prediction == Y[labelled]).all()
  assert (probe.answers.score > 0.5).all()


def test_what_is_held_out_is_not_learned_from():
  """Its labels are wrong: the one that learned nothing is right more often."""
  wrong = np.where(is_held_out(200, 0), (Y + 1) % 3, Y)
  _, scores = _run(_options(), wrong, Y[:50])
  assert scores["a/lr"] == pytest.approx(1e-9) and scores["a/top1"] < 0.8


@pytest.mark.slow
def test_tokens_are_computed_anew_in_each_epoch():
  options = _options(train_ops=handmade.OPS + "|flip_lr", batch_size=96)
  _, scores = _run(options, Y, Y[:50])
  assert scores["a/top1"] > 0.95
  source = handmade.records(Y, 3)
  sources = {"train_split": source, "split": source}
  assert options.num_images(sources) == (20 + 60 * 180, 200)
  assert _options().num_images(sources) == (200, 200)


def test_the_planner_compiles_what_runs():
  probe = in_memory.probe(_options(), Y, Y, 3)
  (program,) = probe.single_device_programs(8 * 32).values()
  fn, (state, batches, *whitening) = program
  assert batches[0].shape == (60, 180, 8 * 32)
  assert jax.eval_shape(fn, state, batches, *whitening) == state
