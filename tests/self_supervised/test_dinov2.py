"""DINOv2: a step by its formula, on any mesh, resumed and loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import vit_jax
from vit_jax import sharding, step, step_checks
from vit_jax.batch import normalise
from vit_jax.callbacks import Callback, Stop
from vit_jax.config import checks
from vit_jax.models import build
from vit_jax.self_supervised import (
  block_masks,
  gram,
  masked_crops,
  patch_scores,
)
from vit_jax.self_supervised.dinov2 import DINOv2
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

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

  local = {"local": crops(LOCAL, SMALL, SMALL, 3)}
  return {
    "global_1": crops(SIZE, SIZE, 3),
    "global_2": crops(SIZE, SIZE, 3),
    **(local if made.objective.local_crops else {}),
    "label": label,
    "mask": ~np.isin(np.arange(rows), [3, rows - 1]),
    "index": rng.permutation(1000)[:rows].astype(np.int64),
  }


class Parts:
  """A run on some devices, with batches of `batch`."""

  def __init__(self, made, devices, models=None):
    self.config = made
    self.mesh = sharding.make_mesh(made.mesh, devices)
    shape = step.RunShape(tiny.NUM_CLASSES, (SIZE, SIZE), made.total_steps)
    self.learner = made.objective.make(made.model, shape, models or {})
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
  return steps_of(Parts(config(objective, **changes), devices), num_steps)


def steps_of(parts, num_steps=3):
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


def masks_of(made, given):
  """Returns the masks of the first step's large crops, [b, 2, ...].

  They follow from the step's key, the record and the crop.
  """
  rows = made.data.batch_size
  key = jax.random.fold_in(jax.random.key(made.seed), 1)
  key = jax.random.fold_in(jax.random.fold_in(key, 0), 1)
  key_order, key_blocks = jax.random.split(key)
  ratio = block_masks.ratios(
    key_order, jnp.arange(2 * rows), 2 * rows, 0.5, 0.1, 0.5
  )
  num_crops = 2 + made.objective.local_crops
  numbers = given["index"][:, None] * num_crops + np.arange(2)
  keys = jax.vmap(lambda n: jax.random.fold_in(key_blocks, n))(numbers.ravel())
  masks = block_masks.draw(keys, ratio, (4, 4), 0.5)
  return jax.tree.map(
    lambda x: np.asarray(x).reshape(rows, 2, *x.shape[1:]), masks
  )


@pytest.fixture(scope="module")
def parts_of_one():
  return Parts(config(), ONE)


@pytest.fixture(scope="module")
def one(parts_of_one):
  return steps_of(parts_of_one)


def test_a_step_is_the_formula(one, parts_of_one):
  """Loss, its parts and the centres, computed in float64 by loops."""
  _, (metrics, *_) = one
  parts, made = parts_of_one, parts_of_one.config
  state = jax.jit(spread)(parts.trainer.init_state())
  given, options = batch(0, made), made.objective
  rows = made.data.batch_size

  masks = masks_of(made, given)
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


@pytest.mark.parametrize(
  "options", [dict(koleo=0.0, centring="sinkhorn", patch_head=True), {}]
)
def test_rows_meet_others_only_over_the_whole_batch(options):
  """By the check of a user's own objectives, which have import paths."""
  made = config({**options, "kind": "a:B"})
  shape = step.RunShape(tiny.NUM_CLASSES, (SIZE, SIZE), 4)
  learner = made.objective.make(made.model, shape, {})
  assert not step_checks.errors(made, shape, learner, ())


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


class Earlier:
  """What `vit_jax.load` returns, as far as Gram anchoring needs it."""

  def __init__(self):
    self.config = tiny.config(
      model__variant="Ti/4", model__width=16, model__depth=1
    ).model
    self.num_classes, self.image_size = 0, (SMALL, SMALL)
    self.model = build(self.config, 0)
    images = jnp.zeros((1, SMALL, SMALL, 3))
    self.params = jax.jit(self.model.init)(jax.random.key(3), images)["params"]


