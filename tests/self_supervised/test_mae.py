"""MAE: the authors' values, masks, loss, weights, what it cannot train."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import methods
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import weights
from vit_jax.batch import normalise
from vit_jax.config import model_config
from vit_jax.models import build
from vit_jax.models.posemb import sincos2d
from vit_jax.self_supervised import mae_model as lib
from vit_jax.self_supervised.mae import MAE
from vit_jax.step import RunShape
from vit_jax.tools.reporting import visualize

# The authors' own network, in float64, on the same noise.


def _block(name, theirs, ours, num_heads):
  """Yields our path and the function of each of their arrays of a block."""
  d = theirs[f"{name}.norm1.weight"].size
  heads = (num_heads, d // num_heads)
  for i, norm in enumerate(("norm1", "norm2")):
    yield f"{ours}/LayerNorm_{i}/scale", theirs[f"{name}.{norm}.weight"]
    yield f"{ours}/LayerNorm_{i}/bias", theirs[f"{name}.{norm}.bias"]
  attention = f"{ours}/MultiHeadDotProductAttention_0"
  for part, kernel, bias in zip(
    ("query", "key", "value"),
    np.split(theirs[f"{name}.attn.qkv.weight"], 3),
    np.split(theirs[f"{name}.attn.qkv.bias"], 3),
    strict=True,
  ):
    yield f"{attention}/{part}/kernel", kernel.T.reshape(d, *heads)
    yield f"{attention}/{part}/bias", bias.reshape(heads)
  out = theirs[f"{name}.attn.proj.weight"]
  yield f"{attention}/out/kernel", out.T.reshape(*heads, d)
  yield f"{attention}/out/bias", theirs[f"{name}.attn.proj.bias"]
  for i, layer in enumerate(("fc1", "fc2")):
    dense = f"{ours}/MlpBlock_0/Dense_{i}"
    yield f"{dense}/kernel", theirs[f"{name}.mlp.{layer}.weight"].T
    yield f"{dense}/bias", theirs[f"{name}.mlp.{layer}.bias"]


def _ours(theirs, positions=True):
  """Returns parameters, or gradients, of the authors under our paths.

  Their fixed positions, which are ours but for the frequencies, are a table.
  """
  stem = theirs["patch_embed.proj.weight"]
  flat = {
    "cls": theirs["cls_token"],
    "embedding/kernel": stem.transpose(2, 3, 1, 0),
    "embedding/bias": theirs["patch_embed.proj.bias"],
    "Transformer/encoder_norm/scale": theirs["norm.weight"],
    "Transformer/encoder_norm/bias": theirs["norm.bias"],
    "mae/mask_token": theirs["mask_token"],
    "mae/embed/kernel": theirs["decoder_embed.weight"].T,
    "mae/embed/bias": theirs["decoder_embed.bias"],
    "mae/Transformer/encoder_norm/scale": theirs["decoder_norm.weight"],
    "mae/Transformer/encoder_norm/bias": theirs["decoder_norm.bias"],
    "mae/pixels/kernel": theirs["decoder_pred.weight"].T,
    "mae/pixels/bias": theirs["decoder_pred.bias"],
  }
  if positions:
    table = "Transformer/posembed_input/pos_embedding"
    flat[table] = theirs["pos_embed"]
  for i in range(2):
    name = f"Transformer/encoderblock_{i}"
    flat |= _block(f"blocks.{i}", theirs, name, 4)
    flat |= _block(f"decoder_blocks.{i}", theirs, f"mae/{name}", 2)
  return flat


AUTHORS = methods.published("ssl_mae")


def _part(prefix):
  return methods.below(AUTHORS, prefix)


@pytest.mark.parametrize(
  "family", ["vit", pytest.param("modern", marks=pytest.mark.nightly)]
)
def test_values_and_gradients_of_the_authors(family):
  """float64; only the positions are rounded to float32, as in their file."""
  model = dataclasses.replace(
    model_config(name=family, variant="B/4", width=32, depth=2),
    **dict(mlp_dim=128, num_heads=4, gelu="erf", dtype="float64"),
  )
  objective = MAE(decoder_width=16, decoder_depth=2, decoder_heads=2)
  shape = RunShape(0, (24, 24))
  with jax.enable_x64(True):
    module = objective.make(model, shape, {}).module
    params = {k: jnp.float64(v) for k, v in _ours(_part("param")).items()}
    order = jnp.int32(AUTHORS["ids_shuffle"])
    images = jnp.asarray(AUTHORS["images"] / 127.5 - 1)
    patches = images.reshape(3, 6, 4, 6, 4, 3).transpose(0, 1, 3, 2, 4, 5)
    pixels = jnp.asarray(patches.reshape(3, 36, 48))
    masked = lib.is_masked(order, 9)
    np.testing.assert_array_equal(masked, AUTHORS["mask"])

    def losses(flat):
      outputs = module.apply(
        {"params": unflatten_dict(flat, sep="/")},
        *(images, order, 9, None),
        method="predict_patches",
      )
      targets = {"pixels": pixels, "norm_pixels": lib.standardised(pixels)}
      found = {
        k: jnp.sum(jnp.square(outputs - v).mean(-1) * masked) / masked.sum()
        for k, v in targets.items()
      }
      return found, (found, outputs)

    compute = jax.jit(jax.jacrev(losses, has_aux=True))
    grads, (found, outputs) = compute(params)
    close = functools.partial(np.testing.assert_allclose, atol=1e-12)
    close(outputs, AUTHORS["pred"])
    for name, loss in found.items():
      close(loss, AUTHORS[f"{name}/loss"], rtol=1e-12)
      theirs = _ours(_part(f"{name}/grad"), positions=False)
      for path, want in theirs.items():
        close(grads[name][path], want, err_msg=path)


@pytest.mark.slow
def test_the_first_values_are_the_authors():
  """Bounds of the uniform ones, deviations of the normal ones."""
  config = model_config(variant="B/4", width=32, depth=2, mlp_dim=128)
  model = dataclasses.replace(config, num_heads=4, posemb="sincos2d")
  objective = MAE(decoder_width=16, decoder_depth=2, decoder_heads=2)
  learner = objective.make(model, RunShape(0, (24, 24)), {})

  @jax.jit
  def init(rng):
    params = learner.module.init(rng, jnp.zeros((1, 24, 24, 3)))["params"]
    return learner.init(params, jax.random.fold_in(rng, 2))

  got = flatten_dict(jax.device_get(init(jax.random.key(0))), sep="/")
  params = _part("param")
  for kind in ("init_absmax", "init_std"):
    # The paths of one number for each array of theirs.
    filled = {
      k: np.broadcast_to(v, params[k].shape) for k, v in _part(kind).items()
    }
    theirs = {k: v.flat[0] for k, v in _ours(filled, positions=False).items()}
    assert theirs.keys() == got.keys()
    for path, want in theirs.items():
      x = got[path]
      if path.startswith("embedding/"):
        continue  # of other images, see below
      value = np.abs(x).max() if kind == "init_absmax" else x.std(ddof=1)
      # A sample of a few hundred numbers; 32 for the tokens.
      few = 0.5 if x.size < 100 else 0.12
      np.testing.assert_allclose(value, want, rtol=few, err_msg=path)
  # The same function of the pixels.
  images = np.arange(256, dtype=np.uint8)[:, None].repeat(48, 1)
  mean, std = np.tile(lib.COLOURS, 16)
  kernel = got["embedding/kernel"].reshape(48, 32)
  slope = kernel * 2 * std[:, None]  # for the authors' images
  bound = (6 / (48 + 32)) ** 0.5
  assert 0.95 * bound < np.abs(slope).max() <= bound
  ours = normalise(images) @ kernel + got["embedding/bias"]
  theirs = (images / 255 - mean) / std @ slope
  bias = ours - theirs
  np.testing.assert_allclose(bias, bias[:1].repeat(256, 0), atol=1e-5)
  assert 0.8 * 48**-0.5 < np.abs(bias).max() < 1.0001 * 48**-0.5


def test_each_record_has_a_permutation_of_its_own():
  key, records = jax.random.key(0), jnp.arange(500)
  draw = jax.jit(lib.draw, static_argnums=2)
  order = np.asarray(draw(key, records, 16))
  assert (np.sort(order) == np.arange(16)).all()
  again = np.asarray(draw(key, records[::-1], 16))[::-1]
  np.testing.assert_array_equal(order, again)
  assert len({tuple(row) for row in order}) == 500
  seen = np.bincount(order[:, :4].ravel(), minlength=16)
  # 500 * 4 / 16 = 125 times each; four deviations of a binomial.
  assert (np.abs(seen - 125) < 4 * (500 * 0.25 * 0.75) ** 0.5).all()
  other = np.asarray(draw(jax.random.key(1), records, 16))
  assert (order != other).any(1).all()


# The network: any positions, tokens and sizes.

NIGHTLY = pytest.mark.nightly
MODELS = {
  "token": dict(posemb="sincos2d"),
  "gap": dict(pool="gap"),
  "blocks": dict(posemb_at="blocks"),
  "modern": dict(
    name="modern", registers=2, rope="dinov3", posemb="none", pool="gap"
  ),
  "no class token": dict(name="modern", pool="gap", class_token=False),
}


@pytest.mark.parametrize(
  "name",
  ["token", *(pytest.param(n, marks=NIGHTLY) for n in [*MODELS][1:])],
)
def test_only_visible_patches_are_seen_in_any_order(name):
  """A masked pixel changes nothing, a visible one every prediction."""
  changes = dict(variant="Ti/8", width=32, depth=1, mlp_dim=64, num_heads=2)
  model = model_config(**changes | MODELS[name])
  objective = methods.METHODS["mae"]
  assert not [*model.errors(), *objective.start_errors(model)]
  learner = objective.make(model, RunShape(0, (16, 24)), {})
  params = methods.params_of(learner.module, (16, 24))
  images = np.random.default_rng(0).normal(size=(1, 16, 24, 3))
  images = images.astype(np.float32)

  @jax.jit
  def predict(images, order):
    args = {"params": params}, images, order, 2, None
    return learner.module.apply(*args, method="predict_patches")

  order = jnp.array([[4, 1, 0, 2, 3, 5]])
  want = predict(images, order)
  assert want.shape == (1, 6, 192) and want.dtype == jnp.float32
  changed = images.copy()
  changed[:, :8, :8] = changed[:, 8:, 16:] = 5.0  # patches 0 and 5
  np.testing.assert_array_equal(predict(changed, order), want)
  changed[:, 8:, 8:16] = 5.0  # patch 4
  assert (np.abs(predict(changed, order) - want).max(-1) > 1e-4).all()
  other = predict(images, jnp.array([[1, 4, 5, 3, 0, 2]]))
  np.testing.assert_allclose(other, want, atol=2e-5)


def test_the_loss_written_out():
  """Of both targets; a row that does not count, one visible patch of four."""
  made = methods.config("mae")
  learners = {
    target: dataclasses.replace(made.objective, target=target).make(
      made.model, RunShape(0, (16, 16)), {}
    )
    for target in ("pixels", "norm_pixels")
  }
  batch, rng = methods.batch(0, made), jax.random.key(7)
  module = learners["pixels"].module
  params = methods.params_of(module)
  records = jnp.asarray(batch["index"])
  order = lib.draw(jax.random.fold_in(rng, 1), records, 4)

  @jax.jit
  def computed(params, batch):
    args = {"params": params}, normalise(batch["image"]), order, 1, None
    outputs = module.apply(*args, method="predict_patches")
    of = {k: v.loss(params, batch, rng, 0)[:2] for k, v in learners.items()}
    return of, outputs

  of, outputs = computed(params, batch)
  mean, std = lib.COLOURS
  want = dict.fromkeys(of, 0.0)
  for row in np.flatnonzero(batch["mask"]):
    for patch in order[row, 1:]:
      y, x = 8 * (patch // 2), 8 * (patch % 2)
      pixels = batch["image"][row, y : y + 8, x : x + 8] / 255
      pixels = (pixels - mean) / std
      variance = np.square(pixels - pixels.mean()).sum() / 191
      normal = (pixels - pixels.mean()) / np.sqrt(variance + 1e-6)
      for target, x in {"pixels": pixels, "norm_pixels": normal}.items():
        want[target] += np.square(outputs[row, patch] - x.ravel()).mean()
  for target, (total, count) in of.items():
    assert count == 6 * 3
    np.testing.assert_allclose(total, want[target], rtol=1e-5)


# What it leaves to others.


@pytest.fixture
def checkpoint(tmp_path):
  """The checkpoint of a run with fixed positions."""
  options = dict(model__posemb="sincos2d", model__gelu="erf")
  made = methods.config("mae", **options)
  learner = made.objective.make(made.model, RunShape(0, (16, 16)), {})
  params = methods.params_of(learner.module)
  path = methods.write(tmp_path / "run", made, params)
  return path, made, learner.module, params


@pytest.mark.slow
def test_its_checkpoint_is_fine_tuned_as_the_authors_do(checkpoint):
  """With a learned table, and a new norm behind the mean of the patches.

  The paths of the network are not the objective's.
  """
  path, made, _, params = checkpoint
  changes = dict(name="modern", pool="gap", final_norm="pooled", posemb="learn")
  fields = {f.name for f in dataclasses.fields(type(made.model))} - {"name"}
  kept = {k: getattr(made.model, k) for k in fields} | changes
  model = model_config(**kept)
  images = jnp.zeros((1, 24, 16, 3))
  target = jax.eval_shape(build(model, 3).init, jax.random.key(0), images)
  got, report = weights.adapt(
    weights.read(path), target["params"], model, (24, 16)
  )
  own = {f"mae/{k}" for k in flatten_dict(params["mae"], sep="/")}
  norm = {f"Transformer/encoder_norm/{k}" for k in ("bias", "scale")}
  assert {*report.ignored} == own | norm
  fresh = {"head/bias", "head/kernel", "pooled_norm/bias", "pooled_norm/scale"}
  assert {*report.reinitialised} == fresh
  table = got["Transformer"]["posembed_input"]["pos_embedding"]
  np.testing.assert_array_equal(table[0, 1:], sincos2d(3, 2, 32))


@pytest.mark.nightly
def test_what_visualize_shows_of_its_checkpoint(checkpoint):
  path, made, module, params = checkpoint
  images = tiny.batch(0, made)["image"][:2]
  shown = visualize.pictures_of(path, [*images])
  assert shown.rows.shape == (2, 3, 16, 16, 3)
  image, masked, predicted = shown.rows.swapaxes(0, 1)
  np.testing.assert_array_equal(image, images)
  grey = (masked == 128).all(-1)
  assert grey.reshape(2, 2, 8, 2, 8).mean((2, 4)).sum() == 2 * 3  # of 4
  np.testing.assert_array_equal(masked[~grey], image[~grey])
  np.testing.assert_array_equal(predicted[~grey], image[~grey])
  # The first masked patch, from the network's own prediction.
  order = lib.draw(jax.random.key(0), jnp.arange(2), 4)
  args = {"params": params}, normalise(images), order, 1, None
  outputs = module.apply(*args, method="predict_patches")
  patch = int(order[0, 1])
  y, x = 8 * (patch // 2), 8 * (patch % 2)
  mean, std = map(np.array, lib.COLOURS)
  pixels = (images[0, y : y + 8, x : x + 8] / 255 - mean) / std
  want = np.asarray(outputs[0, patch]).reshape(8, 8, 3) * pixels.std(ddof=1)
  want = np.clip((want + pixels.mean()) * std + mean, 0, 1) * 255
  got = predicted[0, y : y + 8, x : x + 8]
  np.testing.assert_allclose(got, want, atol=0.51)


# What is counted.


def test_flops_are_those_of_visible_patches_and_decoder():
  """L/16: products written out, layer by layer."""
  model = model_config(variant="L/16")
  flops = MAE().make(model, RunShape(0, (224, 224)), {}).train_flops

  def blocks(depth, n, d):
    return depth * (n * (4 * d * d + 2 * d * 4 * d) + 2 * n * n * d)

  want = 196 * 768 * 1024 + blocks(24, 50, 1024)
  want += 50 * 1024 * 512 + blocks(8, 197, 512) + 196 * 512 * 768
  assert flops == 6 * want
  assert 2.9 < model.train_flops((224, 224), 0) / flops < 3.0
