"""Masked patch prediction: targets, corruption, loss, weights, errors."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from self_supervised import methods

import vit_jax
from vit_jax import models, run_checks, weights
from vit_jax.batch import normalise
from vit_jax.config import ConfigError, model_config, to_dict
from vit_jax.families.vit import ViTConfig
from vit_jax.models import masked_patch as lib
from vit_jax.objectives import MaskedPatch
from vit_jax.step import RunShape

SHAPE = RunShape(10, (16, 16))


def config(target="mean_color", **changes):
  made = tiny.config(**changes)
  return dataclasses.replace(made, objective=MaskedPatch(target=target))


# Targets, and which patches are corrupted.


def test_colors_are_the_three_upper_bits_of_the_means_of_cells():
  for color, number in (
    ((255, 255, 255), 511),
    ((224, 100, 31), 7 * 64 + 3 * 8),
    ((32, 64, 159), 1 * 64 + 2 * 8 + 4),
  ):
    patches = np.broadcast_to(np.array(color, np.uint8), (2, 3, 8, 8, 3))
    assert np.all(lib.colors(jnp.asarray(patches), 1) == number)
  patch = np.zeros((1, 1, 8, 8, 3), np.uint8)
  patch[..., :4, :, 0] = 64  # the mean is 32 exactly, the first of level 1
  assert lib.colors(jnp.asarray(patch), 1).item() == 64
  patch[..., 0, 0, 0] = 63  # and less than 32 by 1/64
  assert lib.colors(jnp.asarray(patch), 1).item() == 0
  blues = np.arange(16).reshape(4, 4) // 2  # of the cells, row by row
  patch = np.zeros((1, 1, 8, 8, 3), np.uint8)
  patch[0, 0, :, :, 2] = np.kron(blues, np.ones((2, 2))) * 32
  result = lib.colors(jnp.asarray(patch), 4)
  np.testing.assert_array_equal(result[0, 0], blues.ravel())


def test_patches_are_in_the_order_of_the_tokens():
  """A convolution with a kernel of ones sums the pixels of each patch."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (2, 24, 16, 3), np.uint8)
  embed = nn.Conv(1, (8, 8), (8, 8), "VALID", kernel_init=nn.initializers.ones)
  sums, _ = embed.init_with_output(jax.random.key(0), images.astype(np.float32))
  patches = lib.patches_of(jnp.asarray(images), 8)
  assert patches.shape == (2, 6, 8, 8, 3)
  want = patches.astype(jnp.float32).sum((2, 3, 4))
  np.testing.assert_array_equal(sums.reshape(2, 6), want)


draw = jax.jit(lib.draw, static_argnums=2)


@pytest.fixture(scope="module")
def drawn():
  """196 patches of each of 500 records: 49,000 corrupted ones."""
  return jax.device_get(draw(jax.random.key(0), jnp.arange(500), 196))


def test_half_of_the_patches_are_corrupted(drawn):
  """Of these 80, 10 and 10 % are masked, replaced and left, anywhere."""
  few = jax.device_get(draw(jax.random.key(0), jnp.arange(500), 9))
  for plan, patches, corrupted in ((drawn, 196, 98), (few, 9, 4)):
    assert plan.places.shape == plan.sources.shape == (500, corrupted)
    for numbers in (plan.places, plan.sources):
      assert 0 <= numbers.min() and numbers.max() < patches
    assert all(len({*row}) == corrupted for row in plan.places)

  def assert_share(result, rate):
    """Within five standard deviations of a binomial's share."""
    deviation = np.sqrt(rate * (1 - rate) / result.size)
    assert abs(result.mean() - rate) < 5 * deviation

  is_masked, is_other = drawn.is_masked, drawn.sources != drawn.places
  assert not np.any(is_masked & is_other)
  assert_share(is_masked, 0.8)
  assert_share(is_other, 0.1)
  share = np.bincount(drawn.places.ravel(), minlength=196) / 500
  assert abs(share - 0.5).max() < 5 * np.sqrt(0.25 / 500)
  away = (drawn.sources - drawn.places)[is_other] % 196
  share = np.bincount(away, minlength=196)[1:] / is_other.sum()
  assert abs(share - 1 / 195).max() < 5 * np.sqrt(1 / 195 / is_other.sum())


