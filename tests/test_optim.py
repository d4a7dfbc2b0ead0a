"""One update as algebra; the leaves that decay; the structure of the state."""

import dataclasses
import doctest
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import optim
from vit_jax.config import OptimConfig

PARAMS = {
  "Transformer": {
    "encoderblock_0": {"Dense_0": {"kernel": jnp.full((2, 2), 2.0)}},
    "posembed_input": {"pos_embedding": jnp.ones((1, 3, 2))},
  },
  "head": {"kernel": jnp.full((2, 1), -1.0), "bias": jnp.ones((1,))},
}
GRADS = jax.tree.map(lambda p: 0.25 * p, PARAMS)


def _updates(config, factors=(1,)):
  """Parameters after each step, whose gradients are `GRADS` times a factor."""
  tx, _ = optim.make_optimizer(config, total_steps=100)
  params, state, history = PARAMS, tx.init(PARAMS), []
  for factor in factors:
    grads = jax.tree.map(lambda g, f=factor: f * g, GRADS)
    updates, state = jax.jit(tx.update)(grads, state, params)
    params = optax.apply_updates(params, updates)
    history.append(params)
  return history, state


def _paths(tree):
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves
  }


def test_examples():
  assert doctest.testmod(optim).failed == 0


def test_adamw_first_step():
  config = OptimConfig(lr=0.1, schedule="constant", weight_decay=0.3)
  (after,), _ = _updates(config)
  # Bias-corrected moments of one gradient are g and g^2: u = g / (|g| + eps).
  head = after["head"]
  np.testing.assert_allclose(
    head["kernel"], -1 - 0.1 * (-1 + 0.3 * -1), rtol=1e-6
  )
  np.testing.assert_allclose(head["bias"], 1 - 0.1 * 1, rtol=1e-6)
  np.testing.assert_allclose(
    after["Transformer"]["posembed_input"]["pos_embedding"], 0.9, rtol=1e-6
  )


def test_adamw_second_step_follows_the_paper_of_adam():
  config = OptimConfig(lr=0.1, schedule="linear", beta1=0.8, beta2=0.95)
  history, _ = _updates(config, factors=(1, -2))
  w, m, v = 1.0, 0.0, 0.0
  for t, g in ((1, 0.25), (2, -0.5)):
    m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
    lr = 0.1 * (1 - (t - 1) / 100)
    w -= lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)) ** 0.5 + 1e-8)
    np.testing.assert_allclose(history[t - 1]["head"]["bias"], [w], rtol=1e-6)


def test_sgd_momentum_and_decoupled_decay():
  config = OptimConfig(
    name="sgd", lr=0.1, schedule="constant", momentum=0.9, weight_decay=0.5
  )
  history, _ = _updates(config, factors=(1, 1))
  w, a = -1.0, 0.0
  for params in history:
    a = 0.9 * a - 0.25  # The decay never enters the accumulator.
    w -= 0.1 * (a + 0.5 * w)
    np.testing.assert_allclose(params["head"]["kernel"], w, rtol=1e-6)


def test_warmup_makes_the_first_update_zero():
  config = OptimConfig(lr=0.1, warmup_steps=10, weight_decay=0.3)
  (first, second), _ = _updates(config, factors=(1, 1))
  jax.tree.map(np.testing.assert_array_equal, first, PARAMS)
  assert float(second["head"]["bias"][0]) == pytest.approx(1 - 0.01, rel=1e-6)


def test_clipping_acts_on_the_global_norm():
  config = OptimConfig(
    name="sgd", lr=1.0, schedule="constant", momentum=0.0, clip_norm=0.5
  )
  (after,), _ = _updates(config)
  moved = jax.tree.map(lambda old, new: old - new, PARAMS, after)
  np.testing.assert_allclose(optax.tree.norm(moved), 0.5, rtol=1e-6)
  norm = float(optax.tree.norm(GRADS))
  np.testing.assert_allclose(
    moved["head"]["bias"], [0.25 * 0.5 / norm], rtol=1e-5
  )
  # Gradients below the limit stay as they are.
  (after,), _ = _updates(dataclasses.replace(config, clip_norm=10 * norm))
  np.testing.assert_allclose(after["head"]["bias"], [0.75], rtol=1e-6)


def test_decay_mask_by_path():
  params = {
    "cls": 0.0,
    "embedding": {"kernel": 0.0, "bias": 0.0},
    "MAPHead_0": {"probe": 0.0},
    "Transformer": {
      "encoder_norm": {"scale": 0.0, "bias": 0.0},
      "encoderblock": {"MlpBlock_0": {"Dense_0": {"kernel": 0.0}}},
      "posembed_input": {"pos_embedding": 0.0},
    },
    "kernel_of_something": {"bias": 0.0},
  }
  decayed = [
    p for p, is_on in _paths(optim.decay_mask(params)).items() if is_on
  ]
  assert decayed == [
    "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel",
    "embedding/kernel",
  ]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_mirrors_the_parameters(name):
  config = OptimConfig(
    name=name, weight_decay=0.1, clip_norm=1.0, accumulator_dtype="bfloat16"
  )
  _, state = _updates(config)
  wanted = _paths(PARAMS)
  seen = {path: [] for path in wanted}
  for path, leaf in _paths(state).items():
    matches = [p for p in wanted if path.endswith(f"/{p}")]
    if matches:
      (match,) = matches
      assert leaf.shape == wanted[match].shape
      seen[match].append(leaf.dtype)
    else:
      assert leaf.shape == (), path
  dtypes = [jnp.bfloat16] + [jnp.float32] * (name == "adamw")
  assert all(kinds == dtypes for kinds in seen.values()), seen


