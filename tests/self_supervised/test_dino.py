"""DINO: the loss as the authors', a whole step, meshes, resumed runs."""

import dataclasses
import functools
import pathlib
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import vit_jax
from vit_jax import run_checks, sharding, step, step_checks, train
from vit_jax.batch import normalise
from vit_jax.callbacks import Callback
from vit_jax.checkpointing import resume_rules
from vit_jax.commands import convert as convert_command
from vit_jax.config import ConfigError, checks, to_dict
from vit_jax.objectives import Classification
from vit_jax.self_supervised.dino import DINO
from vit_jax.writers.metric_writer import read_metrics

FILE = np.load(pathlib.Path(__file__).parents[1] / "data" / "ssl_dino.npz")
ONE, FOUR = jax.devices()[:1], jax.devices()[:4]
SMALL = DINO(
  prototypes=24,
  hidden=16,
  bottleneck=8,
  local_crops=3,
  local_ops="decode|resize(8)",
  temperature_steps=3,
  teacher_temperature_start=0.02,
)


def config(objective=SMALL, **changes):
  changes = {
    **dict(model__variant="Ti/4", model__depth=1, data__batch_size=8),
    **changes,
  }
  made = tiny.config(**changes)
  return dataclasses.replace(made, objective=objective)


def batch(seed, cfg):
  """Noise of several sizes; the last row is masked."""
  rng, rows = np.random.default_rng(seed), cfg.data.batch_size
  crops = {
    name: rng.integers(0, 256, (rows, *shape), np.uint8)
    for name, shape in cfg.view_shapes.items()
  }
  return {
    **crops,
    "label": np.arange(rows, dtype=np.int32) % 3 - 1,
    "mask": np.arange(rows) < rows - 1,
    "index": np.arange(rows, dtype=np.int64) + 5,
  }


class Parts(tiny.Parts):
  def __init__(self, cfg, devices=ONE):
    self.config = cfg
    self.mesh = sharding.make_mesh(cfg.mesh, devices)
    shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), cfg.total_steps)
    self.trainer = step.assemble(cfg, shape, self.mesh)
    self.train_step = self.trainer.train_step

  def run(self, num_steps, state=None):
    state = self.state() if state is None else state
    metrics = []
    for i in range(int(state.step), int(state.step) + num_steps):
      rows = sharding.to_global(batch(i, self.config), self.mesh)
      state, values = self.train_step(state, rows)
      metrics.append({k: float(v) for k, v in values.items()})
    return state, metrics


@functools.partial(jax.jit, static_argnums=0)
def _apply(module, params, images):
  return module.apply({"params": params}, images, None, method="scores")


def _scores(parts, params, crops):
  """Scores and vectors of crops [b, v, h, w, c], by a direct call."""
  images = jnp.asarray(normalise(crops.reshape(-1, *crops.shape[2:])))
  results = _apply(parts.trainer.module, params, images)
  return tuple(
    np.asarray(x, "d").reshape(*crops.shape[:2], -1) for x in results
  )


def _softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def one():
  parts = Parts(config())
  start = jax.device_get(parts.state())
  state, metrics = parts.run(3)
  return parts, start, jax.device_get(state), metrics


