"""Targets and losses of patches: values of the authors' code, in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods import entropy, on_devices, published

from vit_jax.self_supervised import patch_scores, targets

CROPS, PLACES, K = 10, 16, 24
IBOT = {
  k.removeprefix("ibot/"): v
  for k, v in published().items()
  if k.startswith("ibot/")
}
MASKS, TEMPERATURE = IBOT["masks"], float(IBOT["teacher_temp"])
WEIGHTS = np.zeros((CROPS, PLACES), np.float32)
WEIGHTS[MASKS] = IBOT["masks_weight"]


@pytest.fixture(params=[2**26, 300], ids=["at once", "in parts"])
def parts(request, monkeypatch):
  monkeypatch.setattr(patch_scores, "MOST_SCORES", request.param)


def by_crop(name):
  """Masked patches in their places; scores are vectors' products with I."""
  out = np.zeros((CROPS, PLACES, K), np.float32)
  out[MASKS] = IBOT[name]
  return jnp.asarray(out)


def cross_entropies(student, teacher, offsets):
  return patch_scores.cross_entropies(
    (student, jnp.eye(K), 0.1),
    (teacher, jnp.eye(K), TEMPERATURE),
    offsets,
    jnp.asarray(WEIGHTS),
  )


def test_sinkhorn_over_all_masked_patches(parts):
  counts, z = jnp.asarray(MASKS, "float32"), by_crop("teacher_logits")
  # Vectors have the norm 1, and so the scores of unit prototypes are below 1.
  norm = jnp.linalg.norm(z, axis=-1, keepdims=True).max()

  def offsets(z, counts, over):
    args = z / norm, norm * jnp.eye(K), TEMPERATURE, counts, over
    return patch_scores.sinkhorn_offsets(*args)[None]

  offsets = on_devices(2, offsets, z, counts)[:1]
  got = jax.nn.softmax(z / TEMPERATURE + offsets[None])[MASKS]
  np.testing.assert_allclose(got, IBOT["sinkhorn/probs"], atol=5e-7)
  fn = lambda z, counts, over: targets.sinkhorn(z, TEMPERATURE, counts, over)
  whole = on_devices(1, fn, z.reshape(-1, K), counts.reshape(-1))
  # Both are float32.
  np.testing.assert_allclose(got, whole[MASKS.reshape(-1)], atol=1e-6)


def test_loss_and_gradient_with_sinkhorn(parts):
  # Logs of the published targets, as scores of a softmax.
  z = np.zeros((CROPS, PLACES, K), "f")
  z[MASKS] = TEMPERATURE * np.log(IBOT["sinkhorn/probs"])
  z = jnp.asarray(z)
  loss = lambda x: cross_entropies(x, z, jnp.zeros(K))[0].mean()
  student = by_crop("student_logits")
  value, grad = jax.jit(jax.value_and_grad(loss))(student)
  np.testing.assert_allclose(value, IBOT["sinkhorn/loss"], rtol=1e-6)
  np.testing.assert_allclose(grad[MASKS], IBOT["sinkhorn/grad"], atol=1e-6)
  assert not grad[~MASKS].any()


def test_two_steps_with_a_centre(parts):
  counts, centre = jnp.asarray(MASKS, "float32"), jnp.zeros(K)
  student, logits = by_crop("student_logits"), by_crop("teacher_logits")

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
