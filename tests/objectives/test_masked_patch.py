"""Masked patch prediction: the step, its loss, gradients, meshes, weights."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import vit_jax
from vit_jax import models, run_checks, train, weights
from vit_jax.batch import normalise
from vit_jax.checkpointing import checkpointer
from vit_jax.config import ConfigError, checks, model_config, to_dict
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.models import masked_patch as lib
from vit_jax.models.stacking import stack_blocks
from vit_jax.objectives import MaskedPatch
from vit_jax.step import RunShape
from vit_jax.writers.metric_writer import read_metrics

ONE = jax.devices()[:1]


def config(target="mean_color", **changes):
  made = tiny.config(**changes)
  return dataclasses.replace(made, objective=MaskedPatch(target=target))


def errors_of(**changes):
  return checks.errors(config(**changes))


class Table(nn.Module):
  """A network whose tokens are parameters, and do not see one another."""

  @nn.compact
  def embed(self, images):
    shape = (1, 4, 4, 8)
    tokens = self.param("tokens", nn.initializers.normal(), shape)
    return jnp.broadcast_to(tokens, (len(images), *shape[1:])), {}

  def encode(self, tokens, records):
    return tokens.reshape(len(tokens), 16, 8), {}

  def __call__(self, images):
    return self.encode(self.embed(images)[0], None)


@dataclasses.dataclass(frozen=True)
class TableConfig(ViTConfig):
  def build(self, num_classes):
    return Table()


def test_no_gradient_comes_from_other_patches(monkeypatch):
  """Only what is left in place, or put in another's, has some."""
  monkeypatch.setattr(models, "build", lambda model, n: model.build(n))
  learner = MaskedPatch(target="small").make(
    TableConfig(variant="B/8", width=8), RunShape(10, (32, 32)), {}
  )
  images = jax.random.bits(jax.random.key(0), (1, 32, 32, 3), jnp.uint8)
  init = jax.jit(learner.module.init)
  params = init(jax.random.key(0), normalise(images))["params"]
  params = jax.tree.map(  # but for the head's zeros
    lambda x: jax.random.normal(jax.random.key(1), x.shape), params
  )
  rng, seen = jax.random.key(7), set()

  @jax.jit
  def grads_of(record):
    batch = {"image": images, "mask": jnp.ones(1, bool), "index": record}
    return jax.grad(lambda p: learner.loss(p, batch, rng, 0)[0])(params)

  @jax.jit
  def draw(record):
    return lib.draw(jax.random.fold_in(rng, 1), record, 16)

  for record in jnp.arange(20)[:, None]:
    grads = jax.device_get(grads_of(record))
    plan = jax.device_get(draw(record))
    want = np.zeros(16, bool)
    want[plan.sources[~plan.is_masked]] = True
    got = np.any(grads["tokens"].reshape(16, 8) != 0, axis=1)
    np.testing.assert_array_equal(got, want)
    has_mask = np.any(grads["masked_patch"]["mask_token"] != 0)
    assert has_mask == plan.is_masked.any()
    seen.add(want.sum())
  assert len(seen) > 2  # none, one, several


# The loss, and the step.


# SGD: Adam divides by gradients that are nothing but rounding.
SGD = dict(optim__name="sgd", optim__lr=0.1)
DROPOUT = {"mean_color": 0.1, "small": 0.0, "pixels": 0.1}
CELLS = {"mean_color": 1, "small": 4}


@functools.cache
def trained(target):
  """Three steps on one device."""
  dropout = DROPOUT[target]
  parts = tiny.Parts(config(target, **SGD, model__dropout=dropout), ONE)
  return parts, *parts.run(3)


def _corrupted(parts, number):
  """The plan of a step, and what it corrupts, in the rows that count."""
  root = jax.random.fold_in(jax.random.key(parts.config.seed), 1)
  key = jax.random.fold_in(jax.random.fold_in(root, number), 1)
  plan = lib.draw(key, jnp.arange(15), 4)
  images = jnp.asarray(tiny.batch(number, parts.config)["image"][:15])
  return plan, images, lib.chosen(lib.patches_of(images, 8), plan.places)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["small", "mean_color"])