def test_a_step_is_the_formula(one):
  """The second step: loss, metrics, centre, from scores of the first state."""
  parts, _, _, metrics = one
  state, _ = parts.run(1)
  before = jax.device_get(state)
  data = batch(1, parts.config)
  large = np.stack([data["global_1"], data["global_2"]], 1)
  valid = data["mask"]
  teacher, vectors = _scores(parts, before.averages["ema"], large)
  centre = before.memory["objective"]["centre"]
  # The temperature rises from 0.02 to 0.04 in 3 steps: this is the second.
  p = _softmax((teacher - centre) / 0.03)
  student = [
    _scores(parts, before.params, crops)[0] for crops in (large, data["local"])
  ]
  log_q = np.log(_softmax(np.concatenate(student, 1) / 0.1))
  pairs = [(t, s) for t in range(2) for s in range(5) if s != t]
  losses = [-(p[:, t] * log_q[:, s]).sum(-1) for t, s in pairs]
  want = np.mean(losses, 0)[valid].mean()
  assert metrics[1]["loss"] == pytest.approx(want, rel=1e-5)
  entropies = -(p * np.log(np.maximum(p, 1e-300))).sum(-1).mean(1)
  assert metrics[1]["teacher_entropy"] == pytest.approx(
    entropies[valid].mean(), rel=1e-4
  )
  used = p[valid].mean((0, 1))
  kl = np.log(24) + (used * np.log(np.maximum(used, 1e-300))).sum()
  assert metrics[1]["teacher_kl"] == pytest.approx(kl, rel=1e-4)
  unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
  counts = valid & (data["label"] >= 0)
  near = unit[:, 0] @ unit[:, 1].T
  near[:, ~counts] = -2
  np.fill_diagonal(near, -2)
  right = data["label"][near.argmax(1)] == data["label"]
  assert metrics[1]["online_knn"] == pytest.approx(right[counts].mean())
  state, _ = parts.run(1, state)
  np.testing.assert_allclose(
    state.memory["objective"]["centre"],
    0.9 * centre + 0.1 * teacher[valid].mean((0, 1)),
    atol=1e-6,
  )


def test_the_teacher_moves_along_a_cosine_and_is_evaluated(one):
  parts, start, _, _ = one
  mean = start.params
  state = parts.state()
  for s in range(2):
    state, _ = parts.run(1, state)
    momentum = 1 - 0.004 * (1 + np.cos(np.pi * s / 20)) / 2
    mean = jax.tree.map(
      lambda a, b, m=momentum: m * a + (1 - m) * b, mean, state.params
    )
  for got in (state.averages["ema"], state.eval_params):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, mean
    )


@pytest.mark.slow
def test_without_centring_it_collapses():
  """All targets become the same prototype, and the metrics show it."""
  objective = dataclasses.replace(
    SMALL,
    centring="none",
    temperature_steps=0,
    teacher_temperature_start=None,
    teacher_momentum=0.9,
  )
  _, metrics = Parts(config(objective, optim__lr=3e-3)).run(20)
  assert metrics[-1]["loss"] < 0.05 and metrics[-1]["teacher_entropy"] < 0.05
  assert metrics[-1]["teacher_kl"] == pytest.approx(np.log(24), rel=0.02)


def test_schedules_are_the_authors():
  """Momentum and temperature of DINOv2's short recipe, at every position."""
  stored = lambda name: FILE[f"schedule/vitl16_short/{name}"]
  objective = DINO(
    teacher_momentum=0.992,
    teacher_temperature=0.07,
    teacher_temperature_start=0.04,
    temperature_steps=30 * 1250,
  )
  position = stored("position")
  np.testing.assert_allclose(
    objective.momentum(125_000)(position), stored("teacher_momentum"), atol=6e-8
  )
  np.testing.assert_allclose(
    objective.temperature(position), stored("teacher_temp"), rtol=2e-7
  )


MESHES = {
  "mesh": (FOUR, dict(mesh__data=2, mesh__fsdp=2)),
  "microbatches": (FOUR, dict(mesh__data=2, optim__microbatch=2, mesh__fsdp=2)),
  "eight": (jax.devices(), dict(mesh__data=4, mesh__fsdp=2)),
  "tensor": (FOUR, dict(mesh__data=2, mesh__tensor=2)),
}


def _close(one, other, factor=1.0):
  (state, metrics), (others_state, others) = one, other
  for i, (a, b) in enumerate(zip(metrics, others, strict=True)):
    for key in a:
      # float32, in another order of sums; where a gradient is near zero, Adam
      # makes a step of full size, 1e-2, of its rounding.
      rtol = factor * (2e-5, 1e-4, 5e-4)[i]
      np.testing.assert_allclose(a[key], b[key], rtol=rtol, err_msg=key)
  for name in state.memory.get("objective", {}):
    np.testing.assert_allclose(
      state.memory["objective"][name],
      others_state.memory["objective"][name],
      atol=2e-6,
    )


