"""The train step: one device or eight, whole batches or microbatches."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from steps import MESH, ONE, assert_losses_are_close, by_path, placed

from vit_jax import devices, losses, sharding, step
from vit_jax.batch import normalise
from vit_jax.callbacks import Callback
from vit_jax.config import ConfigError
from vit_jax.objectives import Classification


class Run(NamedTuple):
  parts: tiny.Parts
  start: dict  # the parameters before the first step
  state: Any
  metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def one_device():
  parts = tiny.Parts(tiny.config(), ONE)
  state = parts.state()
  start = jax.device_get(state.params)
  return Run(parts, start, *parts.run(5, state))


@pytest.fixture(scope="module")
def random():
  """One block, dropout, and an average of the parameters."""
  options = dict(model__depth=1, model__dropout=0.5, optim__ema_decay=0.5)
  return tiny.Parts(tiny.config(seed=1, **options), ONE)


def batch_of(batch, parts):
  return sharding.to_global(batch, parts.mesh)


def test_first_step_is_the_formula(one_device):
  """Loss and gradients written out with optax alone."""
  parts, start, _, metrics = one_device
  batch = tiny.batch(0, parts.config)

  def loss(params):
    logits, _ = parts.model.apply(
      {"params": params}, normalise(jnp.asarray(batch["image"]))
    )
    targets = jax.nn.one_hot(batch["label"], tiny.NUM_CLASSES)
    per_example = losses.softmax_xent(logits, targets)
    return jnp.mean(per_example[:-1])  # the mask leaves the last row out

  value, grads = jax.jit(jax.value_and_grad(loss))(start)
  # Sums of 15 terms in another order: a few units of float32's last place.
  np.testing.assert_allclose(metrics[0]["loss"], value, rtol=1e-6)
  np.testing.assert_allclose(
    metrics[0]["grad_norm"], optax.tree.norm(grads), rtol=1e-5
  )


def test_golden(one_device):
  """A refactoring changes no number: those of seed 0, on one device."""
  golden = {
    "loss": [2.302585, 2.170401, 2.039950, 1.887150, 1.774622],
    "grad_norm": [1.858722, 2.086359, 1.974077, 1.359449, 1.266945],
    "param_norm": [24.801744, 24.824409, 24.872608, 24.931986, 24.993301],
  }
  for name, values in golden.items():
    # What other orders of float32 sums add up to within five steps.
    got = [m[name] for m in one_device.metrics]
    np.testing.assert_allclose(got, values, rtol=1e-5)


def test_masked_rows_do_not_count(one_device):
  """And the state is donated; the step is compiled once."""
  parts, start, _, metrics = one_device
  batch = tiny.batch(0, parts.config)
  batch["image"][-1] = 255
  batch["label"][-1] = (batch["label"][-1] + 1) % tiny.NUM_CLASSES
  state = placed(parts, start)
  leaf = state.params["embedding"]["kernel"]
  _, changed = parts.train_step(state, batch_of(batch, parts))
  assert float(changed["loss"]) == metrics[0]["loss"]
  assert metrics[0]["undecodable"] == 1
  assert leaf.is_deleted() and parts.train_step._cache_size() == 1


def test_same_seed_same_bits_other_seed_other(one_device, random):
  parts, start, state, _ = one_device
  again, _ = parts.run(5, placed(parts, start))
  jax.tree.map(np.testing.assert_array_equal, state, again)
  kernel = lambda state: state.params["embedding"]["kernel"]
  other = random.trainer.maker(kernel)()
  assert np.any(start["embedding"]["kernel"] != other)


def assert_equal(one_device, **changes):
  """Compares five steps from the same weights; returns the first state."""
  parts = tiny.Parts(tiny.config(**changes))
  state = placed(parts, one_device.start)
  shardings = jax.tree.map(lambda x: x.sharding, state.params)
  # Sums in another order; five steps at a high learning rate amplify it.
  assert_losses_are_close(one_device.metrics, parts.run(5, state)[1])
  return shardings


def test_equal_on_a_mesh_in_microbatches_and_in_a_scan(one_device):
  assert_equal(
    one_device,
    **MESH,
    optim__microbatch=2,
    model__scan=True,
    model__remat="full",
  )


@pytest.mark.slow
def test_equal_where_heads_are_split(one_device, monkeypatch):
  monkeypatch.setattr(sharding, "SPLIT_BY_HEADS", ("cpu",))
  shardings = assert_equal(one_device, mesh__fsdp=4, model__scan=True)
  block = shardings["Transformer"]["encoderblock"]
  kernel = block["MultiHeadDotProductAttention_0"]["query"]["kernel"]
  assert kernel.spec == jax.P(None, None, "fsdp", None)


def test_parameters_are_born_sharded():
  mesh = dict(mesh__data=1, mesh__fsdp=4, mesh__tensor=2)
  trainer = tiny.Parts(tiny.config(**mesh)).trainer
  block = lambda state: state.params["Transformer"]["encoderblock_0"]
  part = lambda state: block(state)["MlpBlock_0"]["Dense_0"]["kernel"]
  kernel = trainer.maker(part)()
  assert kernel.shape == (32, 64)
  assert {s.data.shape for s in kernel.addressable_shards} == {(8, 32)}


def test_dropout_changes_with_the_step_and_not_with_the_history(random):
  batch = batch_of(tiny.batch(0, random.config), random)

  def grad_norm(at_step):
    state = placed(random)
    step = jax.device_put(np.int32(at_step), state.step.sharding)
    _, metrics = random.train_step(state.replace(step=step), batch)
    return float(metrics["grad_norm"])

  assert grad_norm(3) == grad_norm(3)
  assert grad_norm(3) != grad_norm(4)


def test_ema_follows_and_is_what_evaluation_sees(random):
  start = placed(random)
  before = np.asarray(start.params["embedding"]["kernel"])
  state, _ = random.run(1, start)
  after = np.asarray(state.params["embedding"]["kernel"])
  # The first update gets a weight of 0.9, see optim.ema_weight. One product,
  # one subtraction and one addition: float32 rounding of the larger term.
  np.testing.assert_allclose(
    state.averages["ema"]["embedding"]["kernel"],
    0.1 * before + 0.9 * after,
    atol=1e-7,
  )
  assert state.eval_params is state.averages["ema"]


def test_an_infinite_gradient_norm_is_not_applied_where_the_loss_is_finite(
  random,
):
  """Logits of 1e25: squares of the gradients are above float32's 3e38."""
  state = placed(random)
  kernel = state.params["head"]["kernel"]
  noise = np.random.default_rng(0).normal(size=kernel.shape)
  large = jax.device_put(np.float32(1e25 * noise), kernel.sharding)
  head = {**state.params["head"], "kernel": large}
  state = state.replace(params={**state.params, "head": head})
  before = jax.device_get(state)
  state, (metrics,) = random.run(1, state)
  assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] == math.inf
  assert metrics["skipped"] == 1
  after = jax.device_get(state.replace(step=before.step))
  jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(
  "name, smoothing", [("softmax", 0.2), ("sigmoid", 0.0), ("bce", 0.0)]
)
def test_the_loss_is_that_of_the_config(one_device, name, smoothing):
  """With a head that is not zero; test_losses.py has the formulas."""
  parts, start, *_ = one_device
  batch = tiny.batch(1, parts.config)
  bias = np.linspace(-1, 1, tiny.NUM_CLASSES, dtype="f")
  params = {**start, "head": {**start["head"], "bias": bias}}  # the logits
  objective = Classification(loss=name, label_smoothing=smoothing)
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 1)
  learner = objective.make(parts.config.model, shape, {})
  loss = lambda params, batch: learner.loss(params, batch, jax.random.key(0), 0)
  total, count, _ = jax.jit(loss)(params, batch)
  one_hot = np.eye(tiny.NUM_CLASSES)[batch["label"]]
  targets = (1 - smoothing) * one_hot + smoothing / tiny.NUM_CLASSES
  logits = jnp.tile(bias, (16, 1))
  want = losses.LOSSES[name](logits, jnp.asarray(targets, "f"))
  assert count == 15
  # Sums of 15 terms in another order.
  np.testing.assert_allclose(total, want[:-1].sum(), rtol=1e-6)


