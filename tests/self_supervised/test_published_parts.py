"""Heads, targets, losses and masks: values and gradients of the authors' code.

tests/data/ssl_dino.npz is from facebookresearch/dinov2 and dinov3.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods import below, entropy, on_devices, published
from scipy import ndimage

from vit_jax.options import ConfigError
from vit_jax.self_supervised import (
  block_masks,
  gram,
  heads,
  koleo,
  patch_scores,
  targets,
)

FILE = published()


# DINO's head.


def head_params(head, kind):
  """The authors' parameters, or their gradients, under our names."""
  stored = {k: jnp.float32(v) for k, v in below(FILE, f"{head}/{kind}").items()}
  linear = {"head3": ["mlp.0", "mlp.2", "mlp.4"], "head1": ["mlp"]}[head]
  params = {
    f"Dense_{i}": {
      "kernel": stored[f"{name}.weight"].T,
      "bias": stored[f"{name}.bias"],
    }
    for i, name in enumerate(linear)
  }
  kernel, gain = (stored[f"last_layer.weight_{k}"] for k in ("v", "g"))
  params["prototypes"] = {"kernel": kernel.T, "gain": {"kernel": gain[:, 0]}}
  return params


@pytest.mark.parametrize("head, layers", [("head3", 3), ("head1", 1)])
def test_head(head, layers):
  """Values, and gradients of inputs and parameters; with and without gain."""
  stored, params = below(FILE, head), head_params(head, "param")
  module = lambda has_gain: heads.DINOHead(
    28, 32, 12, layers, has_gain=has_gain
  )
  x, cotangent = (jnp.float32(stored[k]) for k in ("x", "cotangent"))

  @jax.jit
  def value_and_grads(params, x):
    apply = lambda p, x: module(True).apply({"params": p}, x)
    y, back = jax.vjp(apply, params, x)
    return y, back(cotangent)

  y, grads = value_and_grads(params, x)
  close = lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5)
  close(y, stored["y"])
  jax.tree.map(close, grads, (head_params(head, "grad"), stored["grad_x"]))
  del params["prototypes"]["gain"]
  close(module(False).apply({"params": params}, x), stored["y_g1"])


def test_first_values_of_the_head():
  module = heads.DINOHead(512, 256, 64, has_gain=True)
  init = jax.jit(module.init)
  params = init(jax.random.key(0), jnp.zeros((1, 128)))["params"]
  for i in range(3):
    # 16,384 numbers or more.
    dense = params[f"Dense_{i}"]
    assert np.std(dense["kernel"]) == pytest.approx(0.02, rel=0.03)
    assert not dense["bias"].any()
  kernel, limit = params["prototypes"]["kernel"], 64**-0.5
  assert 0.99 * limit < np.abs(kernel).max() <= limit
  assert np.std(kernel) == pytest.approx(limit / 3**0.5, rel=0.02)
  assert (params["prototypes"]["gain"]["kernel"] == 1).all()


def test_a_vector_of_zeros_has_finite_gradients():
  grad = jax.jit(jax.grad(lambda x: heads.unit(x).sum()))(jnp.zeros(3))
  assert np.isfinite(heads.unit(jnp.zeros(3))).all() and np.isfinite(grad).all()


# Targets of whole crops.


def padded(x):
  """Four more rows than the authors' at places that differ, with weight 0."""
  rows, size = x.shape[0], x.shape[0] + 4 + (-x.shape[0]) % 4
  places = np.linspace(0, size - 1, rows).astype(int)
  out = np.full((size, *x.shape[1:]), 50.0, np.float32)
  out[places] = x
  weights = np.zeros(size, np.float32)
  weights[places] = 1
  return out, weights, places


def of_crops(name, step):
  """Scores and temperature of the teacher, and its targets under `name`."""
  scores = FILE["dino/teacher_logits"][step]
  want = FILE[f"dino/{name}/probs"][step].reshape(scores.shape)
  # They are stored with the crops swapped.
  return (
    scores,
    float(FILE["dino/teacher_temp"][step]),
    np.roll(want, 5, axis=0),
  )


