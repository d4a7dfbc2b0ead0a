"""DINO: a step by its formula, schedules, crops, a run, what is refused."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import methods
import numpy as np
import pytest
import tiny
from methods import entropy, softmax

import vit_jax
from vit_jax import run_checks, step, train
from vit_jax.batch import normalise
from vit_jax.callbacks import Callback
from vit_jax.checkpointing import resume_rules
from vit_jax.config import ConfigError, to_dict
from vit_jax.models import build
from vit_jax.objectives import Classification
from vit_jax.self_supervised import heads
from vit_jax.self_supervised.dino import DINO

SMALL = methods.METHODS["dino"]


def config(objective=SMALL, **changes):
  made = methods.config("dino", **changes)
  return dataclasses.replace(made, objective=objective)


@pytest.fixture(scope="module")
def run():
  return methods.Run(config())


def test_a_step_is_the_formula(run):
  """The second step: loss, metrics, centre and teacher, from its start."""
  before, _ = run.steps(1)
  copy = jax.tree.map(jnp.copy, before)  # a step donates its state
  after, (metrics,) = run.steps(1, copy)
  before, after = jax.device_get((before, after))
  data = methods.batch(1, run.config)
  crops = np.stack([data["global_1"], data["global_2"]], 1), data["local"]

  @jax.jit
  def scores(params, crops):
    images = normalise(crops.reshape(-1, *crops.shape[2:]))
    args = {"params": params}, images, None
    found = run.trainer.module.apply(*args, method="scores")
    return [x.reshape(*crops.shape[:2], -1) for x in found]

  float64 = lambda tree: jax.tree.map(lambda x: np.asarray(x, "d"), tree)
  teacher, vectors = float64(scores(before.averages["ema"], crops[0]))
  student = [float64(scores(before.params, x))[0] for x in crops]
  valid, centre = data["mask"], before.memory["objective"]["centre"]
  assert np.abs(centre).max() > 0.01
  # The temperature rises from 0.02 to 0.04 in 3 steps: this is the second.
  p = softmax((teacher - centre) / 0.03)
  log_q = np.log(softmax(np.concatenate(student, 1) / 0.1))
  pairs = [(t, s) for t in range(2) for s in range(5) if s != t]
  losses = [-(p[:, t] * log_q[:, s]).sum(-1) for t, s in pairs]
  want = np.mean(losses, 0)[valid].mean()
  assert metrics["loss"] == pytest.approx(want, rel=1e-5)
  want = entropy(p)[valid].mean()
  assert metrics["teacher_entropy"] == pytest.approx(want, rel=1e-4)
  kl = np.log(24) - entropy(p[valid].mean((0, 1)))
  assert metrics["teacher_kl"] == pytest.approx(kl, rel=1e-4)
  unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
  near = unit[:, 0] @ unit[:, 1].T
  near[:, ~valid] = -2
  np.fill_diagonal(near, -2)
  right = data["label"][near.argmax(1)] == data["label"]
  assert metrics["online_knn"] == pytest.approx(right[valid].mean())
  np.testing.assert_allclose(
    after.memory["objective"]["centre"],
    0.9 * centre + 0.1 * teacher[valid].mean((0, 1)),
    atol=1e-6,
  )
  # The momentum rises along half a cosine; the tolerance is above rounding,
  # and below what one step of the cosine changes.
  momentum = 1 - 0.004 * (1 + np.cos(np.pi / 20)) / 2
  assert after.eval_params is after.averages["ema"]

  def is_mean(got, old, new):
    want = momentum * old + (1 - momentum) * new
    np.testing.assert_allclose(got, want, 2e-7, 2e-8)
    return np.abs(got - old).max()

  moved = jax.tree.map(
    is_mean, after.eval_params, before.averages["ema"], after.params
  )
  assert max(jax.tree.leaves(moved)) > 1e-5


def test_a_skipped_step_keeps_teacher_and_memory(run):
  state, (metrics,) = run.steps(1)
  assert metrics["skipped"] == 0
  kept = jax.device_get((state.averages, state.memory))
  assert all(x.any() for x in jax.tree.leaves(kept))
  nan = jax.tree.map(lambda x: x * np.nan, state.params["embedding"])
  state = state.replace(params={**state.params, "embedding": nan})
  state, (metrics,) = run.steps(1, state)
  assert metrics["skipped"] == 1
  after = (state.averages, state.memory)
  jax.tree.map(np.testing.assert_array_equal, kept, after)


def test_schedules_are_the_authors():
  """Momentum and temperature of DINOv2's short recipe, at every position."""
  recipe = "schedule/vitl16_short"
  stored = lambda name: methods.published()[f"{recipe}/{name}"]
  objective = DINO(
    teacher_momentum=0.992,
    teacher_temperature=0.07,
    teacher_temperature_start=0.04,
    temperature_steps=30 * 1250,
  )
  position = stored("position")
  momentum = objective.momentum(125_000)(position)
  np.testing.assert_allclose(momentum, stored("teacher_momentum"), atol=6e-8)
  temperature = objective.temperature(position)
  np.testing.assert_allclose(temperature, stored("teacher_temp"), rtol=2e-7)


NIGHTLY = pytest.mark.nightly
MODELS = {
  "vit": {},
  "modern": dict(
    model__name="modern",
    model__rope="dinov3",
    model__registers=2,
    model__posemb="none",
  ),
  "map": dict(model__pool="map"),
  "resnet": tiny.RESNET,
}


def network(**changes):
  """Returns a model, its module for crops, and random parameters."""
  model = tiny.config(**changes).model
  head = heads.DINOHead(12, 16, 8, name="dino")
  module = heads.MultiCrop(build(model, 0), head, model, (32, 32))
  return model, module, methods.params_of(module, 32)