def test_the_record_decides_and_not_its_place(drawn):
  order = np.random.default_rng(0).permutation(500)[:7]
  again = draw(jax.random.key(0), jnp.asarray(order), 196)
  for few, many in zip(again, drawn, strict=True):
    np.testing.assert_array_equal(few, many[order])
  other = draw(jax.random.key(1), jnp.asarray(order), 196)
  assert np.any(other.places != again.places)
  assert len({tuple(sorted(row)) for row in drawn.places}) == 500


def test_corrupted_tokens_are_those_of_the_plan():
  tokens = jnp.arange(10.0).reshape(1, 5, 2)
  plan = lib.Plan(
    places=jnp.array([[3, 0, 1]]),
    sources=jnp.array([[3, 4, 1]]),  # itself, another, itself
    is_masked=jnp.array([[True, False, False]]),
  )
  result = jax.jit(lib.corrupt)(tokens, jnp.array([-1.0, -2.0]), plan)
  want = [[8.0, 9.0], [2.0, 3.0], [4.0, 5.0], [-1.0, -2.0], [8.0, 9.0]]
  np.testing.assert_array_equal(result[0], want)


# The loss.


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


def test_no_gradient_comes_from_other_patches(monkeypatch):
  """Only what is left in place, or put in another's, has some."""
  monkeypatch.setattr(models, "build", lambda model, n: Table())
  model = ViTConfig(variant="B/8", width=8)
  learner = MaskedPatch(target="small").make(model, RunShape(10, (32, 32)), {})
  images = jax.random.bits(jax.random.key(0), (1, 32, 32, 3), jnp.uint8)
  params = methods.params_of(learner.module, 32)
  rng, seen = jax.random.key(7), set()

  @jax.jit
  def grads_of(record):
    batch = {"image": images, "mask": jnp.ones(1, bool), "index": record}
    return jax.grad(lambda p: learner.loss(p, batch, rng, 0)[0])(params)

  for record in jnp.arange(20)[:, None]:
    grads = jax.device_get(grads_of(record))
    plan = jax.device_get(draw(jax.random.fold_in(rng, 1), record, 16))
    want = np.zeros(16, bool)
    want[plan.sources[~plan.is_masked]] = True
    got = np.any(grads["tokens"].reshape(16, 8) != 0, axis=1)
    np.testing.assert_array_equal(got, want)
    has_mask = np.any(grads["masked_patch"]["mask_token"] != 0)
    assert has_mask == plan.is_masked.any()
    seen.add(want.sum())
  assert len(seen) > 2  # none, one, several


def test_the_losses_written_out():
  """From what the module predicts at the places, with random parameters."""
  made, rng = config(data__batch_size=8), jax.random.key(7)
  batch = methods.batch(0, made)
  learners = {
    target: MaskedPatch(target=target).make(made.model, SHAPE, {})
    for target in ("small", "pixels")
  }
  params = {k: methods.params_of(v.module) for k, v in learners.items()}
  plan = lib.draw(jax.random.fold_in(rng, 1), jnp.asarray(batch["index"]), 4)
  images = jnp.asarray(normalise(batch["image"]))

  @jax.jit
  def computed(params, batch):
    losses = {k: v.loss(params[k], batch, rng, 0) for k, v in learners.items()}
    outputs = {
      k: v.module.apply(
        {"params": params[k]}, images, plan, None, method="predict_patches"
      )
      for k, v in learners.items()
    }
    return losses, outputs

  losses, outputs = computed(params, batch)
  valid = batch["mask"]
  raw = jnp.asarray(batch["image"])
  patches = lib.chosen(lib.patches_of(raw, 8), plan.places)
  for target, (total, count, named) in losses.items():
    x = np.asarray(outputs[target])[valid]
    if target == "pixels":
      want = np.square(x - normalise(patches[valid]).reshape(x.shape)).mean()
      assert "accuracy" not in named
    else:
      colors = lib.colors(patches, 4)[valid]
      logits = x.reshape(*colors.shape, 512)
      log_p = jax.nn.log_softmax(logits)
      want = -jnp.take_along_axis(log_p, colors[..., None], -1).mean()
      right, number = named["accuracy"]
      is_right = logits.argmax(-1) == colors
      assert float(right / number) == pytest.approx(float(is_right.mean()))
    # Sums of 2,304 terms in another order.
    assert float(total / count) == pytest.approx(float(want), rel=1e-5)


