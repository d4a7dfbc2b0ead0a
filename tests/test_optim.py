"""One update as algebra; the leaves that decay; the structure of the state."""

import dataclasses
import doctest
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import optim, optim_checks, param_groups, schedules
from vit_jax.config import OptimConfig
from vit_jax.config.schema import READ_BY
from vit_jax.families import ViTConfig
from vit_jax.models import build
from vit_jax.models.stacking import unstack_blocks

MODEL = ViTConfig()
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
  tx, _ = optim.make_optimizer(config, 100, MODEL)
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
    p for p, is_on in _paths(param_groups.decay_mask(params)).items() if is_on
  ]
  assert decayed == [
    "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel",
    "embedding/kernel",
  ]


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion"])
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
  dtypes = [jnp.bfloat16] + [jnp.float32] * (name in ("adamw", "lamb"))
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
  tx, _ = optim.make_optimizer(config, len(gradients), MODEL)
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
    average = optim.moved(average, PARAMS, optim.ema_weight(0.5, step))
  np.testing.assert_allclose(average["head"]["bias"], [1 - 0.5**3])
  same = optim.moved(PARAMS, PARAMS, optim.ema_weight(0.9999, 10**6))
  jax.tree.map(np.testing.assert_array_equal, same, PARAMS)


def test_ema_forgets_its_start():
  """1 / binomial(n + 9, 9) of the start is left, whatever the decay."""
  left, expected = {"w": jnp.ones(())}, 1.0
  for step in range(12):
    left = optim.moved(
      left, {"w": jnp.zeros(())}, optim.ema_weight(0.9999, step)
    )
    expected /= math.comb(step + 10, 9) / math.comb(step + 9, 9)
    # One rounding of the weight and one of the product in each step.
    np.testing.assert_allclose(left["w"], expected, rtol=1e-5)
  assert expected == pytest.approx(1 / math.comb(21, 9))


def test_ema_rises_as_in_tensorflow():
  """The numbers in the documentation's example: 0 -> 4.5 -> 4.555."""
  average = optim.moved(
    {"w": jnp.zeros(())}, {"w": 5.0}, optim.ema_weight(0.99, 0)
  )
  np.testing.assert_allclose(average["w"], 4.5, rtol=1e-6)
  average = optim.moved(average, {"w": 10.0}, optim.ema_weight(0.99, 10_000))
  np.testing.assert_allclose(average["w"], 4.555, rtol=1e-6)


def test_ema_reaches_its_decay_where_it_says():
  for decay, steps in ((0.99, 890), (0.999, 8990)):
    assert (10 * decay - 1) / (1 - decay) == pytest.approx(steps)
    weights = [float(optim.ema_weight(decay, s)) for s in (steps - 9, steps)]
    assert weights[0] > weights[1] == pytest.approx(1 - decay, rel=1e-6)


def test_unknown_name():
  with pytest.raises(
    ValueError, match="optim.name: got 'adam', expected one of adamw"
  ):
    optim.make_optimizer(OptimConfig(name="adam"), 10, MODEL)


OTHERS = {
  "beta1": 0.5,
  "beta2": 0.5,
  "momentum": 0.5,
  "accumulator_dtype": "bfloat16",
  "end_lr": 0.05,
}
CHOICES = {
  key: OptimConfig.__dataclass_fields__[key].metadata["choices"]
  for key in ("name", "schedule")
}


@pytest.mark.parametrize(
  ("selector", "choice"),
  [(key, choice) for key, choices in CHOICES.items() for choice in choices],
)
def test_what_is_read(selector, choice):
  """An option changes the program of an update, or `checks` refuses it."""
  options = {"lr": 0.1, selector: choice}
  if choice == "step":
    options["decay_at"] = (0.5,)
  params = {
    "MlpBlock_0": {"Dense_0": {"kernel": jnp.zeros((32, 32))}},
    "w": 0.0,
  }

  def program(**changed):
    tx, _ = optim.make_optimizer(OptimConfig(**options | changed), 10, MODEL)
    run = lambda p: tx.update(p, tx.init(p), p)
    return str(jax.make_jaxpr(run)(params))

  plain = program()
  got = {
    key for key, value in OTHERS.items() if program(**{key: value}) != plain
  }
  read = {
    key
    for key, (by, choices) in READ_BY.items()
    if (choice if by == selector else getattr(OptimConfig, by)) in choices
  }
  assert OTHERS.keys() == READ_BY.keys() and got == read