def test_untrained_all_colors_are_as_likely(target):
  """A head of zeros; it says color 0, which is the first of equal ones."""
  parts, _, metrics = trained(target)
  assert metrics[0]["loss"] == pytest.approx(np.log(512), rel=1e-6)
  _, _, patches = _corrupted(parts, 0)
  want = float(jnp.mean(lib.colors(patches, CELLS[target]) == 0))
  assert metrics[0]["accuracy"] == pytest.approx(want, rel=1e-6)
  assert metrics[2]["loss"] < metrics[0]["loss"] - 0.01


@pytest.mark.slow
def test_untrained_pixels_are_grey():
  parts, _, metrics = trained("pixels")
  want = float(jnp.mean(normalise(_corrupted(parts, 0)[2]) ** 2))
  # Sums of 5,760 terms in another order.
  assert metrics[0]["loss"] == pytest.approx(want, rel=1e-5)
  assert "accuracy" not in metrics[0]
  assert metrics[2]["loss"] < metrics[0]["loss"] - 0.01


def predict(parts, params, images, plan):
  apply = jax.jit(parts.model.apply, static_argnames="method")
  return apply({"params": params}, images, plan, None, method="predict_patches")


def test_the_loss_written_out():
  """After three updates, from what the module predicts at the places."""
  parts, state, _ = trained("small")
  plan, images, patches = _corrupted(parts, 3)
  result = predict(parts, state.params, normalise(images), plan)
  log_p = jax.nn.log_softmax(result.reshape(15, 2, 16, 512))
  picked = jnp.take_along_axis(log_p, lib.colors(patches, 4)[..., None], -1)
  state = jax.tree.map(jnp.copy, state)  # the step donates it
  _, (metrics,) = parts.run(1, state)
  # Sums of 480 terms in another order.
  assert metrics["loss"] == pytest.approx(-float(picked.mean()), rel=1e-5)


def test_what_is_left_is_predicted_from_its_own_encoding():
  """Behind the class token: patch i is token i + 1 of the whole network."""
  parts, state, _ = trained("small")
  params, images = state.params, normalise(_corrupted(parts, 0)[1])
  places = jnp.tile(jnp.array([[2, 0]]), (15, 1))
  plan = lib.Plan(places, places, jnp.zeros((15, 2), bool))
  result = predict(parts, params, images, plan)
  _, out = jax.jit(parts.model.apply)({"params": params}, images)
  own = jax.device_get(params["masked_patch"]["head"])
  encoded = np.asarray(out["encoded"])[:, [3, 1]]
  want = encoded @ own["kernel"] + own["bias"]
  # One product of 32 terms, maybe in another order.
  np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)