def test_sinkhorn():
  """On four devices; rows that do not count have no influence."""
  for step in range(3):
    scores, temperature, want = of_crops("sinkhorn", step)
    x, weights, places = padded(scores)
    fn = lambda x, w, over: targets.sinkhorn(x, temperature, w, over)  # noqa: B023
    got = np.asarray(on_devices(4, fn, x, weights))
    # Exponents of up to 50 are rounded to 2e-6.
    np.testing.assert_allclose(got[places], want, rtol=2e-5, atol=1e-7)
    assert np.isfinite(got).all()
  # exp(1e4) is no number; a batch without rows gives finite targets.
  fn = lambda x, w, over: targets.sinkhorn(x, 1.0, w, over)
  for factor, weight in ((1e4, 1), (1, 0)):
    weights = np.full(len(x), weight, np.float32)
    assert np.isfinite(on_devices(1, fn, factor * x, weights)).all()


def test_centring():
  """The centre of a step is the mean of the steps before it."""
  centre = jnp.zeros(24)
  for step in range(3):
    used = FILE["dino/centering/center_used"][step]
    np.testing.assert_allclose(centre, used, atol=1e-7)
    scores, temperature, want = of_crops("centering", step)
    got = targets.sharpened(jnp.float32(scores), temperature, centre)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    x, weights, _ = padded(scores)

    def move(x, w, over, centre=centre):
      new = targets.moved_centre(centre, x, w, over)
      return jnp.broadcast_to(new, (len(x), 24))

    moved = on_devices(4, move, x, weights)
    np.testing.assert_array_equal(moved, np.broadcast_to(moved[0], moved.shape))
    centre = moved[0]
  after = FILE["dino/centering/center_after"]
  np.testing.assert_allclose(centre, after, atol=1e-7)


@pytest.mark.parametrize("name", ["centering", "sinkhorn"])
def test_loss_of_crops(name):
  """Values and gradients of three steps, given the targets."""
  by_crop = lambda x: jnp.float32(x.reshape(-1, 5, 24).swapaxes(0, 1))
  temperature = float(FILE["dino/student_temp"])

  @jax.jit
  def value_and_grads(p, large, small):
    loss = lambda *x: targets.loss_of_crops(p, *x, temperature).mean()
    return jax.value_and_grad(loss, (0, 1))(large, small)

  for step in range(3):
    stored = lambda key: FILE[f"dino/{name}/{key}"][step]  # noqa: B023
    large, small = (
      by_crop(FILE[f"dino/student_{size}_logits"][step])
      for size in ("global", "local")
    )
    # They are stored in the order in which the student learns them.
    p = by_crop(stored("probs"))[:, ::-1]
    value, grads = value_and_grads(p, large, small)
    want = stored("loss_local") + stored("loss_global")
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for got, key in zip(grads, ("grad_global", "grad_local"), strict=True):
      np.testing.assert_allclose(got, by_crop(stored(key)), atol=2e-7)


# Targets of masked patches, as iBOT has them.

CROPS, PLACES, K = 10, 16, 24
IBOT = below(FILE, "ibot")
MASKED, TEMPERATURE = IBOT["masks"], float(IBOT["teacher_temp"])
WEIGHTS = np.zeros((CROPS, PLACES), np.float32)
WEIGHTS[MASKED] = IBOT["masks_weight"]


@pytest.fixture(params=[2**26, 300], ids=["at once", "in parts"])
def parts(request, monkeypatch):
  monkeypatch.setattr(patch_scores, "MOST_SCORES", request.param)


def in_places(masked):
  """Masked patches in their places; scores are vectors' products with I."""
  out = np.zeros((CROPS, PLACES, K), np.float32)
  out[MASKED] = masked
  return jnp.asarray(out)


def cross_entropies(student, teacher, offsets):
  return patch_scores.cross_entropies(
    (student, jnp.eye(K), 0.1),
    (teacher, jnp.eye(K), TEMPERATURE),
    offsets,
    jnp.asarray(WEIGHTS),
  )


def test_sinkhorn_over_all_masked_patches(parts):
  """Targets over two devices; the loss of these targets and its gradient."""
  counts, z = jnp.asarray(MASKED, "float32"), in_places(IBOT["teacher_logits"])
  # Vectors have the norm 1, and so the scores of unit prototypes are below 1.
  norm = jnp.linalg.norm(z, axis=-1, keepdims=True).max()

  def offsets(z, counts, over):
    args = z / norm, norm * jnp.eye(K), TEMPERATURE, counts, over
    return patch_scores.sinkhorn_offsets(*args)[None]

  offsets = on_devices(2, offsets, z, counts)[:1]
  got = jax.nn.softmax(z / TEMPERATURE + offsets[None])[MASKED]
  np.testing.assert_allclose(got, IBOT["sinkhorn/probs"], atol=5e-7)
  # Logs of the published targets, as scores of a softmax.
  z = in_places(TEMPERATURE * np.log(IBOT["sinkhorn/probs"]))
  loss = lambda x: cross_entropies(x, z, jnp.zeros(K))[0].mean()
  student = in_places(IBOT["student_logits"])
  value, grad = jax.jit(jax.value_and_grad(loss))(student)
  np.testing.assert_allclose(value, IBOT["sinkhorn/loss"], rtol=1e-6)
  np.testing.assert_allclose(grad[MASKED], IBOT["sinkhorn/grad"], atol=1e-6)
  assert not grad[~MASKED].any()


