"""The train step: one device or eight, whole batches or microbatches."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from vit_jax import devices, losses, microbatch, param_groups, sharding, step
from vit_jax.batch import normalise
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.models.stacking import stack_blocks
from vit_jax.objectives import Classification
from vit_jax.objectives.objective import Learner

ONE = jax.devices()[:1]


@pytest.fixture(scope="module")
def one_device():
  parts = tiny.Parts(tiny.config(), ONE)
  return parts, *parts.run(5)


@pytest.fixture(scope="module")
def averaged():
  """Another seed, one block, and an average of the parameters."""
  config = tiny.config(seed=1, optim__ema_decay=0.5, model__depth=1)
  return tiny.Parts(config, ONE)


def _losses(metrics):
  return np.array([m["loss"] for m in metrics])


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_normalise_maps_the_ends(array):
  images = normalise(array([[[[0, 255, 51]]]], np.uint8))
  assert images.dtype == np.float32
  np.testing.assert_allclose(images[0, 0, 0], [-1.0, 1.0, -0.6], atol=1e-7)


def test_first_step_is_the_formula(one_device):
  """Loss, gradients and AdamW written out with optax alone."""
  parts, _, metrics = one_device
  batch = tiny.batch(0, parts.config)
  params = parts.state().params

  def loss(params):
    logits, _ = parts.model.apply(
      {"params": params}, normalise(jnp.asarray(batch["image"]))
    )
    targets = jax.nn.one_hot(batch["label"], tiny.NUM_CLASSES)
    per_example = losses.softmax_xent(logits, targets)
    return jnp.mean(per_example[:-1])  # the mask leaves the last row out

  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  # Sums of 15 terms in another order: a few units of float32's last place.
  np.testing.assert_allclose(metrics[0]["loss"], value, rtol=1e-6)
  np.testing.assert_allclose(
    metrics[0]["grad_norm"], optax.tree.norm(grads), rtol=1e-5
  )


def test_golden(one_device):
  """A refactoring changes no number: those of seed 0, on one device."""
  *_, metrics = one_device
  golden = {
    "loss": [2.302585, 2.170401, 2.039950, 1.887150, 1.774622],
    "grad_norm": [1.858722, 2.086359, 1.974077, 1.359449, 1.266945],
    "param_norm": [24.801744, 24.824409, 24.872608, 24.931986, 24.993301],
  }
  for name, values in golden.items():
    # What other orders of float32 sums add up to within five steps.
    np.testing.assert_allclose([m[name] for m in metrics], values, rtol=1e-5)


def test_masked_rows_do_not_count(one_device):
  parts, _, metrics = one_device
  batch = tiny.batch(0, parts.config)
  batch["image"][-1] = 255
  batch["label"][-1] = (batch["label"][-1] + 1) % tiny.NUM_CLASSES
  _, changed = parts.train_step(parts.state(), batch_of(batch, parts))
  assert float(changed["loss"]) == metrics[0]["loss"]
  assert metrics[0]["undecodable"] == 1


def batch_of(batch, parts):
  return sharding.to_global(batch, parts.mesh)


def test_same_seed_same_bits_other_seed_other(one_device, averaged):
  parts, state, _ = one_device
  again, _ = parts.run(5)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(a, b)
  kernel = lambda s: np.asarray(s.params["embedding"]["kernel"])
  assert np.any(kernel(averaged.state()) != kernel(parts.state()))


def _assert_equal(one_device, changes):
  one, _, metrics = one_device
  parts = tiny.Parts(tiny.config(**changes))
  # The same initial weights, whichever way the blocks are stored.
  params = jax.device_get(one.state().params)
  if parts.config.model.scan:
    params = stack_blocks(params, ViTConfig)
  state = parts.state()
  state = state.replace(
    params=jax.tree.map(
      lambda new, old: jax.device_put(new, old.sharding), params, state.params
    )
  )
  _, others = parts.run(5, state)
  # Sums in another order; five steps at a high learning rate amplify it.
  np.testing.assert_allclose(_losses(others), _losses(metrics), rtol=1e-5)
  return state


@pytest.mark.parametrize(
  "changes",
  [
    {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2},
    pytest.param(
      {"optim__microbatch": 1, "mesh__fsdp": 4}, marks=pytest.mark.slow
    ),
    pytest.param(
      {
        "model__scan": True,
        "optim__microbatch": 1,
        "mesh__fsdp": 2,
        "model__remat": "full",
      },
      marks=pytest.mark.slow,
    ),
  ],
  ids=str,
)
def test_equal_on_any_mesh_in_microbatches_and_in_a_scan(one_device, changes):
  _assert_equal(one_device, changes)


@pytest.mark.parametrize(
  "changes, spec",
  [
    pytest.param(*case, marks=mark)
    for mark, *case in (
      (pytest.mark.nightly, {"mesh__fsdp": 4}, (None, "fsdp", None)),
      # 8 of 4 heads:
      (pytest.mark.nightly, {"mesh__fsdp": 8}, ("fsdp", None, None)),
      (
        pytest.mark.slow,
        {"mesh__fsdp": 2, "mesh__tensor": 2},
        ("fsdp", "tensor", None),
      ),
      (
        pytest.mark.slow,
        {"mesh__fsdp": 4, "model__scan": True},
        (None, None, "fsdp", None),
      ),
    )
  ],
  ids=str,
)
def test_equal_where_heads_are_split(one_device, monkeypatch, changes, spec):
  monkeypatch.setattr(sharding, "SPLIT_BY_HEADS", ("cpu",))
  state = _assert_equal(one_device, changes)
  kernels = [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    if param_groups.path_of(path).endswith("query/kernel")
  ]
  assert kernels
  for kernel in kernels:
    assert kernel.sharding.spec == jax.P(*spec)


@pytest.mark.nightly
@pytest.mark.parametrize(
  "family", [tiny.HYBRID, tiny.RESNET], ids=["hybrid", "resnet"]
)
def test_hybrids_and_resnets_are_equal_on_a_mesh_and_learn(family):
  # Adam divides by gradients that are nothing but rounding; SGD does not.
  family = family | dict(optim__name="sgd", optim__lr=0.1)
  _, metrics = tiny.Parts(tiny.config(**family), ONE).run(8)
  assert metrics[-1]["loss"] < 0.95 * metrics[0]["loss"]
  changes = dict(
    mesh__data=2,
    mesh__fsdp=2,
    mesh__tensor=2,
    optim__microbatch=2,
    model__remat="full",
  )
  _, others = tiny.Parts(tiny.config(**family, **changes)).run(8)
  np.testing.assert_allclose(_losses(others), _losses(metrics), rtol=1e-5)


def test_parameters_are_born_sharded():
  mesh = dict(mesh__data=1, mesh__fsdp=4, mesh__tensor=2)
  parts = tiny.Parts(tiny.config(**mesh, model__depth=1))
  params = parts.state().params
  block = params["Transformer"]["encoderblock_0"]
  kernel = block["MlpBlock_0"]["Dense_0"]["kernel"]
  assert kernel.shape == (32, 64)
  assert {s.data.shape for s in kernel.addressable_shards} == {(8, 32)}


def test_moments_lie_where_their_parameters_do():
  parts = tiny.Parts(tiny.config(mesh__fsdp=4))
  path = ("Transformer", "encoderblock_0", "MlpBlock_0", "Dense_0", "kernel")
  shardings = {
    jax.tree_util.keystr(p): x.sharding
    for p, x in jax.tree_util.tree_leaves_with_path(parts.shapes)
    if all(f"'{name}'" in jax.tree_util.keystr(p) for name in path)
  }
  assert len(shardings) == 3  # the parameter and Adam's two moments
  assert len(set(shardings.values())) == 1


def test_state_is_donated(one_device):
  parts, *_ = one_device
  state = parts.state()
  leaf = state.params["embedding"]["kernel"]
  parts.train_step(state, batch_of(tiny.batch(0, parts.config), parts))
  assert leaf.is_deleted()


def test_compiles_once(one_device):
  parts, *_ = one_device
  assert parts.train_step._cache_size() == 1


@pytest.mark.slow
def test_microbatches_lower_the_peak_of_memory():
  def temporaries(microbatch):
    cfg = tiny.config(data__batch_size=256, optim__microbatch=microbatch)
    parts = tiny.Parts(cfg, ONE)
    batch = batch_of(tiny.batch(0, cfg), parts)
    lowered = parts.train_step.lower(parts.shapes, batch)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  # 8 microbatches keep an eighth of the activations, beside the sum of the
  # gradients and the buffers of one microbatch's products.
  assert temporaries(32) < 0.2 * temporaries(None)


@pytest.mark.slow
def test_dropout_changes_with_the_step_and_not_with_the_history():
  parts = tiny.Parts(tiny.config(model__dropout=0.5, optim__lr=1e-12), ONE)
  batch = tiny.batch(0, parts.config)

  def grad_norm(at_step):
    state = parts.state()
    state = state.replace(step=jnp.asarray(at_step, jnp.int32))
    _, metrics = parts.train_step(state, batch_of(batch, parts))
    return float(metrics["grad_norm"])

  assert grad_norm(3) == grad_norm(3)
  assert grad_norm(3) != grad_norm(4)


def test_ema_follows_and_is_what_evaluation_sees(averaged):
  start = averaged.state()
  before = np.asarray(start.params["embedding"]["kernel"])
  np.testing.assert_array_equal(
    before, start.averages["ema"]["embedding"]["kernel"]
  )
  state, _ = averaged.run(1, start)
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
  averaged,
):
  """Logits of 1e25: squares of the gradients are above float32's 3e38."""
  state = averaged.state()
  kernel = state.params["head"]["kernel"]
  noise = np.random.default_rng(0).normal(size=kernel.shape)
  large = jax.device_put(np.float32(1e25 * noise), kernel.sharding)
  head = {**state.params["head"], "kernel": large}
  state = state.replace(params={**state.params, "head": head})
  before = jax.device_get(state)
  state, (metrics,) = averaged.run(1, state)
  assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] == math.inf
  assert metrics["skipped"] == 1
  after = jax.device_get(state.replace(step=before.step))
  jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.slow
