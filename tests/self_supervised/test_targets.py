"""Centring and Sinkhorn-Knopp: the authors' values, any mesh, large scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods import on_devices, published

from vit_jax.self_supervised import targets


def _padded(x):
  """Four more rows than the authors' at places that differ, with weight 0."""
  rows, size = x.shape[0], x.shape[0] + 4 + (-x.shape[0]) % 4
  places = np.linspace(0, size - 1, rows).astype(int)
  out = np.full((size, *x.shape[1:]), 50.0, np.float32)
  out[places] = x
  weights = np.zeros(size, np.float32)
  weights[places] = 1
  return out, weights, places


@pytest.mark.parametrize("name", ["dino", "ibot"])
def test_sinkhorn_gives_the_authors_targets(name):
  """Rows that do not count have no influence."""
  file = published()
  for step in range(3) if name == "dino" else [...]:
    scores = file[f"{name}/teacher_logits"][step]
    temperature = float(file[f"{name}/teacher_temp"][step])
    want = file[f"{name}/sinkhorn/probs"][step].reshape(scores.shape)
    if name == "dino":  # stored with the crops swapped
      want = np.roll(want, 5, axis=0)
    x, weights, places = _padded(scores)
    fn = lambda x, w, over: targets.sinkhorn(x, temperature, w, over)  # noqa: B023
    got = np.asarray(on_devices(4, fn, x, weights))
    # Exponents of up to 50 are rounded to 2e-6.
    np.testing.assert_allclose(got[places], want, rtol=2e-5, atol=1e-7)
    assert np.isfinite(got).all()


def test_sinkhorn_of_large_scores_and_of_no_row():
  """exp(1e4) is no number; a batch without rows gives finite targets."""
  scores = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
  fn = lambda x, w, over: targets.sinkhorn(x, 1.0, w, over)
  got = on_devices(1, fn, 1e4 * scores, np.ones(8, np.float32))
  np.testing.assert_allclose(got.sum(1), 1, rtol=1e-6)
  none = on_devices(1, fn, scores, np.zeros(8, np.float32))
  assert np.isfinite(none).all()
  # More iterations would make all prototypes alike; three come near.
  got = on_devices(1, fn, scores, np.ones(8, np.float32))
  np.testing.assert_allclose(got.sum(0), 8 / 6, rtol=0.05)


def test_centring_gives_the_authors_targets():
  """The centre of a step is the mean of the steps before it."""
  file, centre = published(), jnp.zeros(24)
  for step in range(3):
    used = file["dino/centering/center_used"][step]
    np.testing.assert_allclose(centre, used, atol=1e-7)
    scores = file["dino/teacher_logits"][step]
    temperature = float(file["dino/teacher_temp"][step])
    got = targets.sharpened(jnp.float32(scores), temperature, centre)
    want = file["dino/centering/probs"][step].reshape(scores.shape)
    want = np.roll(want, 5, axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    x, weights, _ = _padded(scores)

    def move(x, w, over, centre=centre):
      new = targets.moved_centre(centre, x, w, over)
      return jnp.broadcast_to(new, (len(x), 24))

    moved = on_devices(4, move, x, weights)
    np.testing.assert_array_equal(moved, np.broadcast_to(moved[0], moved.shape))
    centre = moved[0]
  after = file["dino/centering/center_after"]
  np.testing.assert_allclose(centre, after, atol=1e-7)


@pytest.mark.parametrize("name", ["centering", "sinkhorn"])
def test_the_loss_of_crops_is_the_authors(name):
  """Values and gradients of three steps, given the targets."""
  file = published()
  by_crop = lambda x: jnp.float32(x.reshape(-1, 5, 24).swapaxes(0, 1))
  temperature = float(file["dino/student_temp"])

  @jax.jit
  def value_and_grads(p, large, small):
    loss = lambda *x: targets.loss_of_crops(p, *x, temperature).mean()
    return jax.value_and_grad(loss, (0, 1))(large, small)

  for step in range(3):
    stored = lambda key: file[f"dino/{name}/{key}"][step]  # noqa: B023
    large, small = (
      by_crop(file[f"dino/student_{size}_logits"][step])
      for size in ("global", "local")
    )
    # They are stored in the order in which the student learns them.
    p = by_crop(stored("probs"))[:, ::-1]
    value, grads = value_and_grads(p, large, small)
    want = stored("loss_local") + stored("loss_global")
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for got, key in zip(grads, ("grad_global", "grad_local"), strict=True):
      np.testing.assert_allclose(got, by_crop(stored(key)), atol=2e-7)
