"""DINO: the loss and the schedules as the authors', a step, what is refused."""

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
from vit_jax import run_checks, step, step_checks, train
from vit_jax.batch import normalise
from vit_jax.callbacks import Callback
from vit_jax.checkpointing import resume_rules
from vit_jax.commands import convert as convert_command
from vit_jax.config import ConfigError, checks, to_dict
from vit_jax.objectives import Classification
from vit_jax.self_supervised.dino import DINO

SMALL = methods.METHODS["dino"]


def config(objective=SMALL, **changes):
  made = methods.config("dino", **changes)
  return dataclasses.replace(made, objective=objective)


@pytest.fixture(scope="module")
def one():
  """The run on one device, and states and metrics of two steps."""
  run = methods.Run(config())
  states, metrics = [run.start()], []
  for _ in range(2):
    copy = jax.tree.map(jnp.copy, states[-1])  # a step donates its state
    state, (values,) = run.steps(1, copy)
    states.append(state)
    metrics.append(values)
  return run, jax.device_get(states), metrics


def test_a_step_is_the_formula(one):
  """The second step: loss, metrics, centre, from scores of its first state."""
  run, (_, before, after), (_, metrics) = one
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


def test_the_teacher_moves_along_a_cosine_and_is_evaluated(one):
  _, states, _ = one
  mean = states[0].params
  for s, state in enumerate(states[1:]):
    momentum = 1 - 0.004 * (1 + np.cos(np.pi * s / 20)) / 2
    mean = jax.tree.map(
      lambda a, b, m=momentum: m * a + (1 - m) * b, mean, state.params
    )
    moved = lambda a, b: np.abs(a - b).max()
    assert max(jax.tree.leaves(jax.tree.map(moved, mean, state.params))) > 1e-3
  for got in (states[2].averages["ema"], states[2].eval_params):
    # Above the rounding, below what one step of the cosine changes.
    close = lambda a, b: np.testing.assert_allclose(a, b, 2e-7, 2e-8)
    jax.tree.map(close, got, mean)


def test_a_skipped_step_keeps_teacher_and_memory(one):
  run, *_ = one
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


def test_the_teacher_is_the_only_average(one):
  run, *_ = one
  optim = dataclasses.replace(run.config.optim, ema_decay=0.9)
  made = dataclasses.replace(run.config, optim=optim)
  (error,) = step_checks.errors(made, run.shape, run.learner, ())
  assert "config.optim.ema_decay" in error


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


def test_the_head_is_split_where_its_sizes_allow():
  """An odd number of prototypes is left whole along `tensor`."""
  mesh = dict(mesh__fsdp=2, mesh__tensor=2)
  for number, part in ((24, (4, 12)), (25, (4, 25))):
    objective = dataclasses.replace(SMALL, prototypes=number)
    state = methods.Run(config(objective, **mesh), 4).trainer.state
    for tree in (state.params, state.averages["ema"]):
      kernel = tree["dino"]["prototypes"]["kernel"]
      assert kernel.sharding.shard_shape(kernel.shape) == part


class Data(tiny.Data):
  """Batches of crops in memory, for `train_and_evaluate`."""

  def __init__(self, cfg):
    self.config = cfg

  def batches(self, start_step, process_index, process_count):
    for i in itertools.count(start_step):
      yield methods.batch(i, self.config)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Config, folder and last state of a run of three steps."""
  folder = tmp_path_factory.mktemp("dino") / "run"
  cfg = config(
    total_steps=3,
    checkpoint__every_steps=1,
    model__stochastic_depth=0.2,
    optim__weight_decay=0.04,
    optim__weight_decay_end=0.4,
    optim__clip_groups=("each",),
    optim__lr_zero=("dino/prototypes/*=2",),
  )
  state = train.train_and_evaluate(cfg, str(folder), Data(cfg))
  return cfg, folder, jax.device_get(state)


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_bits(run, tmp_path):
  """Parameters, optimizer, teacher and centre."""
  cfg, folder, want = run
  workdir = shutil.copytree(folder, tmp_path / "again")
  for step_after in (2, 3):
    shutil.rmtree(workdir / "checkpoints" / str(step_after))
  starts, start = [], Callback()
  start.on_start = lambda step, *_: starts.append(step)
  data = Data(cfg)
  state = train.train_and_evaluate(cfg, str(workdir), data, callbacks=[start])
  assert starts == [1]
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), want)


@pytest.mark.slow
def test_the_published_model_is_the_teacher(run, tmp_path):
  """`load` and `convert` read it, without the head."""
  _, folder, state = run
  model = vit_jax.load(str(folder), verbose=False)
  want = {k: v for k, v in state.averages["ema"].items() if k != "dino"}
  jax.tree.map(np.testing.assert_array_equal, model.params, want)
  assert all(name.startswith("dino/") for name in model.report.ignored)
  assert np.any(
    state.params["embedding"]["kernel"] != want["embedding"]["kernel"]
  )
  out = str(tmp_path / "model.npz")
  convert_command.main([str(folder), out, "--to=npz"])
  again = vit_jax.load(out, verbose=False)
  jax.tree.map(np.testing.assert_array_equal, again.params, want)


@pytest.mark.parametrize(
  "option, options, changes",
  [
    ("local_ops: got crops of 10x10", dict(local_ops="decode|resize(10)"), {}),
    ("second_ops: got crops of 8x8", dict(second_ops="decode|resize(8)"), {}),
    ("local_ops: got crops of 8x8", {}, dict(model__posemb="learn2d")),
    ("teacher_temperature: got 0.0", dict(teacher_temperature=0.0), {}),
    ("teacher_temperature_start: got 0.02", dict(temperature_steps=0), {}),
    ("model.pre_logits", {}, dict(model__pre_logits=True)),
    ("model.pool", {}, dict(model__name="modern", model__pool="map")),
  ],
)
def test_what_does_not_fit_is_an_error(option, options, changes):
  objective = dataclasses.replace(SMALL, **options)
  (error,) = checks.errors(config(objective, **changes))
  assert option in error.replace("'", "")


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
  shape = step.RunShape(0, (16, 16), 20)
  learner = cfg.objective.make(cfg.model, shape, {})
  rows = methods.batch(0, cfg)
  k = SMALL.prototypes
  rows["targets"] = {"p": jnp.full((8, 2, k), 1 / k)}
  rows["shared"] = {"kl": jnp.zeros(())}
  params = methods.params_of(learner.module)
  _, _, named = jax.eval_shape(
    learner.loss, params, rows, jax.random.key(0), jnp.int32(0)
  )
  assert named.keys() == {"teacher_entropy", "teacher_kl"}
