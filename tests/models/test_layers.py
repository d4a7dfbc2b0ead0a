"""Linear layers as products of matrices: numbers, types and gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.models import layers

SPLIT = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 2, 4)), "f")


def results(layer, params, x):
  """Returns the output, and gradients of parameters and input."""

  def loss(params, x):
    y = layer.apply(params, x)
    return jnp.sum(jnp.sin(y.astype("f"))), y

  grads, y = jax.grad(loss, (0, 1), has_aux=True)(params, x)
  return jax.tree.leaves((grads, y))


def assert_close(got, want, tolerance):
  for a, b in zip(got, want, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = np.asarray(a, "f"), np.asarray(b, "f")
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
  "layer",
  [
    layers.Dense(6),
    layers.DenseGeneral((2, 3)),
    layers.DenseGeneral(6, (-2, -1)),
  ],
)
@pytest.mark.parametrize(
  "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_rows_of_one_matrix_in_a_step_give_the_same(layer, dtype):
  layer = layer.clone(dtype=dtype)
  x = SPLIT if isinstance(getattr(layer, "axis", -1), tuple) else SPLIT[:, :, 0]
  params = jax.jit(layer.init)(jax.random.key(0), x)
  fn = lambda params, x: results(layer, params, x)
  got, want = jax.jit(tiny.in_step(fn))(params, x), jax.jit(fn)(params, x)
  # Sums of 4, 8 or 15 products in another order, and their rounding.
  assert_close(got, want, 1e-5 if dtype == "float32" else 0.01)


def test_patches_are_embedded_as_by_the_convolution():
  images = jax.random.normal(jax.random.key(0), (2, 8, 12, 3))
  sizes = 7, (4, 4), (4, 4), "VALID"
  by_product = layers.product_of_patches
  modules = nn.Conv(*sizes, conv_general_dilated=by_product), nn.Conv(*sizes)
  params = modules[0].init(jax.random.key(1), images)
  fn = jax.jit(results, static_argnums=0)
  got, want = (fn(module, params, images) for module in modules)
  # 48 terms of float32 in another order.
  assert_close(got, want, 1e-5)