@pytest.mark.slow
def test_nothing_is_trained_where_there_are_no_steps():
  config = tiny.config(model__depth=1)
  mesh = sharding.make_mesh(config.mesh, ONE)
  run_shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), total_steps=None)
  trainer = step.assemble(config, run_shape, mesh)
  assert trainer.train_step is trainer.schedule is None
  want = tiny.Parts(config, ONE).state().params
  got = trainer.init_params()
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_compiler_has_the_options_of_the_chip(monkeypatch):
  assert devices.compiler_options(ONE[0].device_kind) == {}
  # A kind of the table has an option, which a CPU's compiler refuses.
  options = devices.compiler_options("TPU v5 lite")
  assert options["xla_msa_max_outstanding_evictions"] == "1"
  monkeypatch.setitem(devices.OPTIONS, ONE[0].device_kind, options)
  parts = tiny.Parts(tiny.config(model__depth=1), ONE)
  with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_scoped_vmem"):
    parts.run(1, placed(parts))


@pytest.mark.parametrize(
  "returned, word",
  [
    (({"loss": jnp.zeros(())}, None), "'loss'"),
    (({"vector": jnp.ones(3)}, None), "no scalar"),
    ({"number": jnp.zeros(())}, "(metrics, memory)"),
  ],
)
def test_what_a_callback_may_not_return(returned, word):
  class Observer(Callback):
    def step_metrics(self, step, grads, updates, params, memory):
      return returned

  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 1)
  config = tiny.config(model__depth=1)
  mesh = sharding.make_mesh(config.mesh, ONE)
  with pytest.raises(ConfigError) as error:
    step.assemble(config, shape, mesh, [Observer()])
  assert "config.callbacks" in str(error.value) and word in str(error.value)