def test_sigmoid_loss_is_used():
  parts = tiny.Parts(tiny.config(objective__loss="sigmoid"), ONE)
  _, metrics = parts.run(1)
  # A zero head: each of 10 classes costs log 2.
  assert metrics[0]["loss"] == pytest.approx(10 * np.log(2), rel=1e-6)


@pytest.mark.slow
def test_smoothing_is_that_of_the_config():
  """With a head that is not zero, the loss written out."""
  parts = tiny.Parts(tiny.config(objective__label_smoothing=0.2), ONE)
  state, _ = parts.run(1)
  batch = tiny.batch(1, parts.config)
  logits, _ = jax.jit(parts.model.apply)(
    {"params": state.params}, normalise(jnp.asarray(batch["image"]))
  )
  one_hot = jax.nn.one_hot(batch["label"], tiny.NUM_CLASSES)
  targets = 0.8 * one_hot + 0.2 / tiny.NUM_CLASSES
  want = -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)[:-1].mean()
  _, (metrics,) = parts.run(1, state)
  # Sums of 15 terms in another order.
  np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Brightness(Classification):
  """Toy objective: logit 0 is the image's brightness; bright rows count more.

  A row counts as often as its label says; the mask has no say.
  """

  def make(self, model, run_shape, models):
    module = build(model, run_shape.num_classes)

    def loss(params, batch, rng, step):
      images = normalise(batch["image"])
      logits, _ = module.apply({"params": params}, images)
      error = jnp.square(logits[:, 0] - images.mean((1, 2, 3)))
      count = batch["label"].astype(jnp.float32)
      total = jnp.sum(count)
      named = {"error": (jnp.sum(error), total), "ones": (total, total)}
      return jnp.sum(error * count), total, named

    return Learner(module, loss)