def gram_run(devices, **changes):
  options = dict(
    koleo=0.0, local_crops=0, gram=2.0, gram_model="a file", patches=0.5
  )
  earlier, made = Earlier(), config(options, **changes)
  parts = Parts(made, devices, {"gram": earlier})
  state = jax.jit(spread)(parts.trainer.init_state())
  state = state.with_fixed("teacher", earlier.params, parts.trainer.state)
  first = jax.device_get(state.params)
  return parts, first, *parts.run(2, state)


@pytest.mark.slow
def test_gram_anchoring_to_a_model_with_smaller_patches():
  """8 x 8 patches of another width, on the student's 4 x 4."""
  parts, params, state, (metrics, *others) = gram_run(ONE)
  given, earlier = batch(0, parts.config), Earlier()
  valid, names = given["mask"], ("global_1", "global_2")
  encode = masked_crops.features(
    earlier.model, earlier.config, earlier.image_size
  )

  @jax.jit
  def patches_of(crops):
    return gram.resized(
      encode(earlier.params, normalise(crops)), (8, 8), (4, 4)
    )

  def matrices(x):
    x = np.asarray(x, np.float64)
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return x @ x.swapaxes(1, 2)

  learner, rows = parts.learner, parts.config.data.batch_size
  masks, want = masks_of(parts.config, given), []
  for v, name in enumerate(names):
    seen = learner.module.apply(
      {"params": params},
      jnp.asarray(normalise(given[name])),
      None,
      jnp.zeros((rows, 1), jnp.int32),
      jnp.asarray(masks.masked[:, v]),
      method="crops",
    )
    difference = matrices(seen.patches) - matrices(patches_of(given[name]))
    want.append(np.square(difference).mean((1, 2)))
  want = np.mean(want, 0)[valid].mean()
  np.testing.assert_allclose(metrics["gram"], want, rtol=1e-4)
  total = metrics["dino_loss"] + 0.5 * metrics["ibot_loss"]
  np.testing.assert_allclose(
    metrics["loss"], total + 2 * metrics["gram"], rtol=1e-5
  )
  jax.tree.map(
    np.testing.assert_array_equal, state.fixed["teacher"], earlier.params
  )
  _, _, state_4, metrics_4 = gram_run(FOUR, mesh__data=2, mesh__fsdp=2)
  assert_close((state, [metrics, *others]), (state_4, metrics_4))


class Data:
  """Crops in memory, for `train_and_evaluate(..., data=...)`."""

  num_examples, num_classes, class_names = 160, tiny.NUM_CLASSES, None

  def __init__(self, made):
    self.config = made

  def batches(self, start_step, process_index, process_count):
    step = start_step
    while True:
      step += 1
      yield batch(step, self.config)


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_publishes_the_teacher(tmp_path):
  made = config(
    total_steps=3,
    checkpoint__every_steps=1,
    log_steps=1,
    model__stochastic_depth=0.2,
    model__rope="dinov3",
    model__rope_rescale=2.0,
    model__posemb="none",
  )
  data = Data(made)
  whole = train_and_evaluate(made, str(tmp_path / "a"), data)

  class Ends(Callback):
    def check_stop(self, step):
      if step == 2:
        raise Stop("a test")

  with pytest.raises(Stop):
    train_and_evaluate(made, str(tmp_path / "b"), data, callbacks=[Ends()])
  state = train_and_evaluate(made, str(tmp_path / "b"), data)
  jax.tree.map(np.testing.assert_array_equal, state, whole)
  assert set(state.memory["objective"]) == {"centre", "patch_centre"}

  loaded = vit_jax.load(str(tmp_path / "a"))
  assert "dinov2" not in loaded.params
  mean = whole.averages["ema"]
  for name in loaded.params:
    jax.tree.map(np.testing.assert_array_equal, loaded.params[name], mean[name])
  assert not np.array_equal(mean["cls"], whole.params["cls"])