def test_patterns_that_name_nothing_are_errors():
  params = {"head": {"kernel": 0.0}, "embedding": {"kernel": 0.0}}
  errors = lambda **options: optim_checks.errors(
    OptimConfig(**options), params, MODEL
  )
  assert not errors(freeze=("embedding/*",), lr_scale=("head/*=10",))
  (error,) = errors(freeze=("embeding/*",))
  assert "freeze: no parameter matches 'embeding/*'" in error
  (error,) = errors(freeze=("*",))
  assert "leave some parameters to train" in error
  (error,) = errors(lr_scale=("head/*=10", "haed/kernel=3"))
  assert "lr_scale: no parameter matches 'haed/kernel'" in error
  assert "Did you mean 'head/kernel'?" in error
  (error,) = errors(lr_zero=("head/*=10", "haed/kernel=3"))
  assert "lr_zero: no parameter matches 'haed/kernel'" in error
  (error,) = errors(clip_groups=("head/*", "haed/kernel"))
  assert "clip_groups: no parameter matches 'haed/kernel'" in error
  assert not errors(clip_groups=("each",))
  (error,) = errors(layer_decay=0.7)
  assert "layer_decay: got 0.7, expected None" in error
  (error,) = errors(name="muon")
  assert "optim.name: got 'muon', expected another" in error
  params["MlpBlock_0"] = {"Dense_0": {"kernel": np.zeros((2, 2))}}
  assert not errors(name="muon")
  (error,) = errors(name="muon", freeze=("MlpBlock_0/*",))
  assert "optim.name: got 'muon', expected another" in error


def _model_params(**options):
  """Shapes of all kinds of parameters that a ViT has."""
  options = dict(width=8, depth=3, mlp_dim=16, num_heads=2) | options
  model = build(ViTConfig(**{"variant": "Ti/8"} | options), 4)
  images = jnp.zeros((1, 16, 16, 3))
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images))
  return shapes["params"]


def test_layers_of_mae_and_beit():
  params = _model_params(pool="map", pre_logits=True)
  params |= {"cls": 0.0, "registers": 0.0, "dist": 0.0, "head_dist": {"x": 0.0}}
  params["Transformer"]["pre_norm"] = {"scale": 0.0}
  layer = {}
  for path, number in _paths(param_groups.layers(params, MODEL)).items():
    block = path.startswith("Transformer/")
    layer.setdefault("/".join(path.split("/")[: 1 + block]), set()).add(number)
  assert layer == {
    "embedding": {0},
    "cls": {0},
    "registers": {0},
    "dist": {0},
    "Transformer/posembed_input": {0},
    "Transformer/pre_norm": {0},
    "Transformer/encoderblock_0": {1},
    "Transformer/encoderblock_1": {2},
    "Transformer/encoderblock_2": {3},
    "Transformer/encoder_norm": {4},
    "MAPHead_0": {4},
    "pre_logits": {4},
    "head": {4},
    "head_dist": {4},
  }
  hybrid = _model_params(
    variant="R50+Ti/16", stage_blocks=(1,), stage_width=0.5
  )
  below = {k for k, v in hybrid.items() if k not in ("Transformer", "head")}
  assert below > {"embedding", "conv_root"}
  for name in below:
    assert {*jax.tree.leaves(param_groups.layers(hybrid, MODEL)[name])} == {
      0
    }, name