@pytest.mark.slow
def test_any_objective_is_a_mean_over_what_counts():
  """Its sums are added over microbatches and devices before any division."""
  config = dataclasses.replace(tiny.config(), objective=Brightness())
  batch = tiny.batch(0, config)
  error = normalise(batch["image"]).mean((1, 2, 3)) ** 2  # the head is zero
  count = batch["label"].sum()
  _, (first, *_, last) = tiny.Parts(config, ONE).run(20)
  norms, counts = {"grad_norm", "param_norm"}, {"skipped", "undecodable"}
  assert first.keys() == {"loss", "error", "ones", *norms, *counts}
  # Sums of 16 terms in another order.
  want = (batch["label"] * error).sum() / count
  np.testing.assert_allclose(first["loss"], want, rtol=1e-5)
  np.testing.assert_allclose(first["error"], error.sum() / count, rtol=1e-5)
  assert first["ones"] == 1.0
  assert last["loss"] < 0.5 * first["loss"]

  changes = dict(mesh__fsdp=2, mesh__tensor=2, optim__microbatch=1)
  config = dataclasses.replace(tiny.config(**changes), objective=Brightness())
  _, (other,) = tiny.Parts(config).run(1)
  for name, value in first.items():
    np.testing.assert_allclose(other[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_nothing_is_trained_where_there_are_no_steps():
  mesh = sharding.make_mesh(tiny.config().mesh, ONE)
  run_shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), total_steps=None)
  trainer = step.assemble(tiny.config(), run_shape, mesh)
  assert trainer.train_step is trainer.schedule is None
  want = tiny.Parts(tiny.config(), ONE).state().params
  got = trainer.init_params()
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_compiler_has_the_options_of_the_chip(one_device, monkeypatch):
  parts = one_device[0]
  assert devices.compiler_options(ONE[0].device_kind) == {}
  # A kind of the table has an option, which a CPU's compiler refuses.
  options = devices.compiler_options("TPU v5 lite")
  assert options["xla_msa_max_outstanding_evictions"] == "1"
  monkeypatch.setitem(devices.OPTIONS, ONE[0].device_kind, options)
  with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_scoped_vmem"):
    tiny.Parts(parts.config, ONE).run(1)