def test_two_steps_of_patches_with_a_centre(parts):
  counts, centre = jnp.asarray(MASKED, "float32"), jnp.zeros(K)
  student, logits = (
    in_places(IBOT[f"{k}_logits"]) for k in ("student", "teacher")
  )

  def mean(z, counts, over):
    return patch_scores.mean_scores(z, jnp.eye(K), counts, over)[None]

  for step, teacher in enumerate([logits, -0.5 * logits]):
    used = IBOT["centering/center_used"][step]
    np.testing.assert_allclose(centre, used, atol=1e-7)
    offsets = -centre / TEMPERATURE
    losses, entropies = jax.jit(cross_entropies)(student, teacher, offsets)
    want = IBOT["centering/loss"][step]
    np.testing.assert_allclose(losses.mean(), want, rtol=1e-6)
    of_teacher = entropy(IBOT["centering/probs"][step])
    want = (IBOT["masks_weight"] * of_teacher).sum() / CROPS
    np.testing.assert_allclose(entropies.mean(), want, rtol=1e-6)
    centre = 0.9 * centre + 0.1 * on_devices(1, mean, teacher, counts)[0]
  after = IBOT["centering/center_after"]
  np.testing.assert_allclose(centre, after, atol=1e-7)


# KoLeo.

FEATURES = np.float32(FILE["koleo/features"])


def koleo_of(features, num_devices=1, group=None, valid=None):
  """Returns the mean over the batch, and its gradient."""
  if valid is None:
    valid = np.ones(len(features), bool)

  def of_device(features, valid, over):
    total = lambda x: koleo.losses(x, valid, over, group).sum()
    loss, grad = jax.value_and_grad(total)(features)
    count = over.sum(valid.astype(jnp.float32))
    return (over.sum(loss[None]) / count)[None], grad / count

  (loss, *_), grad = on_devices(num_devices, of_device, features, valid)
  return loss, grad


@pytest.mark.parametrize(
  "group, name", [(None, ""), (8, "_two_crops_times_0.1")]
)
def test_koleo(group, name):
  """Groups stand for their GPUs: two crops, one after the other."""
  factor = 1.0 if group is None else 0.1 * 2
  loss, grad = (factor * x for x in koleo_of(FEATURES, 4, group))
  want = FILE[f"koleo/loss{name}"]
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  np.testing.assert_allclose(grad, FILE[f"koleo/grad{name}"], atol=1e-7)


def test_koleo_of_rows_without_a_neighbour():
  """Those that do not count are nobody's; equal ones have a gradient."""
  loss, grad = koleo_of(FEATURES, valid=np.arange(16) < 11)
  want, want_grad = koleo_of(FEATURES[:11])
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  np.testing.assert_allclose(grad[:11], want_grad, atol=1e-7)
  assert not grad[11:].any()
  loss, grad = koleo_of(np.ones((4, 3), np.float32))
  assert np.isfinite(loss) and np.isfinite(grad).all()
  for rows, group in ((1, None), (4, 1), (5, 4)):
    with pytest.raises(ConfigError, match="koleo_group"):
      koleo_of(np.ones((rows, 3), np.float32), group=group)


# Gram anchoring.


def test_gram():
  stored = {k: jnp.float32(v) for k, v in below(FILE, "gram").items()}
  mean = lambda x: gram.losses(x, stored["teacher"]).mean()
  loss, grad = jax.jit(jax.value_and_grad(mean))(stored["student"])
  # float32 against float64
  np.testing.assert_allclose(loss, stored["keep_negative/loss"], rtol=3e-7)
  np.testing.assert_allclose(grad, stored["keep_negative/grad"], atol=2e-8)