@pytest.mark.parametrize(
  "name",
  ["microbatches"]
  + [
    pytest.param(n, marks=pytest.mark.slow)
    for n in MESHES
    if n != "microbatches"
  ],
)
def test_other_devices_give_the_same(name, one):
  devices, changes = MESHES[name]
  state, metrics = Parts(config(**changes), devices).run(3)
  _close(one[2:], (jax.device_get(state), metrics))


def test_the_head_is_split_where_its_sizes_allow():
  """An odd number of prototypes is left whole along `tensor`."""
  mesh = dict(mesh__fsdp=2, mesh__tensor=2)
  for number, part in ((24, (4, 12)), (25, (4, 25))):
    objective = dataclasses.replace(SMALL, prototypes=number)
    parts = Parts(config(objective, **mesh), FOUR)
    state = parts.trainer.state
    for tree in (state.params, state.averages["ema"]):
      kernel = tree["dino"]["prototypes"]["kernel"]
      assert kernel.sharding.shard_shape(kernel.shape) == part


OTHERS = {
  "sinkhorn": (dict(centring="sinkhorn"), {}),
  "scan": (
    {},
    dict(model__depth=2, model__scan=True, model__stochastic_depth=0.5),
  ),
  "gain": (dict(norm_last_layer=False, centring="none"), {}),
  "modern": (
    {},
    dict(
      model__name="modern",
      model__rope="dinov3",
      model__posemb="none",
      model__registers=2,
      model__layer_scale=0.1,
    ),
  ),
  "lora": ({}, dict(lora__rank=2)),
  "freeze": (
    {},
    dict(model__depth=2, optim__freeze=("embedding/*", "*/encoderblock_0/*")),
  ),
  "resnet": ({}, dict(model__depth=None) | tiny.RESNET),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_targets_on_devices(name):
  options, changes = OTHERS[name]
  objective = dataclasses.replace(SMALL, **options)
  # The ResNet's first gradient has a norm of 5,000: the loss moves by that many
  # times the rounding of its features, and later steps by more.
  number, factor = (1, 20.0) if name == "resnet" else (3, 1.0)
  runs = [
    Parts(config(objective, **changes, **mesh), devices).run(number)
    for devices, mesh in ((ONE, {}), MESHES["microbatches"])
  ]
  _close(*((jax.device_get(s), metrics) for s, metrics in runs), factor)


class Data:
  """Batches of crops in memory, for `train_and_evaluate`."""

  num_examples, num_classes, class_names = 160, 3, None

  def __init__(self, cfg):
    self.config = cfg

  def batches(self, start_step, process_index, process_count):
    step = start_step
    while True:
      yield batch(step, self.config)
      step += 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns config, folder and state of a run of six steps."""
  folder = tmp_path_factory.mktemp("dino")
  cfg = config(
    total_steps=6,
    checkpoint__every_steps=2,
    log_steps=1,
    model__depth=2,
    model__stochastic_depth=0.2,
    optim__weight_decay=0.04,
    optim__weight_decay_end=0.4,
    optim__clip_groups=("each",),
    optim__lr_zero=("dino/prototypes/*=2",),
  )
  state = train.train_and_evaluate(cfg, str(folder), Data(cfg))
  return cfg, folder, jax.device_get(state)


@pytest.mark.slow
def test_a_run_that_ends_anywhere_resumes_to_the_bit(run, tmp_path):
  """Parameters, optimizer, teacher, centre, and metrics."""
  cfg, folder, want = run
  place = random.Random(time.time_ns()).randrange(1, 6)
  print(f"ends at {place}")

  class Ends(Callback):
    def on_step(self, step, batch, metrics):
      if step == place:
        raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    train.train_and_evaluate(cfg, str(tmp_path), Data(cfg), callbacks=[Ends()])
  state = train.train_and_evaluate(cfg, str(tmp_path), Data(cfg))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), want)
  rows = [
    {
      r["step"]: {k: v for k, v in r.items() if k in KEYS}
      for r in read_metrics(str(path))
    }
    for path in (folder, tmp_path)
  ]
  assert rows[0] == rows[1] and len(rows[0]) == 6
  assert set(rows[0][3]) == KEYS


KEYS = {
  *("train/loss", "train/teacher_entropy", "train/teacher_kl"),
  *("train/online_knn", "train/grad_norm"),
}


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
  "options, changes, text",
  [
    (
      dict(local_ops="decode|resize(10)"),
      {},
      "local_ops: got 'crops of 10x10 pixels', expected multiples of 4",
    ),
    (
      dict(second_ops="decode|resize(8)"),
      {},
      "second_ops: got 'crops of 8x8 pixels', expected crops of 16x16",
    ),
    (
      {},
      dict(model__posemb="learn2d"),
      "local_ops: got 'crops of 8x8 pixels', expected 16x16",
    ),
    (dict(teacher_temperature=0.0), {}, "teacher_temperature: got 0.0"),
    (
      dict(temperature_steps=0),
      {},
      "teacher_temperature_start: got '0.02 with temperature_steps=0'",
    ),
  ],
  ids=lambda v: None if isinstance(v, str) else next(iter(v), None),
)
def test_what_does_not_fit_is_an_error(options, changes, text):
  objective = dataclasses.replace(SMALL, **options)
  (error,) = checks.errors(config(objective, **changes))
  assert text.replace("'", "") in error.replace("'", "")


def test_fewer_images_than_a_batch_are_an_error(tmp_path):
  cfg = config(data__batch_size=16)
  data = Data(cfg)
  data.num_examples = 15
  with pytest.raises(ConfigError, match="at most the 15 images of 'Data'"):
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


def test_layers_that_it_does_not_train_are_errors():
  model = tiny.config(model__pre_logits=True).model
  (error,) = SMALL.start_errors(model)
  assert "config.model.pre_logits: got True" in error
  model = tiny.config(
    model__name="modern", model__class_token=True, model__pool="map"
  ).model
  (error,) = SMALL.start_errors(model)
  assert "config.model.pool" in error
  assert not [*SMALL.start_errors(tiny.config(model__pool="map").model)]


def test_flops_count_all_crops_and_the_teacher():
  cfg = config()
  head = SMALL.head(cfg.model)
  one, small = (cfg.model.forward_macs((n, n), 0) for n in (16, 8))
  macs = 32 * 16 + 16 * 16 + 16 * 8 + 8 * 24
  want = 6 * (2 * (one + macs) + 3 * (small + macs)) + 2 * 2 * (one + macs)
  assert SMALL.flops(cfg.model, (16, 16), head) == want


def test_rows_are_mixed_only_over_the_whole_batch():
  """The checks of objectives from outside find nothing."""
  for centring in ("mean", "sinkhorn"):
    objective = Outside(**{**dataclasses.asdict(SMALL), "kind": OUTSIDE})
    cfg = config(dataclasses.replace(objective, centring=centring))
    shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 20)
    learner = cfg.objective.make(cfg.model, shape, {})
    assert not step_checks.errors(cfg, shape, learner, ())


OUTSIDE = "test_dino:Outside"


@dataclasses.dataclass(frozen=True)
class Outside(DINO):
  """DINO by its import path."""

  kind: str = OUTSIDE


def test_images_without_classes_have_no_online_score():
  cfg = config()
  shape = step.RunShape(0, (16, 16), 20)
  learner = cfg.objective.make(cfg.model, shape, {})
  rows = batch(0, cfg)
  k = SMALL.prototypes
  rows["targets"] = {"p": jnp.full((8, 2, k), 1 / k)}
  rows["shared"] = {"kl": jnp.zeros(())}
  params = jax.eval_shape(
    learner.module.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3))
  )["params"]
  _, _, named = jax.eval_shape(
    learner.loss, params, rows, jax.random.key(0), jnp.int32(0)
  )
  assert named.keys() == {"teacher_entropy", "teacher_kl"}
