"""Layers that a step computes otherwise: numbers, types and gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.models import layers
from vit_jax.models.chip_choices import CHOICES, Choices
from vit_jax.models.gelu_dropout import gelu_dropout, with_saved_slope
from vit_jax.models.noise import draw

SPLIT = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 2, 4)), "f")


def results(fn, *args):
  """Returns the result, and the gradients of a sum that is not linear."""

  def loss(*args):
    y = fn(*args)
    return jnp.sum(jnp.sin(y.astype("f"))), y

  numbers = tuple(range(len(args)))
  grads, y = jax.grad(loss, numbers, has_aux=True)(*args)
  return jax.tree.leaves((y, grads))


def assert_close(got, want, tolerance):
  for a, b in zip(got, want, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = np.asarray(a, "f"), np.asarray(b, "f")
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Linear layers as products of matrices.


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
  fn = lambda params, x: results(layer.apply, params, x)
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
  got, want = (fn(module.apply, params, images) for module in modules)
  # 48 terms of float32 in another order.
  assert_close(got, want, 1e-5)


# GELU and dropout with their derivative, which some chips save.

X = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 5, 64)), "f")
DRAWS = {"hidden": draw(jax.random.key(0), jnp.arange(4), X.shape[1:])}


def of_gelu(fn, x, draws, approximate):
  gelu = lambda x: fn(x, draws, 0.25, approximate)
  got = jax.jit(lambda x: results(gelu, x))(x)
  return [np.asarray(y, "f") for y in got]


@pytest.mark.parametrize("draws", [DRAWS, {}])
@pytest.mark.parametrize("approximate", [True, False])
def test_the_numbers_are_those_of_autodiff(draws, approximate):
  want = of_gelu(gelu_dropout, X, draws, approximate)
  got = of_gelu(with_saved_slope, X, draws, approximate)
  assert (want[0] == 0).mean() == pytest.approx(0.25 if draws else 0, abs=0.03)
  # 1 + tanh cancels below -3: what is left of it has errors of 2^-24, times x.
  assert_close(got, want, 3e-6)


def test_in_bfloat16_it_is_as_good():
  half = X.astype(jnp.bfloat16)
  exact = of_gelu(gelu_dropout, half.astype("f"), DRAWS, True)

  def errors(fn):
    got = zip(of_gelu(fn, half, DRAWS, True), exact, strict=True)
    return np.array([np.sqrt(np.mean((g - e) ** 2)) for g, e in got])

  assert errors(gelu_dropout).min() > 1e-4
  assert np.all(errors(with_saved_slope) < 1.1 * errors(gelu_dropout))


def saved_shapes(fn):
  saved = jax.eval_shape(lambda x: jax.vjp(fn, x)[1], X)
  return [x.shape for x in jax.tree.leaves(saved)]


def test_only_in_a_step_on_such_a_chip_the_derivative_is_saved(monkeypatch):
  """It alone: neither x nor what the noise is made of."""
  fn = lambda x: gelu_dropout(x, DRAWS, 0.25, True)
  assert len(saved_shapes(tiny.in_step(fn))) > 1
  monkeypatch.setitem(CHOICES, "cpu", Choices(save_slope=True))
  assert saved_shapes(tiny.in_step(fn)) == [X.shape]
  assert len(saved_shapes(fn)) > 1
