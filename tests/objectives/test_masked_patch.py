"""Masked patch prediction: its loss, gradients, weights, what is refused."""

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
from vit_jax.config import ConfigError, checks, model_config, to_dict
from vit_jax.families.vit import ViTConfig
from vit_jax.models import masked_patch as lib
from vit_jax.objectives import MaskedPatch
from vit_jax.step import RunShape

ONE = jax.devices()[:1]


def config(target="mean_color", **changes):
  made = tiny.config(**changes)
  return dataclasses.replace(made, objective=MaskedPatch(target=target))


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
  params = methods.params_of(learner.module, 32)
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


# The loss.


def test_the_losses_written_out():
  """From what the module predicts at the places, with random parameters."""
  made, rng = config(data__batch_size=8), jax.random.key(7)
  batch = methods.batch(0, made)
  learners = {
    target: MaskedPatch(target=target).make(
      made.model, RunShape(10, (16, 16)), {}
    )
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
  model = model_config(**parts, **sizes)
  module = MaskedPatch().make(model, RunShape(10, (16, 16)), {}).module
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


def test_its_own_head_is_split_like_any():
  parts = tiny.Parts(config(mesh__fsdp=2, mesh__tensor=2))
  kernel = parts.shapes.params["masked_patch"]["head"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (16, 256)


# What it leaves to others.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """A checkpoint of random parameters: its path, config and parameters."""
  made = config(data__dataset="digits")
  learner = made.objective.make(made.model, RunShape(10, (16, 16)), {})
  params = methods.params_of(learner.module)
  path = methods.write(tmp_path_factory.mktemp("masked") / "run", made, params)
  return path, made, params


OWN = tuple(
  f"masked_patch/{n}" for n in ("head/bias", "head/kernel", "mask_token")
)


def test_its_checkpoint_is_loaded_without_its_own(checkpoint):
  path, _, params = checkpoint
  vit = vit_jax.load(path, verbose=False)
  assert vit.report.ignored == OWN and not vit.report.reinitialised
  assert vit.num_classes == 0 and vit.class_names is None
  want = {k: v for k, v in params.items() if k != "masked_patch"}
  jax.tree.map(np.testing.assert_array_equal, vit.params, want)


def test_its_checkpoint_starts_a_fine_tuning(checkpoint):
  path, made, params = checkpoint
  fine = dataclasses.replace(tiny.config(), init=path, data=made.data)
  fitted, report = run_checks.setup(fine).fitted_weights()
  assert report.ignored == OWN
  assert set(report.reinitialised) == {"head/kernel", "head/bias"}
  np.testing.assert_array_equal(
    fitted["embedding"]["kernel"], params["embedding"]["kernel"]
  )


def test_it_starts_from_any_weights(checkpoint):
  path, made, params = checkpoint
  result = weights.read(path)

  def adapted(target, theirs):
    like = MaskedPatch(target=target).make(
      made.model, RunShape(10, (16, 16)), {}
    )
    shapes = methods.params_of(like.module)
    other = dataclasses.replace(result, params=theirs)
    return weights.adapt(other, shapes, made.model, (16, 16))

  fitted, report = adapted("mean_color", result.params)
  assert not report.ignored and not report.reinitialised
  token = fitted["masked_patch"]["mask_token"]
  np.testing.assert_array_equal(token, params["masked_patch"]["mask_token"])
  for target, theirs in (
    ("small", result.params),  # of another shape
    ("mean_color", {k: v for k, v in result.params.items() if k not in OWN}),
  ):
    fitted, report = adapted(target, theirs)
    assert report.reinitialised == OWN and not report.ignored
    assert fitted["masked_patch"]["mask_token"] is None


# What does not fit.


@pytest.mark.parametrize(
  "option, changes",
  [
    ("model.variant: got 'R26x0.5'", tiny.RESNET),
    ("2 patches of 8 pixels", dict(data__ops="decode|resize(8)")),
    ("model.pool: got 'map'", dict(model__pool="map")),
    (
      "model.projection: got 8",
      dict(model__name="modern", model__projection=8),
    ),
    (
      "objective.target: got 'small'",
      dict(
        model__variant="Ti/6", data__ops="decode|resize(12)", target="small"
      ),
    ),
  ],
  ids=lambda x: None if isinstance(x, str) else next(iter(x)),
)
def test_models_that_it_cannot_train(option, changes):
  (error,) = checks.errors(config(**changes))
  assert option in error


def test_a_head_that_is_not_trained_is_not_scored():
  evals = {"val": {"kind": "classification", "ops": "decode|resize(16)"}}
  made, _ = vit_jax.config.build(to_dict(config()) | {"evals": evals})
  with pytest.raises(ConfigError, match="evals.val.kind"):
    run_checks.setup(dataclasses.replace(made, fake_data=True))
