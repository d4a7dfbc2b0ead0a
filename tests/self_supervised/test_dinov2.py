"""DINOv2: a step by its formula, Gram anchoring, stages, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import methods
import numpy as np
import pytest
import tiny
from methods import entropy, softmax

from vit_jax import step
from vit_jax.batch import normalise
from vit_jax.callbacks import Callback
from vit_jax.models import build
from vit_jax.self_supervised import block_masks, gram, masked_crops
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

LOCAL = 3


def config(options=None, **changes):
  return methods.config("dinov2", options, **changes)


def masks_of(made, given):
  """Returns the masks of the large crops of the first step, [b, 2, n].

  They follow from the step's key, the record and the crop.
  """
  rows = made.data.batch_size
  key = jax.random.fold_in(jax.random.key(made.seed), 1)
  key = jax.random.fold_in(jax.random.fold_in(key, 0), 1)
  key_order, key_blocks = jax.random.split(key)
  crops = jnp.arange(2 * rows)
  ratio = block_masks.ratios(key_order, crops, 2 * rows, 0.5, 0.1, 0.5)
  num_crops = 2 + made.objective.local_crops
  numbers = given["index"][:, None] * num_crops + np.arange(2)
  keys = jax.vmap(lambda n: jax.random.fold_in(key_blocks, n))(numbers.ravel())
  masks = block_masks.draw(keys, ratio, (4, 4), 0.5)
  return np.asarray(masks.masked).reshape(rows, 2, 16)


def test_a_step_is_the_formula():
  """Loss, its parts and the centres, computed in float64 by loops."""
  run = methods.Run(config())
  state = run.start()
  after, (metrics,) = run.steps(1)
  memory = jax.device_get(after.memory["objective"])
  given, rows = methods.batch(0, run.config), run.config.data.batch_size
  masked, valid = masks_of(run.config, given), given["mask"]
  assert 0 < masked.any(2).sum() <= rows
  apply, every = run.trainer.module.apply, jnp.tile(jnp.arange(16), (rows, 1))

  @jax.jit
  def scores(params):
    """Of the large crops, whole and masked, and of the local ones.

    Scores, class token, and scores of all patches, by the module.
    """

    def of(crops, masked):
      args = jnp.asarray(normalise(crops)), None, every, jnp.asarray(masked)
      seen = apply({"params": params}, *args, method="crops")
      return seen.scores, seen.vectors, seen.chosen @ seen.prototypes

    large = [given[name] for name in ("global_1", "global_2")]
    whole = [of(x, np.zeros((rows, 16), bool)) for x in large]
    seen = [of(x, masked[:, v]) for v, x in enumerate(large)]
    local = jnp.asarray(normalise(given["local"].reshape(-1, 8, 8, 3)))
    local, _ = apply({"params": params}, local, None, method="scores")
    return whole, seen, local.reshape(rows, LOCAL, -1)

  float64 = lambda x: np.asarray(x, np.float64)
  teacher, student, local = jax.tree.map(float64, scores(state.params))
  options = run.config.objective
  t, s = options.teacher_temperature, options.student_temperature

  def cross_entropy(z_teacher, z_student):
    return -(softmax(z_teacher / t) * np.log(softmax(z_student / s))).sum(-1)

  pairs = [cross_entropy(teacher[i][0], student[1 - i][0]) for i in (0, 1)]
  for z, _, _ in teacher:
    pairs += [cross_entropy(z, local[:, j]) for j in range(LOCAL)]
  dino = np.mean(pairs, 0)[valid].mean()

  ibot = np.zeros((rows, 2))
  for row, v in np.argwhere(masked.any(2)):
    of = masked[row, v]
    losses = cross_entropy(teacher[v][2][row, of], student[v][2][row, of])
    ibot[row, v] = losses.mean()
  ibot = ibot[valid].mean()

  koleo = 0.0
  for _, vectors, _ in student:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row in np.nonzero(valid)[0]:
      others = [r for r in range(row // 4 * 4, row // 4 * 4 + 4) if valid[r]]
      others.remove(row)
      near = max(others, key=lambda r: units[row] @ units[r])
      koleo -= np.log(np.linalg.norm(units[row] - units[near])) / valid.sum()

  z = np.stack([x[0] for x in teacher], 1)
  for name, want, rtol in (
    ("dino_loss", dino, 1e-5),
    ("ibot_loss", ibot, 1e-5),
    ("koleo", koleo, 1e-4),
    ("loss", dino + ibot + 0.1 * koleo, 1e-5),
    ("teacher_entropy", entropy(softmax(z / t))[valid].mean(), 1e-4),
  ):
    np.testing.assert_allclose(metrics[name], want, rtol=rtol, err_msg=name)
  centre = 0.1 * z[valid].reshape(-1, z.shape[-1]).mean(0)
  np.testing.assert_allclose(memory["centre"], centre, atol=1e-6)
  counts = masked & valid[:, None, None]
  of_masked = [x[2][counts[:, v]] for v, x in enumerate(teacher)]
  centre = 0.1 * np.concatenate(of_masked).mean(0)
  np.testing.assert_allclose(memory["patch_centre"], centre, atol=1e-6)


def gram_run(devices, **changes):
  """Returns the run with an earlier teacher, and its first state."""
  options = dict(koleo=0.0, local_crops=0, gram=2.0, gram_model="a file")
  # 8 x 8 patches of another width, on the student's 4 x 4.
  earlier = methods.teacher(0, 8, model__variant="Ti/2")
  made = config(options | dict(patches=0.5), **changes)
  return methods.Run(made, devices, {"gram": earlier}), earlier


@pytest.mark.nightly
def test_gram_anchoring_to_a_model_with_smaller_patches():
  run, earlier = gram_run(1)
  params = run.start().params
  given, rows = methods.batch(0, run.config), run.config.data.batch_size
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

  masked, want = masks_of(run.config, given), []
  for v, name in enumerate(("global_1", "global_2")):
    seen = run.learner.module.apply(
      {"params": params},
      jnp.asarray(normalise(given[name])),
      None,
      jnp.zeros((rows, 1), jnp.int32),
      jnp.asarray(masked[:, v]),
      method="crops",
    )
    difference = matrices(seen.patches) - matrices(patches_of(given[name]))
    want.append(np.square(difference).mean((1, 2)))
  want = np.mean(want, 0)[given["mask"]].mean()
  state, (metrics,) = run.steps(1)
  np.testing.assert_allclose(metrics["gram"], want, rtol=1e-4)
  total = metrics["dino_loss"] + 0.5 * metrics["ibot_loss"]
  np.testing.assert_allclose(
    metrics["loss"], total + 2 * metrics["gram"], rtol=1e-5
  )
  jax.tree.map(
    np.testing.assert_array_equal, state.fixed["teacher"], earlier.params
  )
  four, _ = gram_run(4, mesh__data=2, mesh__fsdp=2)
  methods.assert_close(run.outcome(2), four.outcome(2))


@pytest.mark.slow
def test_initial_values_are_the_authors():
  """Of all but the head."""
  made = config(model__posemb="learn", model__width=64)
  shape = step.RunShape(tiny.NUM_CLASSES, (16, 16), 4)
  learner = made.objective.make(made.model, shape, {})
  init, images = jax.jit(build(made.model, 0).init), jnp.zeros((1, 16, 16, 3))
  params = init(jax.random.key(0), images)["params"]
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
  limit = (3 * 4 * 4) ** -0.5
  for x in made["embedding"].values():
    assert 0.8 * limit < np.abs(x).max() <= limit
  assert not block["MlpBlock_0"]["Dense_0"]["bias"].any()
  np.testing.assert_array_equal(block["LayerNorm_0"]["scale"], 1)
  np.testing.assert_allclose(block["LayerScale_0"]["scale"], 0.1)


@pytest.mark.nightly
def test_a_stage_is_anchored_to_the_run_before(tmp_path):
  """From its weights, heads included; the teacher has larger crops."""
  short = dict(fake_data=True, total_steps=2, log_steps=1)
  first, run = config(data__dataset="cifar10", **short), str(tmp_path / "a")
  before = train_and_evaluate(first, run)
  options = dict(gram=2.0, gram_model=run, gram_ops="decode|resize(32)")
  objective = dataclasses.replace(first.objective, **options)
  second = dataclasses.replace(first, objective=objective, init=run)
  starts, start = [], Callback()
  start.on_start = lambda _, state, saved: starts.append(
    jax.device_get(state.params)
  )
  after = train_and_evaluate(second, str(tmp_path / "b"), callbacks=[start])
  jax.tree.map(np.testing.assert_array_equal, starts[0], before.averages["ema"])
  rows = read_metrics(str(tmp_path / "b"))
  gram_losses = [row["train/gram"] for row in rows if "train/gram" in row]
  assert len(gram_losses) == 2 and all(0 < x < 1 for x in gram_losses)
  assert set(after.fixed) == {"teacher"}