def test_what_is_left_is_behind_registers_and_class_token():
  changed = dict(name="modern", variant="B/8", registers=3, rope="dinov3")
  model = model_config(**changed, width=32, depth=1, mlp_dim=32, num_heads=2)
  module = MaskedPatch().make(model, RunShape(10, (16, 16)), {}).module
  images = normalise(jnp.asarray(tiny.batch(0, tiny.config())["image"]))
  params = jax.jit(module.init)(jax.random.key(0), images)["params"]
  own = jax.random.normal(jax.random.key(1), (32, 512))
  params["masked_patch"]["head"]["kernel"] = own
  places = jnp.tile(jnp.array([[2, 0]]), (len(images), 1))
  plan = lib.Plan(places, places, jnp.zeros(places.shape, bool))
  apply = jax.jit(module.apply, static_argnames="method")
  got = apply({"params": params}, images, plan, None, method="predict_patches")
  _, out = apply({"params": params}, images)
  want = out["encoded"][:, jnp.array([1 + 3 + 2, 1 + 3])] @ own
  # One product of 32 terms, maybe in another order.
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  "target, changes",
  [
    pytest.param(
      "mean_color",
      dict(mesh__fsdp=2, mesh__tensor=2, optim__microbatch=1),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "small",
      dict(optim__microbatch=3, mesh__data=8),
      marks=pytest.mark.nightly,
    ),
    pytest.param(
      "small",
      dict(mesh__fsdp=4, model__scan=True, model__remat="full"),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "pixels", dict(mesh__fsdp=8, mesh__data=1), marks=pytest.mark.nightly
    ),
  ],
  ids=str,
)
def test_equal_on_any_mesh_and_in_microbatches(target, changes):
  one, _, want = trained(target)
  changes = changes | SGD | {"model__dropout": DROPOUT[target]}
  parts = tiny.Parts(config(target, **changes))
  # The same initial weights, whichever way the blocks are stored.
  params = jax.device_get(one.state().params)
  if parts.config.model.scan:
    params = stack_blocks(params, ViTConfig)
  state = parts.state()
  put = lambda new, old: jax.device_put(new, old.sharding)
  state = state.replace(params=jax.tree.map(put, params, state.params))
  _, got = parts.run(3, state)
  for a, b in zip(got, want, strict=True):
    assert a == pytest.approx(b, rel=1e-5)


