"""Patches are embedded by a product, as by the convolution it stands for."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.layers import product_of_patches


@pytest.mark.parametrize(
  "patch, sides",
  [(4, (8, 12)), pytest.param(1, (3, 5), marks=pytest.mark.slow)],
)
def test_the_product_is_the_convolution(patch, sides):
  """To 1e-5: float32 (eps 1.2e-7), up to 48 terms added in another order."""
  images = jax.random.normal(jax.random.key(0), (2, *sides, 3))
  both = [
    nn.Conv(7, (patch,) * 2, (patch,) * 2, "VALID", **options)
    for options in ({}, {"conv_general_dilated": product_of_patches})
  ]
  params = both[0].init(jax.random.key(1), images)

  def out_and_grads(module):
    def loss(params, images):
      out = module.apply(params, images)
      return jnp.sum(jnp.sin(out)), out

    grad = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    return grad(params, images)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    *map(out_and_grads, both),
  )