@pytest.mark.parametrize("scan", [False, True])
def test_rates_of_layers_and_patterns(scan):
  """Each parameter moves by lr 0.75^(4 - layer), times its patterns' factors;
  so does its decay."""
  config = OptimConfig(
    name="sgd",
    lr=0.1,
    schedule="constant",
    momentum=0.0,
    weight_decay=0.5,
    layer_decay=0.75,
    lr_scale=("head/*=10", "*/kernel=2"),
  )
  params = jax.tree.map(lambda x: jnp.ones(x.shape), _model_params(scan=scan))
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
  if scan:
    updates = unstack_blocks(updates, ViTConfig)
  moved = {k: {*np.unique(v)} for k, v in _paths(updates).items()}
  want = {
    "embedding/kernel": 0.75**4 * 2 * 1.5,
    "embedding/bias": 0.75**4,
    "cls": 0.75**4,
    "Transformer/encoderblock_0/LayerNorm_0/scale": 0.75**3,
    "Transformer/encoderblock_2/MlpBlock_0/Dense_0/kernel": 0.75 * 2 * 1.5,
    "Transformer/encoder_norm/scale": 1.0,
    "head/bias": 10.0,
    "head/kernel": 10 * 2 * 1.5,
  }
  for path, factor in want.items():
    (got,) = moved[path]
    np.testing.assert_allclose(got, -0.1 * factor, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("position", [0, 1, 30_000, 124_999])
def test_the_weight_decay_moves_along_half_a_cosine(position):
  """Values of the authors' schedule for DINOv2's short recipe."""
  want = {
    0: 0.04,
    1: 0.040000000056848894,
    30_000: 0.04 + 0.36 * math.sin(math.pi / 2 * 0.24) ** 2,
    124_999: 0.3999999999431511,
  }[position]
  config = OptimConfig(
    lr=1.0, schedule="constant", weight_decay=0.04, weight_decay_end=0.4
  )
  decay = schedules.weight_decay(config, 125_000)
  np.testing.assert_allclose(decay(position), want, atol=6e-8)
  tx, _ = optim.make_optimizer(config, 125_000, MODEL)
  state = jax.tree.map(
    lambda x: x + position if x.dtype == jnp.int32 else x, tx.init(PARAMS)
  )
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  updates, _ = tx.update(zeros, state, PARAMS)
  np.testing.assert_allclose(updates["head"]["kernel"], want, atol=6e-8)
  assert not updates["head"]["bias"].any()


def test_the_weight_decay_of_an_imported_optimizer_moves():
  config = OptimConfig(lr=0.5, schedule="constant", weight_decay_end=0.4)
  for name in ("optax:sgd", "optax:adamw", "optax:scale_by_adam"):
    tx, _ = optim.make_optimizer(
      dataclasses.replace(config, name=name), 2, MODEL
    )
    state, zeros = tx.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
    got = []
    for _ in range(3):
      updates, state = tx.update(zeros, state, PARAMS)
      got.append(float(updates["head"]["kernel"][0, 0]))
    np.testing.assert_allclose(got, [0, 0.1, 0.2], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("scan", [False, True])
def test_groups_are_clipped_by_their_own_norms(scan):
  """The largest norm of each group is 2; blocks of a scan are no arrays."""

  def clipped(*groups):
    config = OptimConfig(
      name="sgd", momentum=0.0, lr=1.0, clip_norm=2.0, clip_groups=groups
    )
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), _model_params(scan=scan))
    tx, _ = optim.make_optimizer(config, 10, MODEL)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    if scan:
      updates = unstack_blocks(updates, ViTConfig)
    return _paths(updates)

  norm = lambda arrays: math.sqrt(sum(float((x**2).sum()) for x in arrays))
  np.testing.assert_allclose(norm(clipped().values()), 2.0, rtol=1e-5)
  groups = {0: [], 1: [], 2: []}
  for path, x in clipped("head/*", "*/kernel").items():
    is_kernel = path.endswith("/kernel")
    groups[0 if path.startswith("head/") else 1 if is_kernel else 2].append(x)
  for arrays in groups.values():
    np.testing.assert_allclose(norm(arrays), 2.0, rtol=1e-5)
  for path, x in clipped("each").items():
    np.testing.assert_allclose(
      norm([x]), min(2.0, math.sqrt(x.size)), rtol=1e-5, err_msg=path
    )