@pytest.mark.parametrize("least, lengths", [(1, {4}), (16, set())])
def test_a_chip_may_take_fewer_images_at_a_time(monkeypatch, least, lengths):
  monkeypatch.setitem(microbatch.MAX_HIDDEN, ONE[0].device_kind, 4 * 5 * 64)
  monkeypatch.setattr(microbatch, "MIN_MICROBATCH", least)
  parts = tiny.Parts(tiny.config(optim__microbatch=16), ONE)
  assert parts.config.model.num_tokens((16, 16)) == 5
  jaxpr = jax.make_jaxpr(parts.train_step)(
    parts.shapes, tiny.batch(0, parts.config)
  )
  scans = re.findall(r"scan\[[^\]]*?length=(\d+)", str(jaxpr))
  assert {*map(int, scans)} == lengths


@pytest.mark.slow
def test_it_trains_where_jax_has_64_bits():
  """JAX_ENABLE_X64, which some set for other code of theirs."""
  with jax.enable_x64(True):
    parts = tiny.Parts(tiny.config(model__pool="map"), ONE)
    state, (metrics,) = parts.run(1)
  assert np.isfinite(metrics["loss"])
  # So that a run may go on with the other setting.
  has_full_precision = lambda x: x.dtype in ("float32", "int32")
  assert all(
    has_full_precision(x) for x in jax.tree.leaves((parts.shapes, state))
  )


BELOW_HEAD = ("embedding/*", "cls", "Transformer/*")