@pytest.mark.slow
def test_it_trains_where_jax_has_64_bits():
  """JAX_ENABLE_X64, which some set for other code of theirs."""
  with jax.enable_x64(True):
    parts = tiny.Parts(tiny.config(model__pool="map", model__depth=1), ONE)
    state, (metrics,) = parts.run(1)
  assert np.isfinite(metrics["loss"])
  # So that a run may go on with the other setting.
  dtypes = {x.dtype.name for x in jax.tree.leaves((parts.shapes, state))}
  assert dtypes == {"float32", "int32"}


BELOW_HEAD = ("embedding/*", "cls", "Transformer/*")


def test_frozen_parameters_keep_their_bits():
  """Gradients, moments and norm are those of the head alone."""
  options = dict(optim__freeze=BELOW_HEAD, model__depth=1)
  parts = tiny.Parts(tiny.config(**options), ONE)
  state = placed(parts, jax.tree.map(jnp.zeros_like, parts.shapes.params))
  start = jax.device_get(state.model_params)  # the head is zero
  batch = tiny.batch(0, parts.config)
  images = jnp.asarray(batch["image"])
  _, out = jax.jit(parts.trainer.predict)(start, images)
  state, (metrics, *_) = parts.run(3, state)
  end = jax.device_get(state.model_params)
  assert np.any(start["head"]["kernel"] != end["head"]["kernel"])
  for name in ("embedding", "Transformer"):
    jax.tree.map(np.testing.assert_array_equal, start[name], end[name])
  # Two moments of the kernel and of the bias, and the counts of steps.
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert len(moments) == 4
  errors = (0.1 - np.eye(tiny.NUM_CLASSES)[batch["label"]])[:-1] / 15
  kernel = np.asarray(out["pre_logits"])[:-1].T @ errors
  norm = np.hypot(np.linalg.norm(kernel), np.linalg.norm(errors.sum(0)))
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)


@pytest.mark.parametrize(
  "name, scan",
  [
    pytest.param("muon", True, marks=pytest.mark.slow),
    *(
      pytest.param(*row, marks=pytest.mark.nightly)
      for row in (
        ("muon", False),
        ("lamb", True),
        ("lamb", False),
        ("lion", True),
        ("adafactor", True),
        ("optax:lars", False),
      )
    ),
  ],
)
def test_optimizers_are_equal_on_a_mesh(name, scan):
  """Norms, means and products of parts are those of whole parameters."""
  changes = dict(
    optim__name=name,
    optim__weight_decay=0.1,
    optim__layer_decay=0.75,
    optim__lr=1e-3,
    model__scan=scan,
  )
  _, metrics = tiny.Parts(tiny.config(**changes), ONE).run(3)
  _, others = tiny.Parts(tiny.config(**changes, **MESH)).run(3)
  # Sums in another order. lion takes the sign of numbers near 0, too.
  rtol = 1e-3 if name == "lion" else 1e-5
  assert_losses_are_close(metrics, others, rtol)
  assert metrics[2]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize(
  "name, moments",
  [
    ("adamw", 2),
    ("muon", 1),
    ("adafactor", 1),
    ("optax:lars", 1),
    ("optax:contrib.prodigy", 4),
  ],
)
def test_the_state_of_an_optimizer_is_split(name, moments):
  """All but what adafactor has of rows and columns lies as its parameter."""
  mesh = dict(mesh__fsdp=4, mesh__data=2)
  parts = tiny.Parts(tiny.config(optim__name=name, model__scan=True, **mesh))
  params = by_path(parts.shapes.params)
  seen = []
  for path, x in by_path(parts.shapes.opt_state).items():
    owner = next((k for k in params if path.endswith(f"/{k}")), None)
    if owner is None:
      assert x.size <= 3, path  # counts and constants
    elif x.shape == params[owner].shape:
      assert x.sharding == params[owner].sharding, path
      seen.append(owner)
    else:
      assert "/v_" in path or "/v/" in path
      assert x.sharding.is_fully_replicated, path
  kernel = "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel"
  assert seen.count(kernel) == moments