def test_a_rate_is_zero_in_the_first_steps():
  """The moments go on: the third update is that of a run without."""
  config = OptimConfig(lr=0.1, schedule="constant", weight_decay=0.3)
  zero = dataclasses.replace(config, lr_zero=("head/kernel=2", "head/bias=1"))
  (history, _), (others, _) = (
    _updates(c, factors=(1, -2, 3)) for c in (zero, config)
  )
  start = [PARAMS, *history], [PARAMS, *others]
  moves = [
    [jax.tree.map(jnp.subtract, b, a) for a, b in itertools.pairwise(run)]
    for run in start
  ]
  for step in range(3):
    got, want = (run[step] for run in moves)
    for path, x in _paths(got).items():
      first = {"head/kernel": 2, "head/bias": 1}.get(path, 0)
      if step < first:
        assert not x.any()
      elif path != "head/kernel":  # its decay follows its value
        np.testing.assert_allclose(x, _paths(want)[path], atol=1e-6)
  assert moves[0][2]["head"]["kernel"].all()


def test_new_options_leave_the_state_of_others_alone():
  """Checkpoints of earlier runs resume."""
  config = OptimConfig(lr=0.1, weight_decay=0.1, clip_norm=1.0)
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  state = jax.tree_util.tree_structure(tx.init(PARAMS))
  old = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(),
    optax.add_decayed_weights(0.1, param_groups.decay_mask),
    optax.scale_by_learning_rate(lambda step: 0.1),
  )
  assert state == jax.tree_util.tree_structure(old.init(PARAMS))


def test_lion_is_the_sign_of_an_interpolation():
  config = OptimConfig(name="lion", lr=0.1, schedule="constant")
  history, _ = _updates(config, factors=(1, -0.08, -0.12))
  w, m = 1.0, 0.0
  for t, g in enumerate((0.25, -0.02, -0.03)):
    w -= 0.1 * np.sign(0.9 * m + 0.1 * g)
    m = 0.99 * m + 0.01 * g
    np.testing.assert_allclose(history[t]["head"]["bias"], [w], rtol=1e-6)
  # The last sign has changed: 0.9 m is 0.002, with a decay of 0.98 0.004.
  assert w == pytest.approx(1 - 0.1 - 0.1 + 0.1)


def test_lamb_makes_updates_of_kernels_as_long_as_they_are():
  config = OptimConfig(
    name="lamb", lr=0.1, schedule="constant", weight_decay=0.3
  )
  (after,), _ = _updates(config)
  # Adam's first update is the sign; the decay is 0.3 of the kernel.
  dense = after["Transformer"]["encoderblock_0"]["Dense_0"]["kernel"]
  np.testing.assert_allclose(dense, 2 - 0.1 * 2, rtol=1e-6)
  np.testing.assert_allclose(after["head"]["kernel"], -1 + 0.1, rtol=1e-6)
  np.testing.assert_allclose(after["head"]["bias"], 1 - 0.1, rtol=1e-6)