def test_its_own_head_is_split_like_any():
  parts = tiny.Parts(config(mesh__fsdp=2, mesh__tensor=2))
  kernel = parts.shapes.params["masked_patch"]["head"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (16, 256)


# What it leaves to others.


def _paths(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves
  }


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["token", "gap", "map"])
def test_the_network_keeps_its_paths_and_its_initial_values(pool):
  made = config(model__pool=pool, model__pre_logits=True)
  module = made.objective.make(made.model, RunShape(10, (16, 16)), {}).module
  images = jnp.zeros((1, 16, 16, 3))
  network = build(made.model, 0)
  rng = jax.random.key(0)
  want = jax.jit(network.init)(rng, images)["params"]
  got = dict(jax.jit(module.init)(rng, images)["params"])
  own = got.pop("masked_patch")
  assert _paths(own) == {"mask_token", "head/kernel", "head/bias"}
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Four steps on digits, scored few-shot while it trains."""
  ops = "decode|resize(16)"
  few = {"kind": "fewshot", "ops": ops, "train_split": "train[:160]"}
  few |= {"split": "test[:100]", "shots": (5,), "every_steps": 2}
  values = to_dict(config(total_steps=4, model__dropout=0.1))
  values["data"] |= {"dataset": "digits", "ops": ops}
  values["evals"] = {"few": few}
  workdir = str(tmp_path_factory.mktemp("masked"))
  made, errors = vit_jax.config.build(values)
  assert not errors
  return workdir, made, train.train_and_evaluate(made, workdir)


@pytest.mark.slow
def test_few_shot_while_it_trains(run):
  workdir, _, state = run
  assert int(state.step) == 4
  rows = read_metrics(workdir)
  scores = {r["step"]: r["few/5shot"] for r in rows if "few/5shot" in r}
  assert list(scores) == [2, 4] and all(0 < s < 1 for s in scores.values())
  assert all(0 <= r["train/accuracy"] <= 1 for r in rows if "train/loss" in r)


OWN = tuple(
  f"masked_patch/{n}" for n in ("head/bias", "head/kernel", "mask_token")
)


@pytest.mark.slow
def test_its_checkpoint_is_loaded_without_its_own(run):
  workdir, _, state = run
  vit = vit_jax.load(workdir, verbose=False)
  assert vit.report.ignored == OWN and not vit.report.reinitialised
  assert vit.num_classes == 0 and vit.class_names is None
  want = {k: v for k, v in state.params.items() if k != "masked_patch"}
  jax.tree.map(np.testing.assert_array_equal, vit.params, want)
  features, _ = vit(np.zeros((2, 16, 16, 3), np.float32))
  assert features.shape == (2, 32)


@pytest.mark.slow
def test_its_checkpoint_starts_a_fine_tuning(run):
  workdir, made, state = run
  fine = dataclasses.replace(tiny.config(), init=workdir, data=made.data)
  params, report = run_checks.setup(fine).fitted_weights()
  assert report.ignored == OWN
  assert set(report.reinitialised) == {"head/kernel", "head/bias"}
  np.testing.assert_array_equal(
    params["embedding"]["kernel"], state.params["embedding"]["kernel"]
  )


@pytest.mark.slow
def test_it_starts_from_any_weights(run):
  workdir, made, state = run
  result = weights.read(workdir)

  def adapted(target, params):
    parts = tiny.Parts(config(target), ONE)
    other = dataclasses.replace(result, params=params)
    return weights.adapt(other, parts.shapes.params, made.model, (16, 16))

  params, report = adapted("mean_color", result.params)
  assert not report.ignored and not report.reinitialised
  token = params["masked_patch"]["mask_token"]
  np.testing.assert_array_equal(
    token, state.params["masked_patch"]["mask_token"]
  )
  for target, theirs in (
    ("small", result.params),  # of another shape
    ("mean_color", {k: v for k, v in result.params.items() if k not in OWN}),
  ):
    params, report = adapted(target, theirs)
    assert report.reinitialised == OWN and not report.ignored
    assert params["masked_patch"]["mask_token"] is None


# Words.


@pytest.mark.parametrize(
  "changes, text",
  [
    (tiny.RESNET, "config.model.variant: got 'R26x0.5', expected a model"),
    (dict(data__ops="decode|resize(8)"), "expected 2 patches of 8 pixels"),
    (
      dict(model__pool="map"),
      "config.model.pool: got 'map', expected no layer",
    ),
    (dict(model__pre_logits=True), "config.model.pre_logits: got True, "),
    (
      dict(model__name="modern", model__projection=8),
      "config.model.projection: got 8, expected no layer",
    ),
    (
      dict(model__name="modern", model__final_norm="pooled"),
      "config.model.final_norm: got 'pooled', expected no layer",
    ),
    (
      dict(
        model__variant="Ti/6", data__ops="decode|resize(12)", target="small"
      ),
      "config.objective.target: got 'small', expected another",
    ),
  ],
  ids=lambda v: None if isinstance(v, str) else next(iter(v)),
)
def test_models_that_it_cannot_train(changes, text):
  (error,) = errors_of(**changes)
  assert text in error


@pytest.mark.slow
def test_a_run_with_layers_that_nothing_trains_goes_on_and_is_scored(tmp_path):
  c = tiny.config(data__dataset="digits", model__pool="map")
  c = dataclasses.replace(c, objective=MaskedPatch())
  with pytest.raises(ConfigError, match="expected no layer"):
    run_checks.setup(c, str(tmp_path))
  parts = tiny.Parts(c, ONE)
  saver = checkpointer.Checkpointer(str(tmp_path), c.checkpoint)
  saver.save_now(2, parts.state(), {"step": 2, "config": to_dict(c)})
  saver.close()
  assert run_checks.setup(c, str(tmp_path)).start == 2
  run_checks.setup(c, scored_weights=weights.read(str(tmp_path)))


def test_a_head_that_is_not_trained_is_not_scored():
  evals = {"val": {"kind": "classification", "ops": "decode|resize(16)"}}
  made, _ = vit_jax.config.build(to_dict(config()) | {"evals": evals})
  with pytest.raises(ConfigError, match="evals.val.kind: got 'classification'"):
    run_checks.setup(dataclasses.replace(made, fake_data=True))


def test_options_of_another_objective_are_reported():
  values = to_dict(config())
  values["objective"] |= {"label_smoothing": 0.1, "target": "colour"}
  _, errors = vit_jax.config.build(values)
  text = "\n".join(errors)
  assert "config.objective.label_smoothing: got 0.1, expected" in text
  assert "config.objective.target: got 'colour', expected one of" in text