def test_what_is_left_is_predicted_from_its_own_encoding():
  """Patch i is behind the class token and the registers."""
  rows, parts = 4, dict(name="modern", registers=3, rope="dinov3")
  sizes = dict(variant="B/8", width=32, depth=1, mlp_dim=32, num_heads=2)
  module = MaskedPatch().make(model_config(**parts, **sizes), SHAPE, {}).module
  params, made = methods.params_of(module), config()
  images = jnp.asarray(normalise(methods.batch(0, made)["image"]))
  places = jnp.tile(jnp.array([[2, 0]]), (len(images), 1))
  plan = lib.Plan(places, places, jnp.zeros(places.shape, bool))

  @jax.jit
  def computed(params):
    args = {"params": params}, images
    got = module.apply(*args, plan, None, method="predict_patches")
    return got, module.apply(*args)[1]["encoded"]

  got, encoded = computed(params)
  own = params["masked_patch"]["head"]
  want = np.asarray(encoded)[:, [rows + 2, rows]] @ own["kernel"] + own["bias"]
  # One product of 32 terms, maybe in another order.
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# What it leaves to others.

OWN = tuple(
  f"masked_patch/{n}" for n in ("head/bias", "head/kernel", "mask_token")
)


@pytest.fixture
def checkpoint(tmp_path):
  """A checkpoint of random parameters: its path, config and parameters."""
  made = config(data__dataset="digits")
  learner = made.objective.make(made.model, SHAPE, {})
  params = methods.params_of(learner.module)
  return methods.write(tmp_path / "run", made, params), made, params


def test_its_checkpoint_is_read_without_its_own(checkpoint):
  """By `load`, and as the start of a fine-tuning."""
  path, made, params = checkpoint
  vit = vit_jax.load(path, verbose=False)
  assert vit.report.ignored == OWN and not vit.report.reinitialised
  assert vit.num_classes == 0 and vit.class_names is None
  want = {k: v for k, v in params.items() if k != "masked_patch"}
  jax.tree.map(np.testing.assert_array_equal, vit.params, want)
  fine = dataclasses.replace(tiny.config(), init=path, data=made.data)
  fitted, report = run_checks.setup(fine).fitted_weights()
  assert report.ignored == OWN
  assert set(report.reinitialised) == {"head/kernel", "head/bias"}
  kernels = (x["embedding"]["kernel"] for x in (fitted, params))
  np.testing.assert_array_equal(*kernels)


def test_it_starts_from_any_weights(checkpoint):
  path, made, params = checkpoint
  result = weights.read(path)
  others = {k: v for k, v in result.params.items() if k not in OWN}
  for target, theirs, is_own in (
    ("mean_color", result.params, True),
    ("small", result.params, False),  # of another shape
    ("mean_color", others, False),
  ):
    like = MaskedPatch(target=target).make(made.model, SHAPE, {})
    shapes = methods.params_of(like.module)
    other = dataclasses.replace(result, params=theirs)
    fitted, report = weights.adapt(other, shapes, made.model, (16, 16))
    assert not report.ignored
    assert report.reinitialised == (() if is_own else OWN)
    token = fitted["masked_patch"]["mask_token"]
    want = params["masked_patch"]["mask_token"] if is_own else None
    np.testing.assert_array_equal(token, want)


def test_a_head_that_is_not_trained_is_not_scored():
  evals = {"val": {"kind": "classification", "ops": "decode|resize(16)"}}
  made, _ = vit_jax.config.build(to_dict(config()) | {"evals": evals})
  with pytest.raises(ConfigError, match="evals.val.kind"):
    run_checks.setup(dataclasses.replace(made, fake_data=True))