def test_features_on_a_finer_grid_are_downsampled():
  """The values of torch's bicubic interpolation, a cubic with a = -3/4."""
  # A point halfway between two others has these weights of its neighbours.
  weights = np.array([-0.09375, 0.59375, 0.59375, -0.09375])
  rows = np.arange(8.0) ** 2
  x = np.broadcast_to(rows[None, :, None, None], (1, 8, 6, 2))
  x = jnp.asarray(x, "float32").reshape(1, 48, 2)
  got = gram.resized(x, (8, 6), (4, 3)).reshape(4, 3, 2)
  for i, row in enumerate(range(1, 6, 2), start=1):
    want = weights @ rows[np.clip(np.arange(row, row + 4), 0, 7)]
    np.testing.assert_allclose(got[i], np.full((3, 2), want), rtol=1e-6)
  assert gram.resized(x, (8, 6), (8, 6)) is x


# Block masks: random, so their distribution is compared.

MASKS = below(FILE, "masks")


@pytest.mark.slow
def test_masks_are_distributed_as_those_of_the_authors():
  """Of 2,000 masks for each target, as there: counts, places, regions."""
  blocks = lambda key, n: block_masks.blocks(key, n, (16, 16))
  draw = jax.jit(jax.vmap(blocks, in_axes=(0, None)))
  keys = jax.random.split(jax.random.key(1), 2000)
  levels = MASKS["quantile_levels"]
  for i, target in enumerate(MASKS["targets"]):
    of = lambda name: MASKS[name][i]  # noqa: B023
    masks = np.asarray(draw(keys, target))
    counts = masks.sum((1, 2))
    assert target - 5 <= counts.min() and counts.max() == target
    # Both means are of 2,000 draws: 4 standard errors of their difference.
    error = 4 * of("std") * (2 / 2000) ** 0.5
    assert abs(counts.mean() - of("mean")) < error
    assert abs(counts.std() - of("std")) < 0.12
    got = np.quantile(counts, levels[2:], method="nearest")
    assert np.abs(got - of("quantiles")[2:]).max() <= 1
    want = of("probability_map")
    deviation = np.sqrt(2 * want * (1 - want) / 2000)
    error = np.abs(masks.mean(0) - want) / deviation
    assert error.max() < 4.5  # the largest of 256
    assert error.mean() < 1.0  # 0.8 for normal numbers
    regions = np.mean([ndimage.label(mask)[1] for mask in masks])
    assert abs(regions - of("regions_mean")) < 0.2


def test_ratios_are_spread_over_the_batch():
  crops = jnp.arange(64)

  @jax.jit
  def ratios(key, crops):
    return block_masks.ratios(key, crops, 64, 0.5, 0.1, 0.5)

  ratio = ratios(jax.random.key(0), crops)
  masked = np.sort(ratio[ratio > 0])
  assert len(masked) == 32
  borders = np.linspace(0.1, 0.5, 33)
  assert ((borders[:-1] <= masked) & (masked <= borders[1:])).all()
  assert (np.diff(np.nonzero(ratio)[0]) != 1).any()  # in no order
  # A part of the crops has the ratios that it has in the whole batch.
  part = ratios(jax.random.key(0), crops[9:17])
  np.testing.assert_array_equal(part, ratio[9:17])
  # The authors' numbers of patches; blocks take up to 5 more away from theirs.
  draws = (ratios(jax.random.key(seed), crops) for seed in range(60))
  counts = np.concatenate([np.int32(256 * x[x > 0]) for x in draws])
  got = np.quantile(counts, MASKS["quantile_levels"])
  want = MASKS["collate_quantiles_masked_only"]
  np.testing.assert_allclose(got[3:], want[3:], atol=3)


def test_places_and_weights_of_masked_patches():
  keys = jax.random.split(jax.random.key(2), 6)
  ratio = jnp.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
  draw = jax.jit(lambda *args: block_masks.draw(*args, (4, 6), 0.5))
  masked, places, weights = map(np.asarray, draw(keys, ratio))
  assert places.shape == weights.shape == (6, 12)
  for mask, place, weight in zip(masked, places, weights, strict=True):
    assert set(place[weight > 0]) == set(np.nonzero(mask)[0])
    assert len(set(place)) == 12
    np.testing.assert_allclose(weight.sum(), mask.any(), rtol=1e-6)
  assert not masked[0].any() and masked[1:].any(1).all()
  again = draw(keys[::-1], ratio[::-1])
  np.testing.assert_array_equal(again.masked[::-1], masked)