def test_lamb_moves_as_adam_what_does_not_decay():
  """A LayerScale of 1e-6 would move by a millionth of the rate."""
  config = OptimConfig(name="lamb", lr=0.1, schedule="constant")
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  params = {"LayerScale_0": {"scale": jnp.full((3,), 1e-6)}}
  grads = jax.tree.map(lambda x: jnp.full(x.shape, 0.25), params)
  updates, _ = tx.update(grads, tx.init(params), params)
  # 1 - beta2 is 0.001, rounded at 2^-24.
  np.testing.assert_allclose(updates["LayerScale_0"]["scale"], -0.1, rtol=6e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_lamb_is_timm_s(scan):
  """Five steps of an attention, whose query, key and value timm has as one."""
  import torch
  import torch_libraries

  timm = torch_libraries.load("timm.optim")
  numbers = np.random.default_rng(0)
  # Kernels [3, inputs, heads, width of a head] of very different lengths.
  scales = np.array([1.0, 0.3, 0.03])[:, None, None, None]
  qkv = (scales * numbers.normal(size=(3, 8, 2, 4))).astype("f")
  out = numbers.normal(size=(2, 4, 8)).astype("f")
  bias = numbers.normal(size=(8,)).astype("f")

  def tree(qkv, out, bias):
    names = ("query", "key", "value")
    attention = {n: {"kernel": x} for n, x in zip(names, qkv, strict=True)}
    attention["out"] = {"kernel": out, "bias": bias}
    block = {"MultiHeadDotProductAttention_0": attention}
    if scan:
      block = jax.tree.map(lambda x: jnp.asarray(x)[None], block)
    return {"Transformer": {"encoderblock" + "_0" * (not scan): block}}

  theirs = [torch.nn.Parameter(torch.tensor(x)) for x in (qkv, out, bias)]
  lamb = timm.Lamb(
    [
      {"params": theirs[:2], "weight_decay": 0.05},
      {"params": theirs[2:], "weight_decay": 0.0},
    ],
    lr=0.1,
    eps=1e-8,  # ours
    max_grad_norm=1.0,
  )
  config = OptimConfig(
    name="lamb", lr=0.1, schedule="constant", weight_decay=0.05, clip_norm=1.0
  )
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  ours = tree(qkv, out, bias)
  state = tx.init(ours)
  for _ in range(5):
    grads = [numbers.normal(size=x.shape).astype("f") for x in (qkv, out, bias)]
    for parameter, grad in zip(theirs, grads, strict=True):
      parameter.grad = torch.tensor(grad)
    lamb.step()
    updates, state = tx.update(tree(*grads), state, ours)
    ours = optax.apply_updates(ours, updates)
  expected = tree(*(x.detach().numpy() for x in theirs))
  # Rounding of float32 in five steps of up to 0.2; the largest seen is 4e-6.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
    ours,
    expected,
  )


