"""Optimizers by import path: rate, decay and arguments; their state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from steps import by_path

from vit_jax import optim, optim_checks, schedules
from vit_jax.checkpointing import checkpointer
from vit_jax.config import CheckpointConfig, OptimConfig
from vit_jax.families import ViTConfig
from vit_jax.models.stacking import unstack_blocks

HERE = __name__
GIVEN = {}  # the last arguments of `recorded`


def recorded(learning_rate, weight_decay=0.5):
  GIVEN.update(learning_rate=learning_rate, weight_decay=weight_decay)
  return optax.sgd(learning_rate)


def raises():
  raise RuntimeError("no luck")


def no_transformation():
  return 3


def _tree(scan=False, seed=0):
  numbers = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(numbers.normal(size=shape), jnp.float32)
  blocks = [{"kernel": draw(4, 4), "bias": draw(4)} for _ in range(3)]
  scales = (1.0, 10.0, 0.1)  # a norm of all blocks is that of none
  blocks = [
    jax.tree.map(lambda x, s=s: s * x, b)
    for b, s in zip(blocks, scales, strict=True)
  ]
  head = {"head": {"kernel": draw(4, 2), "bias": draw(2)}}
  if scan:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
    return {"Transformer": {"encoderblock": stacked}} | head
  names = {f"encoderblock_{i}": block for i, block in enumerate(blocks)}
  return {"Transformer": names} | head


def _after(name, scan=False, **options):
  """The parameters after three steps of a rate that rises and falls."""
  config = OptimConfig(name=name, lr=0.1, warmup_steps=1, **options)
  tx, _ = optim.make_optimizer(config, 4, ViTConfig())
  return unstack_blocks(_three_steps(tx, scan), ViTConfig)


def _three_steps(tx, scan=False):
  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = _tree(scan)
  state = jax.jit(tx.init)(params)
  for seed in (1, 2, 3):
    params, state = step(params, state, _tree(scan, seed))
  return params


def _near(a, b, **tolerances):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, **tolerances), a, b
  )


@pytest.mark.parametrize(
  "name",
  [
    "optax:adamw",  # has a rate, a decay and a mask
    "optax:scale_by_adam",  # has none
    "optax:adam(b1=0.9, b2=0.999)",  # has a rate
  ],
)
def test_rate_decay_and_factors_are_those_of_adamw(name):
  options = dict(
    weight_decay=0.3, clip_norm=1.0, layer_decay=0.5, lr_scale=("head/*=3",)
  )
  want = _after("adamw", **options)
  # The same sums in another order.
  _near(_after(name, **options), want, rtol=1e-5, atol=1e-6)


def test_arguments_in_brackets():
  got = _after("optax:contrib.ademamix(b3=0.9,alpha=2.0)", weight_decay=0.3)
  _near(
    _after("optax:adamw"), _after("adamw"), rtol=1e-6
  )  # no decay of its own
  config = OptimConfig(lr=0.1, warmup_steps=1)
  schedule = schedules.make_schedule(config, 4)
  tx = optax.contrib.ademamix(
    schedule, b3=0.9, alpha=2.0, weight_decay=0.3, mask=optim.decay_mask
  )
  _near(got, _three_steps(tx), rtol=1e-6)


def test_a_decay_without_a_mask_is_not_used():
  got = _after(f"{HERE}:recorded", weight_decay=0.3)
  assert GIVEN["weight_decay"] == 0.0
  assert float(GIVEN["learning_rate"](1)) == pytest.approx(0.1)
  _near(got, _after("sgd", weight_decay=0.3, momentum=0.0), rtol=1e-5)


@pytest.mark.parametrize(
  "name",
  [
    "optax:lars",
    pytest.param("optax:normalize_by_update_norm", marks=pytest.mark.slow),
  ],
)
def test_a_scan_moves_blocks_as_a_loop_does(name):
  """Norms of parameters, in the state or not, and of the whole tree."""
  options = dict(weight_decay=0.1)
  loop, scan = _after(name, **options), _after(name, scan=True, **options)
  _near(loop, scan, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "word"),
  [
    ("optax:contrib.ademamiks", "contrib.ademamiks"),
    ("optax:adamw(b4=1)", "b4"),
    ("optax:adamw(learning_rate=1.0)", "learning_rate"),
    ("optax:adamw(weight_decay=1.0)", "weight_decay"),
    ("optax:adamw(b1='a')", "TypeError"),
    ("optax:polyak_sgd", "'value'"),
    (f"{HERE}:raises", "no luck"),
    (f"{HERE}:no_transformation", "returns 3"),
    (f"{HERE}:HERE", "a function"),
  ],
)
def test_errors_are_those_of_the_config(name, word):
  params = jax.eval_shape(_tree)
  (error,) = optim_checks.errors(OptimConfig(name=name), params, ViTConfig())
  assert "config.optim.name" in error and word in error


SEVERAL = dict(
  optim__weight_decay=0.1,
  optim__layer_decay=0.8,
  mesh__fsdp=2,
  mesh__tensor=2,
  mesh__data=2,
)


@pytest.mark.parametrize("name", ["optax:lars", "optax:contrib.prodigy"])
def test_state_is_split_like_the_parameters(name):
  parts = tiny.Parts(tiny.config(optim__name=name, **SEVERAL))
  moments = {
    x.sharding.shard_shape(x.shape)
    for path, x in by_path(parts.shapes.opt_state).items()
    if path.endswith("Dense_0/kernel") and x.size > 1
  }
  assert moments == {(16, 32)}


@pytest.mark.nightly  # as checkpointing/test_checkpointer.py, with more state
@pytest.mark.parametrize(
  "name",
  ["optax:lars", "optax:contrib.prodigy", "optax:adafactor"],
)
def test_resumes_to_the_bit_and_equals_one_device(name, tmp_path):
  parts = tiny.Parts(tiny.config(optim__name=name, **SEVERAL))
  state, before = parts.run(2)
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  saver.save_now(2, state, {"step": 2})
  restored = saver.restore(2, parts.shapes)
  saver.close()
  (whole, after), (resumed, _) = parts.run(2, state), parts.run(2, restored)
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  on_one = {k: v for k, v in SEVERAL.items() if not k.startswith("mesh")}
  one = tiny.Parts(tiny.config(optim__name=name, **on_one), jax.devices()[:1])
  _, want = one.run(4)
  losses = [[m["loss"] for m in rows] for rows in (before + after, want)]
  np.testing.assert_allclose(*losses, rtol=1e-4)