@pytest.mark.parametrize(
  "name", ["vit", *(pytest.param(n, marks=NIGHTLY) for n in [*MODELS][1:])]
)
def test_crops_of_two_sizes_pass_one_network(name):
  """The network's parameters are at the root; the vector is what it pools."""
  model, module, params = network(**MODELS[name])
  plain = build(model, 0)
  own = params.pop("dino")
  # Drawn by path and shape: none is elsewhere.
  like = methods.params_of(plain, 32)
  jax.tree.map(np.testing.assert_array_equal, params, like)
  rng = np.random.default_rng(0)
  scores = jax.jit(
    lambda p, x: module.apply({"params": p}, x, None, method="scores")
  )
  for side in (32, 16):
    images = jnp.float32(rng.uniform(-1, 1, (2, side, side, 3)))
    got, vectors = scores({**params, "dino": own}, images)
    assert got.shape == (2, 12) and np.isfinite(got).all()
    if side == 32:
      _, out = jax.jit(plain.apply)({"params": params}, images)
      np.testing.assert_allclose(vectors, out["pooled"], atol=1e-5)


@pytest.mark.slow
def test_each_crop_has_its_own_noise():
  """A crop's noise depends on its record's number and its own, not on rows."""
  _, module, params = network(model__stochastic_depth=0.6, model__dropout=0.3)
  image = np.random.default_rng(0).uniform(-1, 1, (1, 16, 16, 3))
  images = jnp.asarray(np.repeat(image, 6, 0), jnp.float32)
  records = heads.crop_records(jnp.array([5, 9]), 2, 3, 10)
  options = dict(rngs={"dropout": jax.random.key(1)}, method="vectors")
  of_params = {"params": params}
  apply = jax.jit(lambda x, r: module.apply(of_params, x, r, **options))
  vectors = np.asarray(apply(images, records))
  assert len({*vectors[:, 0].tolist()}) == 6
  turned = apply(images, records[::-1])[::-1]
  np.testing.assert_allclose(turned, vectors, atol=1e-6)


class Data(tiny.Data):
  """Batches of crops in memory, for `train_and_evaluate`."""

  def __init__(self, cfg):
    self.config = cfg

  def batches(self, start_step, process_index, process_count):
    for i in itertools.count(start_step):
      yield methods.batch(i, self.config)


@pytest.mark.slow
def test_a_resumed_run_publishes_the_same_bits(tmp_path):
  """Parameters, optimizer, teacher, centre; `load` reads the teacher."""
  cfg = config(
    total_steps=3,
    checkpoint__every_steps=1,
    model__stochastic_depth=0.2,
    optim__weight_decay=0.04,
    optim__weight_decay_end=0.4,
    optim__clip_groups=("each",),
    optim__lr_zero=("dino/prototypes/*=2",),
  )
  want = jax.device_get(train.train_and_evaluate(cfg, str(tmp_path), Data(cfg)))
  for step_after in ("2", "3"):
    shutil.rmtree(tmp_path / "checkpoints" / step_after)
  starts, start = [], Callback()
  start.on_start = lambda step, *_: starts.append(step)
  state = train.train_and_evaluate(
    cfg, str(tmp_path), Data(cfg), callbacks=[start]
  )
  assert starts == [1]
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), want)
  model = vit_jax.load(str(tmp_path), verbose=False)
  teacher = {k: v for k, v in want.averages["ema"].items() if k != "dino"}
  jax.tree.map(np.testing.assert_array_equal, model.params, teacher)
  assert all(name.startswith("dino/") for name in model.report.ignored)
  kernels = (x["embedding"]["kernel"] for x in (want.params, teacher))
  assert np.any(np.not_equal(*kernels))


def test_fewer_images_than_a_batch_are_an_error(tmp_path):
  cfg = config(data__batch_size=16)
  data = Data(cfg)
  data.num_examples = 15
  with pytest.raises(ConfigError, match="15 images"):
    run_checks.setup(cfg, str(tmp_path), data)


def test_another_length_is_another_run():
  """Also with a constant rate, because the momentum follows the length."""
  for changes, objective in (
    ({}, SMALL),
    (dict(optim__weight_decay_end=0.4), Classification()),
  ):
    old = config(objective, optim__schedule="constant", **changes)
    new = dataclasses.replace(old, total_steps=50)
    (change,) = resume_rules.differences(to_dict(old), new)
    assert change.key == "total_steps" and change.rule.makes_another_run


def test_flops_count_all_crops_and_the_teacher():
  cfg = config()
  head = SMALL.head(cfg.model)
  one, small = (cfg.model.forward_macs((n, n), 0) for n in (16, 8))
  macs = 32 * 16 + 16 * 16 + 16 * 8 + 8 * 24
  want = 6 * (2 * (one + macs) + 3 * (small + macs)) + 2 * 2 * (one + macs)
  assert SMALL.flops(cfg.model, (16, 16), head) == want


def test_images_without_classes_have_no_online_score():
  cfg = config()
  learner = cfg.objective.make(cfg.model, step.RunShape(0, (16, 16), 20), {})
  rows = methods.batch(0, cfg)
  p = jnp.full((8, 2, SMALL.prototypes), 1 / SMALL.prototypes)
  rows |= {"targets": {"p": p}, "shared": {"kl": jnp.zeros(())}}
  params = methods.params_of(learner.module)
  _, _, named = jax.eval_shape(
    learner.loss, params, rows, jax.random.key(0), jnp.int32(0)
  )
  assert named.keys() == {"teacher_entropy", "teacher_kl"}