def test_adafactor_is_the_formula():
  """Rows and columns of the second moment, and its decay 1 - t^-0.8."""
  numbers = np.random.default_rng(0)
  grads = numbers.normal(size=(3, 32, 48)).astype("f")
  config = OptimConfig(
    name="adafactor", lr=1.0, schedule="constant", momentum=0.7, beta2=0.5
  )
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  params = {"w": jnp.zeros((32, 48)), "b": jnp.zeros((48,))}
  state = tx.init(params)
  shapes = [x.shape for x in jax.tree.leaves(state) if x.size > 1]
  assert sorted(shapes) == [(32,), (32, 48), (48,), (48,), (48,)]
  rows, columns, moment, m, m_bias = 0.0, 0.0, 0.0, 0.0, 0.0
  for t, g in enumerate(grads, start=1):
    decay = min(0.5, 1 - t**-0.8)
    square = g.astype("d") ** 2
    rows = decay * rows + (1 - decay) * square.mean(1)
    columns = decay * columns + (1 - decay) * square.mean(0)
    moment = decay * moment + (1 - decay) * square[0]
    second = np.outer(rows, columns) / rows.mean()
    m = 0.7 * m + 0.3 * g / np.sqrt(second)
    m_bias = 0.7 * m_bias + 0.3 * g[0] / np.sqrt(moment)
    updates, state = tx.update({"w": g, "b": g[0]}, state, params)
    np.testing.assert_allclose(updates["w"], -m, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(updates["b"], -m_bias, rtol=1e-4, atol=1e-6)


def _newton_schulz(x):
  """Five steps on a matrix, float64."""
  if x.shape[0] > x.shape[1]:
    return _newton_schulz(x.T).T
  x = x / np.linalg.norm(x)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x


def test_muon_of_orthogonal_rows_in_closed_form():
  """All singular values are 1/2 of the norm; the steps are a polynomial."""
  config = OptimConfig(name="muon", lr=0.1, schedule="constant")
  tx, _ = optim.make_optimizer(config, 10, MODEL)
  grads = {"MlpBlock_0": {"Dense_0": {"kernel": 3.0 * jnp.eye(4, 9)}}}
  updates, _ = tx.update(grads, tx.init(grads), grads)
  x = 0.5
  for _ in range(5):
    x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
  # Five steps amplify float32's rounding by up to 3.4445 each.
  np.testing.assert_allclose(
    updates["MlpBlock_0"]["Dense_0"]["kernel"],
    -0.1 * 0.2 * 3 * x * np.eye(4, 9),
    rtol=0,
    atol=0.06 * 3.4445**5 * 2**-24,
  )


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_muon_orthogonalises_the_kernels_of_attention_and_mlp(scan):
  """In two steps; every other parameter moves as with Adam."""
  options = dict(width=12, num_heads=3, mlp_dim=20)
  shapes = _model_params(**options, scan=scan)
  numbers = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(numbers.normal(size=x.shape), jnp.float32)
  first, second = (jax.tree.map(draw, shapes) for _ in range(2))

  def run(name):
    config = OptimConfig(name=name, lr=1.0, schedule="constant")
    tx, _ = optim.make_optimizer(config, 10, MODEL)

    @jax.jit
    def steps():
      _, state = tx.update(first, tx.init(first), first)
      return tx.update(second, state, first)

    return steps()

  updates, state = run("muon")
  plain = lambda tree: _paths(
    jax.tree.map(lambda x: np.asarray(x, "d"), unstack_blocks(tree, ViTConfig))
  )
  got, adam, g1, g2 = map(plain, (updates, run("adamw")[0], first, second))
  numbers_of = {"query": 1, "key": 1, "value": 1, "out": 2, "Dense": 1}
  orthogonal = 0
  for path, update in got.items():
    *_, parent, leaf = ("", *path.split("/"))
    inputs = numbers_of.get(parent.split("_")[0])
    if leaf != "kernel" or not inputs:
      np.testing.assert_array_equal(update, adam[path], err_msg=path)
      continue
    orthogonal += 1
    # Bias-corrected, and one step of the momentum ahead.
    m = 0.95 * 0.05 * g1[path] + 0.05 * g2[path]
    m = 0.95 * m / (1 - 0.95**3) + 0.05 * g2[path] / (1 - 0.95**2)
    rows = int(np.prod(m.shape[:inputs]))
    want = _newton_schulz(m.reshape(rows, -1))
    want = -0.2 * np.sqrt(max(want.shape)) * want.reshape(m.shape)
    # Five steps amplify float32's rounding by 3.4445 each.
    np.testing.assert_allclose(update, want, atol=2e-4, err_msg=path)
    # Of singular values 0.7 to 1.2: the mean square of Adam's, 0.2.
    assert 0.1 < np.sqrt(np.mean(update**2)) < 0.3
  assert orthogonal == 3 * 6
  # A matrix has one moment, any other parameter two.
  sizes = {k: v.size for k, v in got.items()}
  kernels = [k for k in got if k.endswith("kernel") and "block" in k]
  one, all_ = sum(map(sizes.get, kernels)), sum(sizes.values())
  moments = [x for x in jax.tree.leaves(state) if x.size > 3]
  assert sum(x.size for x in moments) == 2 * all_ - one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "lion", "adafactor", "muon"])
def test_a_scan_moves_blocks_as_a_loop_does(name):
  shapes = _model_params(width=64, mlp_dim=128, scan=True)
  numbers = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(numbers.normal(size=x.shape), jnp.float32)
  params, grads = (jax.tree.map(draw, shapes) for _ in range(2))
  config = OptimConfig(name=name, lr=1.0, schedule="constant", weight_decay=0.1)
  tx, _ = optim.make_optimizer(config, 10, MODEL)

  @jax.jit
  def run(params, grads):
    state = tx.init(params)
    _, state = tx.update(grads, state, params)
    return tx.update(grads, state, params)

  stacked, state = run(params, grads)
  plain, plain_state = run(
    *(unstack_blocks(t, ViTConfig) for t in (params, grads))
  )
  # Norms and means of the same numbers, maybe in another order.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
    unstack_blocks(stacked, ViTConfig),
    plain,
  )
  # A run may resume with the other form: see `checkpointing.convert_state`.
  size = lambda state: sum(x.size for x in jax.tree.leaves(state))
  assert size(state) == size(plain_state)
