"""Targets and losses of patches: values of the authors' code, in parts."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.collectives import Over
from vit_jax.self_supervised import patch_scores, targets
from vit_jax.sharding import AXES

FILE = pathlib.Path(__file__).parents[1] / "data" / "ssl_dino.npz"
CROPS, PLACES, K = 10, 16, 24


@pytest.fixture(scope="module")
def published():
  with np.load(FILE) as file:
    return {k: file[k] for k in file if k.startswith("ibot/")}


@pytest.fixture(params=[2**26, 300], ids=["at once", "in parts"])
def parts(request, monkeypatch):
  monkeypatch.setattr(patch_scores, "MOST_SCORES", request.param)


def by_crop(published, name):
  """Masked patches in their places; scores are vectors' products with I."""
  masks = published["ibot/masks"]
  out = np.zeros((*masks.shape, K), np.float32)
  out[masks] = published[name]
  return jnp.asarray(out)


def on_devices(fn, *args, number=1):
  """Returns fn(*args, over), whose first results have a row for each crop."""
  devices = np.array(jax.devices()[:number]).reshape(-1, 1, 1)
  mapped = jax.shard_map(
    lambda *args: fn(*args, Over()),
    mesh=jax.sharding.Mesh(devices, AXES),
    in_specs=P("data"),
    out_specs=P(),
    check_vma=False,
  )
  return jax.jit(mapped)(*args)


def test_sinkhorn_over_all_masked_patches(published, parts):
  counts = jnp.asarray(published["ibot/masks"], "float32")
  z = by_crop(published, "ibot/teacher_logits")
  temperature = float(published["ibot/teacher_temp"])
  # Vectors have the norm 1, and so the scores of unit prototypes are below 1.
  norm = jnp.linalg.norm(z, axis=-1, keepdims=True).max()
  offsets = on_devices(
    lambda z, counts, over: patch_scores.sinkhorn_offsets(
      z / norm, norm * jnp.eye(K), temperature, counts, over
    ),
    *(z, counts),
    number=2,
  )
  p = jax.nn.softmax(z / temperature + offsets[None, None])
  got = p[published["ibot/masks"]]
  want = published["ibot/sinkhorn/probs"]
  np.testing.assert_allclose(got, want, atol=5e-7)
  whole = on_devices(
    lambda z, counts, over: targets.sinkhorn(z, temperature, counts, over),
    *(z.reshape(-1, K), counts.reshape(-1)),
  ).reshape(p.shape)
  # Both are float32.
  np.testing.assert_allclose(got, whole[published["ibot/masks"]], atol=1e-6)


def test_loss_and_gradient_with_sinkhorn(published, parts):
  masks, weights = published["ibot/masks"], np.zeros((CROPS, PLACES), "f")
  weights[masks] = published["ibot/masks_weight"]
  temperature = float(published["ibot/teacher_temp"])
  # Logs of the published targets, as scores of a softmax.
  z = np.zeros((CROPS, PLACES, K), "f")
  z[masks] = temperature * np.log(published["ibot/sinkhorn/probs"])
  z = jnp.asarray(z)

  def loss(vectors):
    losses, _ = patch_scores.cross_entropies(
      (vectors, jnp.eye(K), 0.1),
      (z, jnp.eye(K), temperature),
      jnp.zeros(K),
      jnp.asarray(weights),
    )
    return losses.mean()

  student = by_crop(published, "ibot/student_logits")
  value, grad = jax.jit(jax.value_and_grad(loss))(student)
  np.testing.assert_allclose(value, published["ibot/sinkhorn/loss"], rtol=1e-6)
  want = published["ibot/sinkhorn/grad"]
  np.testing.assert_allclose(grad[masks], want, atol=1e-6)
  assert not grad[~masks].any()


def test_two_steps_with_a_centre(published, parts):
  masks, weights = published["ibot/masks"], np.zeros((CROPS, PLACES), "f")
  weights[masks] = published["ibot/masks_weight"]
  weights = jnp.asarray(weights)
  temperature = float(published["ibot/teacher_temp"])
  student = by_crop(published, "ibot/student_logits")
  logits = by_crop(published, "ibot/teacher_logits")

  def scores(student, teacher, centre):
    return patch_scores.cross_entropies(
      (student, jnp.eye(K), 0.1),
      (teacher, jnp.eye(K), temperature),
      -centre / temperature,
      weights,
    )

  centre = jnp.zeros(K)
  for step, teacher in enumerate([logits, -0.5 * logits]):
    np.testing.assert_allclose(
      centre, published["ibot/centering/center_used"][step], atol=1e-7
    )
    losses, entropies = jax.jit(scores)(student, teacher, centre)
    want = published["ibot/centering/loss"][step]
    np.testing.assert_allclose(losses.mean(), want, rtol=1e-6)
    p = published["ibot/centering/probs"][step]
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
    want = (published["ibot/masks_weight"] * entropy).sum() / CROPS
    np.testing.assert_allclose(entropies.mean(), want, rtol=1e-6)
    mean = on_devices(
      lambda z, counts, over: patch_scores.mean_scores(
        z, jnp.eye(K), counts, over
      ),
      *(teacher, jnp.asarray(masks, "float32")),
    )
    centre = 0.9 * centre + 0.1 * mean
  want = published["ibot/centering/center_after"]
  np.testing.assert_allclose(centre, want, atol=1e-7)


def test_parts_hold_few_scores(monkeypatch):
  monkeypatch.setattr(patch_scores, "MOST_SCORES", 100)
  x = jnp.arange(2 * 7, dtype=jnp.float32).reshape(2, 7)
  parts = patch_scores._parts(x, 10)
  assert parts.shape == (2, 2, 4)
  joined = jnp.moveaxis(parts, 0, 1).reshape(2, 8)
  np.testing.assert_array_equal(joined[:, :7], x)
  assert not joined[:, 7].any()
