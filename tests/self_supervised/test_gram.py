"""Gram anchoring: values and gradients of the authors' code."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.self_supervised import gram

FILE = pathlib.Path(__file__).parents[1] / "data" / "ssl_dino.npz"


def test_loss_and_gradient_are_those_of_the_authors():
  with np.load(FILE) as file:
    data = {k: file[k].astype(np.float32) for k in file if "gram/" in k}
  student, teacher = (
    jnp.asarray(data[k]) for k in ("gram/student", "gram/teacher")
  )
  loss, grad = jax.value_and_grad(lambda x: gram.losses(x, teacher).mean())(
    student
  )
  # float32 against float64
  np.testing.assert_allclose(loss, data["gram/default/loss"], rtol=3e-7)
  np.testing.assert_allclose(grad, data["gram/default/grad"], atol=2e-8)


def test_features_on_a_finer_grid_are_downsampled_as_images():
  x = jax.random.normal(jax.random.key(0), (2, 6 * 8, 5))
  got = gram.resized(x, (6, 8), (3, 4)).reshape(2, 3, 4, 5)
  image = x.reshape(2, 6, 8, 5)
  want = jax.image.resize(image, (2, 3, 4, 5), "bicubic", antialias=True)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert gram.resized(x, (6, 8), (6, 8)) is x
