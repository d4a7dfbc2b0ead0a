"""DINOv2: a step by its formula, on any mesh, resumed and loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import sharding, step
from vit_jax.batch import normalise
from vit_jax.self_supervised import block_masks, patch_scores
from vit_jax.self_supervised.dinov2 import DINOv2

ONE, FOUR, EIGHT = (jax.devices()[:n] for n in (1, 4, 8))
SIZE, SMALL, LOCAL = 32, 16, 3
OPS = f"decode|resize({SIZE})"
OPTIONS = dict(
  prototypes=24,
  hidden=16,
  bottleneck=8,
  local_ops=f"decode|resize({SMALL})",
  local_crops=LOCAL,
  koleo_group=8,
)


def config(objective=None, **changes):
  made = tiny.config(
    **{
      "model__name": "modern",
      "model__variant": "Ti/8",
      "model__layer_scale": 0.1,
      "model__registers": 1,
      "model__depth": 1,
      "data__ops": OPS,
      # Adam would divide gradients that are only rounding by their own size.
      "optim__name": "sgd",
      "optim__momentum": 0.5,
      "optim__lr": 0.05,
      **changes,
    }
  )
  return dataclasses.replace(
    made, objective=DINOv2(**OPTIONS | (objective or {}))
  )


def batch(seed, made):
  """Crops of noise, brighter for higher classes; two rows do not count."""
  rng = np.random.default_rng(seed)
  rows = made.data.batch_size
  label = rng.integers(0, tiny.NUM_CLASSES, rows).astype(np.int32)

  def crops(*shape):
    light = 10 * label.reshape(-1, *(1,) * len(shape))
    return (rng.integers(0, 150, (rows, *shape)) + light).astype(np.uint8)

  return {
    "global_1": crops(SIZE, SIZE, 3),
    "global_2": crops(SIZE, SIZE, 3),
    "local": crops(LOCAL, SMALL, SMALL, 3),
    "label": label,
    "mask": ~np.isin(np.arange(rows), [3, rows - 1]),
    "index": rng.permutation(1000)[:rows].astype(np.int64),
  }


class Parts:
  """A run on some devices, with batches of `batch`."""

  def __init__(self, made, devices):
    self.config = made
    self.mesh = sharding.make_mesh(made.mesh, devices)
    shape = step.RunShape(tiny.NUM_CLASSES, (SIZE, SIZE), made.total_steps)
    self.learner = made.objective.make(made.model, shape, {})
    self.trainer = step.assemble(made, shape, self.mesh, (), self.learner)

  def run(self, num_steps, state=None):
    state = self.trainer.init_state() if state is None else state
    metrics = []
    for i in range(int(state.step), int(state.step) + num_steps):
      given = sharding.to_global(batch(i, self.config), self.mesh)
      state, values = self.trainer.train_step(state, given)
      metrics.append({k: float(v) for k, v in values.items()})
    return state, metrics


def spread(state):
  """Kernels ten times as large, so that vectors of images differ."""

  def larger(path, x):
    return 10 * x if getattr(path[-1], "key", None) == "kernel" else x

  params = jax.tree_util.tree_map_with_path(larger, state.params)
  means = {k: jax.tree.map(jnp.copy, params) for k in state.averages}
  return state.replace(params=params, averages=means)


def run(devices, num_steps=3, objective=None, **changes):
  """Returns state and metrics after some steps."""
  parts = Parts(config(objective, **changes), devices)
  state = jax.jit(spread)(parts.trainer.init_state())
  state, metrics = parts.run(num_steps, state)
  return jax.device_get(state), metrics


def assert_close(one, other, rtol=2e-5):
  """float32, in another order of sums, in three steps."""
  (state, metrics), (others_state, others) = one, other
  for a, b in zip(metrics, others, strict=True):
    for key in a:
      np.testing.assert_allclose(a[key], b[key], rtol=rtol, err_msg=key)
  for a, b in zip(
    jax.tree.leaves((state.memory, state.averages)),
    jax.tree.leaves((others_state.memory, others_state.averages)),
    strict=True,
  ):
    np.testing.assert_allclose(a, np.reshape(b, a.shape), atol=5e-6)


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def entropy(p):
  return -(p * np.log(np.maximum(p, 1e-300))).sum(-1)


@pytest.fixture(scope="module")
def one():
  return run(ONE)


def test_a_step_is_the_formula(one):
  """Loss, its parts and the centres, computed in float64 by loops."""
  _, (metrics, *_) = one
  made = config()
  parts = Parts(made, ONE)
  state = jax.jit(spread)(parts.trainer.init_state())
  given, options = batch(0, made), made.objective
  rows, grid = made.data.batch_size, (4, 4)

  # Which patches are masked: by the step's key, record and crop.
  key = jax.random.fold_in(jax.random.key(made.seed), 1)
  key = jax.random.fold_in(jax.random.fold_in(key, 0), 1)
  key_order, key_blocks = jax.random.split(key)
  ratio = block_masks.ratios(
    key_order, jnp.arange(2 * rows), 2 * rows, 0.5, 0.1, 0.5
  )
  numbers = given["index"][:, None] * (2 + LOCAL) + np.arange(2)
  keys = jax.vmap(lambda n: jax.random.fold_in(key_blocks, n))(numbers.ravel())
  masks = jax.tree.map(
    lambda x: np.asarray(x).reshape(rows, 2, *x.shape[1:]),
    block_masks.draw(keys, ratio, grid, 0.5),
  )
  assert 0 < masks.masked.any(2).sum() <= rows

  @jax.jit
  def scores(crops, masked):
    """Scores and class token; scores of all patches, by the module."""
    every = jnp.tile(jnp.arange(16), (len(crops), 1))
    seen = parts.learner.module.apply(
      {"params": state.params},
      normalise(crops),
      None,
      every,
      masked,
      method="crops",
    )
    return seen.scores, seen.vectors, seen.chosen @ seen.prototypes

  def float64(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]

  no_mask = jnp.zeros((rows, 16), bool)
  names = ("global_1", "global_2")
  teacher = [float64(*scores(given[n], no_mask)) for n in names]
  student = [
    float64(*scores(given[n], jnp.asarray(masks.masked[:, v])))
    for v, n in enumerate(names)
  ]
  local, _ = parts.learner.module.apply(
    {"params": state.params},
    jnp.asarray(normalise(given["local"].reshape(-1, SMALL, SMALL, 3))),
    None,
    method="scores",
  )
  (local,) = float64(local.reshape(rows, LOCAL, -1))
  valid = given["mask"]
  t, s = options.teacher_temperature, options.student_temperature

  def cross_entropy(z_teacher, z_student):
    return -(softmax(z_teacher / t) * np.log(softmax(z_student / s))).sum(-1)

  pairs = [
    *(cross_entropy(teacher[i][0], student[1 - i][0]) for i in (0, 1)),
    *(
      cross_entropy(z, local[:, j]) for z, _, _ in teacher for j in range(LOCAL)
    ),
  ]
  dino = np.mean(pairs, 0)[valid].mean()
  np.testing.assert_allclose(metrics["dino_loss"], dino, rtol=1e-5)

  ibot = np.zeros((rows, 2))
  for v in range(2):
    for row in range(rows):
      places = np.nonzero(masks.masked[row, v])[0]
      if len(places):
        ibot[row, v] = cross_entropy(
          teacher[v][2][row, places], student[v][2][row, places]
        ).mean()
  ibot = ibot[valid].mean()
  np.testing.assert_allclose(metrics["ibot_loss"], ibot, rtol=1e-5)

  koleo = 0.0
  for _, vectors, _ in student:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row in np.nonzero(valid)[0]:
      others = [r for r in range(row // 8 * 8, row // 8 * 8 + 8) if valid[r]]
      others.remove(row)
      near = max(others, key=lambda r: units[row] @ units[r])
      koleo -= np.log(np.linalg.norm(units[row] - units[near])) / valid.sum()
  np.testing.assert_allclose(metrics["koleo"], koleo, rtol=1e-4)
  np.testing.assert_allclose(
    metrics["loss"], dino + ibot + 0.1 * koleo, rtol=1e-5
  )

  z = np.stack([x[0] for x in teacher], 1)
  np.testing.assert_allclose(
    metrics["teacher_entropy"], entropy(softmax(z / t))[valid].mean(), rtol=1e-4
  )
  after, _ = parts.run(1, state)
  memory = after.memory["objective"]
  centre = 0.1 * z[valid].reshape(-1, z.shape[-1]).mean(0)
  np.testing.assert_allclose(memory["centre"], centre, atol=1e-6)
  of_masked = [
    x[2][valid & masks.masked[:, v].any(1)][
      masks.masked[:, v][valid & masks.masked[:, v].any(1)]
    ]
    for v, x in enumerate(teacher)
  ]
  centre = 0.1 * np.concatenate(of_masked).mean(0)
  np.testing.assert_allclose(memory["patch_centre"], centre, atol=1e-6)


MESHES = {
  "2x2": (FOUR, dict(mesh__data=2, mesh__fsdp=2)),
  "8": (EIGHT, dict(mesh__fsdp=8)),
  "tensor": (FOUR, dict(mesh__tensor=2, mesh__data=2)),
}


@pytest.mark.parametrize(
  "mesh",
  ["2x2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("8", "tensor"))],
)
def test_a_step_is_that_of_one_device(mesh, one):
  devices, changes = MESHES[mesh]
  assert_close(one, run(devices, **changes))


@pytest.mark.slow
def test_sinkhorn_and_own_head_on_four_devices_and_in_parts(monkeypatch):
  options = dict(centring="sinkhorn", patch_head=True, patch_bottleneck=6)
  one = run(ONE, objective=options)
  monkeypatch.setattr(patch_scores, "MOST_SCORES", 1000)
  assert_close(one, run(FOUR, objective=options, **MESHES["2x2"][1]))


@pytest.mark.slow
def test_microbatches_without_koleo():
  options = dict(koleo=0.0)
  one = run(ONE, objective=options)
  mesh = dict(mesh__data=2, mesh__fsdp=2, optim__microbatch=2)
  assert_close(one, run(FOUR, objective=options, **mesh))


@pytest.mark.slow
def test_blocks_in_a_scan(one):
  scanned = run(FOUR, model__scan=True, mesh__fsdp=4)
  again = run(ONE, model__scan=True)
  assert_close(again, scanned)
