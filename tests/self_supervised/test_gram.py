"""Gram anchoring: values and gradients of the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
from methods import published

from vit_jax.self_supervised import gram


def test_loss_and_gradient_are_those_of_the_authors():
  stored = lambda name: jnp.float32(published()[f"gram/{name}"])
  mean = lambda x: gram.losses(x, stored("teacher")).mean()
  loss, grad = jax.jit(jax.value_and_grad(mean))(stored("student"))
  # float32 against float64
  np.testing.assert_allclose(loss, stored("keep_negative/loss"), rtol=3e-7)
  np.testing.assert_allclose(grad, stored("keep_negative/grad"), atol=2e-8)


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
  same = jnp.zeros((1, 6, 2))
  assert gram.resized(same, (2, 3), (2, 3)) is same