def test_frozen_parameters_keep_their_bits(one_device):
  """Gradients, moments and norm are those of the head alone."""
  one, _, metrics = one_device
  config = tiny.config(optim__freeze=BELOW_HEAD)
  parts = tiny.Parts(config, ONE)
  start = jax.device_get(one.state().params)
  state, frozen_metrics = parts.run(3)
  end = jax.device_get(state.model_params)
  assert np.any(start["head"]["kernel"] != end["head"]["kernel"])
  for name in ("embedding", "Transformer"):
    jax.tree.map(np.testing.assert_array_equal, start[name], end[name])
  # Two moments of the kernel and of the bias, and the counts of steps.
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert len(moments) == 4
  # In the first step the head is zero, and so is the gradient below it.
  np.testing.assert_allclose(
    frozen_metrics[0]["grad_norm"], metrics[0]["grad_norm"], rtol=1e-6
  )


def _products(fn, *arguments):
  """Multiply-adds of a function, those of a loop's body once."""
  return sum(
    math.prod(equation.outvars[0].aval.shape)
    * math.prod(
      equation.invars[0].aval.shape[i]
      for i in equation.params["dimension_numbers"][0][0]
    )
    for equation, _ in tiny.equations(jax.make_jaxpr(fn)(*arguments))
    if equation.primitive.name == "dot_general"
  )


@pytest.mark.parametrize("scan", [False, True])
def test_no_gradient_of_frozen_parameters_is_computed(scan):
  """A step that trains the head alone has a forward pass and one product."""
  changes = dict(model__scan=scan, optim__freeze=BELOW_HEAD)
  parts = tiny.Parts(tiny.config(**changes), ONE)
  batch = tiny.batch(0, parts.config)
  forward = _products(
    parts.trainer.predict, parts.shapes.model_params, batch["image"]
  )
  of_head = 16 * 32 * tiny.NUM_CLASSES  # images, width, classes
  step = _products(parts.train_step, parts.shapes, batch)
  assert step == forward + of_head


@pytest.mark.slow
def test_frozen_parameters_on_eight_devices():
  changes = dict(optim__freeze=BELOW_HEAD, optim__microbatch=1)
  one = tiny.Parts(tiny.config(**changes), ONE)
  many = tiny.Parts(tiny.config(**changes, mesh__fsdp=4))
  # Sums of eight devices in another order.
  np.testing.assert_allclose(
    _losses(many.run(3)[1]), _losses(one.run(3)[1]), rtol=1e-5
  )


@pytest.mark.parametrize(
  "scan",
  [
    pytest.param(False, marks=pytest.mark.nightly),
    pytest.param(True, marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize("name", ["muon", "lamb", "lion", "adafactor"])
def test_optimizers_are_equal_on_a_mesh(name, scan):
  """Norms, means and products of parts are those of whole parameters."""
  changes = dict(
    optim__name=name, optim__weight_decay=0.1, model__scan=scan, optim__lr=1e-3
  )
  changes["optim__layer_decay"] = 0.75
  _, metrics = tiny.Parts(tiny.config(**changes), ONE).run(3)
  mesh = dict(mesh__fsdp=2, mesh__tensor=2, mesh__data=2)
  parts = tiny.Parts(tiny.config(**changes, **mesh))
  _, others = parts.run(3)
  # Sums in another order. lion takes the sign of numbers near 0, too.
  rtol = 1e-3 if name == "lion" else 1e-5
  np.testing.assert_allclose(_losses(others), _losses(metrics), rtol=rtol)
  assert _losses(metrics)[2] < _losses(metrics)[0]


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_the_state_of_an_optimizer_is_split(name):
  """All but what adafactor has of rows and columns lies as its parameter."""
  mesh = dict(mesh__fsdp=4, mesh__data=2)
  parts = tiny.Parts(tiny.config(optim__name=name, model__scan=True, **mesh))
  of = {
    param_groups.path_of(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(parts.shapes)
  }
  params = {k.removeprefix("params/"): x for k, x in of.items()}
  seen = []
  for path, x in of.items():
    if not path.startswith("opt_state/"):
      continue
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
  assert kernel in seen