def test_initial_values_are_the_authors():
  made = config(model__posemb="learn", model__width=64)
  shape = step.RunShape(tiny.NUM_CLASSES, (SIZE, SIZE), 4)
  module = build(made.model, 0)
  params = jax.jit(module.init)(
    jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3))
  )["params"]
  learner = made.objective.make(made.model, shape, {})
  head = {"kernel": jnp.full((3, 3), 7.0)}
  made = learner.init({**params, "dinov2": head}, jax.random.key(1))
  assert made["dinov2"]["kernel"] is head["kernel"]
  encoder = made["Transformer"]
  block = encoder["encoderblock_0"]
  kernel = block["MultiHeadDotProductAttention_0"]["query"]["kernel"]
  for x, deviation in (
    (kernel, 0.02),
    (block["MlpBlock_0"]["Dense_0"]["kernel"], 0.02),
    (encoder["posembed_input"]["pos_embedding"], 0.02),
    (made["cls"], 1e-6),
    (made["registers"], 1e-6),
  ):
    # 64 to 4,096 numbers: 4 standard errors of the deviation.
    assert abs(x.std() / deviation - 1) < 4 / (2 * x.size) ** 0.5
  limit = (3 * 8 * 8) ** -0.5
  for x in made["embedding"].values():
    assert 0.8 * limit < np.abs(x).max() <= limit
  assert not block["MlpBlock_0"]["Dense_0"]["bias"].any()
  np.testing.assert_array_equal(block["LayerNorm_0"]["scale"], 1)
  np.testing.assert_allclose(block["LayerScale_0"]["scale"], 0.1)


@pytest.mark.parametrize(
  "objective, changes, key",
  [
    (dict(gram=2.0), {}, "gram_model"),
    (dict(gram_model="a file"), {}, "gram_model"),
    (dict(gram_ops=OPS), {}, "gram_ops"),
    (dict(koleo_group=1), {}, "koleo_group"),
    ({}, dict(optim__microbatch=2), "optim.microbatch"),
    ({}, dict(model__pool="gap", model__class_token=False), "config.model"),
    (dict(local_ops="decode|resize(12)"), {}, "local_ops"),
  ],
)
def test_wrong_options_are_one_error(objective, changes, key):
  made = config(objective, **changes)
  shape = step.RunShape(tiny.NUM_CLASSES, (SIZE, SIZE), 4)
  errors = [
    *checks.errors(made),
    *(
      step_checks.errors(
        made, shape, made.objective.make(made.model, shape, {}), ()
      )
      if changes.get("optim__microbatch")
      else ()
    ),
  ]
  assert len(errors) == 1 and key in errors[0], errors


@pytest.mark.slow
def test_a_stage_is_anchored_to_the_run_before(tmp_path):
  """From its weights, heads included; with the teacher's crops twice as large.

  The images pass the augmentations of the published recipes.
  """
  crop = "decode|random_resized_crop({}, {}, {})|flip_lr"
  colours = "|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"
  large = crop.format(16, 0.32, 1.0) + colours
  first = config(
    dict(
      local_ops=crop.format(8, 0.05, 0.32) + colours,
      second_ops=f"{large}|gaussian_blur(0.1)|solarize(0.2)",
    ),
    data__ops=f"{large}|gaussian_blur(1.0)",
    data__dataset="cifar10",
    fake_data=True,
    total_steps=2,
    log_steps=1,
    model__variant="Ti/4",
  )
  before = train_and_evaluate(first, str(tmp_path / "a"))
  run = str(tmp_path / "a")
  objective = dataclasses.replace(
    first.objective,
    gram=2.0,
    gram_model=run,
    gram_ops=crop.format(32, 0.32, 1.0),
  )
  second = dataclasses.replace(first, objective=objective, init=run)
  starts = []

  class Start(Callback):
    def on_start(self, start, state, saved):
      starts.append(jax.device_get(state.params))

  after = train_and_evaluate(second, str(tmp_path / "b"), callbacks=[Start()])
  jax.tree.map(np.testing.assert_array_equal, starts[0], before.averages["ema"])
  rows = read_metrics(str(tmp_path / "b"))
  gram_losses = [row["train/gram"] for row in rows if "train/gram" in row]
  assert len(gram_losses) == 2 and all(0 < x < 1 for x in gram_losses)
  assert set(after.fixed) == {"teacher"}