def test_bfloat16_accumulator_rounds_only_what_is_stored():
  config = OptimConfig(lr=0.1, schedule="constant")
  (full,), _ = _updates(config)
  half, state = _updates(
    dataclasses.replace(config, accumulator_dtype="bfloat16"), factors=(1, 1)
  )
  # The first update has not read the accumulator yet.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-7), full, half[0]
  )
  # All gradients alike: every later update is 1 too, up to 8 bits.
  np.testing.assert_allclose(half[1]["head"]["bias"], 0.8, atol=0.1 * 2**-8)
  assert state[0].nu["head"]["bias"].dtype == jnp.float32


# Gradients of 4,096 weights over 200 steps, as noisy as they are large.
SIZES = np.geomspace(1e-4, 1e-2, 4096)
NOISY = SIZES * (1 + np.random.default_rng(0).normal(size=(200, 4096)))
STORED = {"adamw": "mu", "sgd": "trace"}


def _run(name, dtype, gradients):
  """The update of each step at a rate of 1, and what was stored."""
  config = OptimConfig(
    name=name, lr=1.0, schedule="constant", accumulator_dtype=dtype
  )
  tx, _ = optim.make_optimizer(config, total_steps=len(gradients))
  state = tx.init({"w": jnp.zeros(gradients.shape[1:])})

  def step(state, gradient):
    updates, state = tx.update({"w": gradient}, state)
    return state, (updates["w"], getattr(state[0], STORED[name])["w"])

  gradients = jnp.asarray(gradients, jnp.float32)
  _, (updates, stored) = jax.jit(lambda s, g: jax.lax.scan(step, s, g))(
    state, gradients
  )
  return np.asarray(updates, "d"), np.asarray(stored)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_bfloat16_accumulator_decays_in_float32(name):
  updates, stored = _run(name, "bfloat16", NOISY)
  assert stored.dtype == jnp.bfloat16
  gradients = np.float32(NOISY)[1:].astype("d")
  before = stored[:-1].astype("d")
  share = 1.0 if name == "sgd" else 0.1
  after = 0.9 * before + share * gradients
  # Float32's rounding of products and of a sum whose terms may cancel.
  float32 = 2.0**-22 * (np.abs(before) + np.abs(gradients))
  if name == "sgd":
    assert (np.abs(-updates[1:] - after) <= float32).all()
  # What is stored is the nearest number of 8 bits.
  half = 2.0 ** (np.ceil(np.log2(np.abs(after) + float32)) - 9)
  assert (np.abs(stored[1:].astype("d") - after) <= half + float32).all()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_bfloat16_accumulator_follows_float32_over_200_steps(name):
  expected, half = (
    _run(name, dtype, NOISY)[0].sum(0) for dtype in ("float32", "bfloat16")
  )
  error = half / expected - 1
  # An update is off by 3e-3, and 10 of 200 steps remember that: 3e-3
  # sqrt(10 / 200) if all updates had the same size; these are noisy.
  assert np.sqrt((error**2).mean()) < 2e-3
  # As often up as down. A decay of 0.8984, as bfloat16 has it, makes 1.4 %.
  assert abs(error.mean()) < 2e-4


def test_ema_of_a_long_run_approaches_geometrically():
  average = jax.tree.map(jnp.zeros_like, PARAMS)
  for step in range(100, 103):
    average = optim.ema(average, PARAMS, decay=0.5, step=step)
  np.testing.assert_allclose(average["head"]["bias"], [1 - 0.5**3])
  same = optim.ema(PARAMS, PARAMS, decay=0.9999, step=10**6)
  jax.tree.map(np.testing.assert_array_equal, same, PARAMS)


def test_ema_forgets_its_start():
  """1 / binomial(n + 9, 9) of the start is left, whatever the decay."""
  left, expected = {"w": jnp.ones(())}, 1.0
  for step in range(12):
    left = optim.ema(left, {"w": jnp.zeros(())}, decay=0.9999, step=step)
    expected /= math.comb(step + 10, 9) / math.comb(step + 9, 9)
    # One rounding of the weight and one of the product in each step.
    np.testing.assert_allclose(left["w"], expected, rtol=1e-5)
  assert expected == pytest.approx(1 / math.comb(21, 9))


def test_ema_rises_as_in_tensorflow():
  """The numbers in the documentation's example: 0 -> 4.5 -> 4.555."""
  average = optim.ema({"w": jnp.zeros(())}, {"w": 5.0}, decay=0.99, step=0)
  np.testing.assert_allclose(average["w"], 4.5, rtol=1e-6)
  average = optim.ema(average, {"w": 10.0}, decay=0.99, step=10_000)
  np.testing.assert_allclose(average["w"], 4.555, rtol=1e-6)


def test_ema_reaches_its_decay_where_it_says():
  for decay, steps in ((0.99, 890), (0.999, 8990)):
    assert (10 * decay - 1) / (1 - decay) == pytest.approx(steps)
    weights = [float(optim.ema_weight(decay, s)) for s in (steps - 9, steps)]
    assert weights[0] > weights[1] == pytest.approx(1 - decay, rel=1e-6)


def test_unknown_name():
  with pytest.raises(
    ValueError, match="optim.name: got 'lamb', expected one of adamw"
  ):
    optim.make_optimizer(OptimConfig(name="lamb"), 10)


def test_freezing_nothing_or_all_is_an_error():
  params = {"head": {"kernel": 0.0}, "embedding": {"kernel": 0.0}}
  assert not optim.freeze_errors(["embedding/*"], params)
  (error,) = optim.freeze_errors(["embeding/*"], params)
  assert "'embeding/*', which no parameter matches" in error
  (error,) = optim.freeze_errors(["*"], params)
  assert "leaves nothing to train" in error
