"""GELU and dropout with their derivative, which some chips save."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.models.chip_choices import CHOICES, Choices
from vit_jax.models.gelu_dropout import gelu_dropout, with_saved_slope
from vit_jax.models.noise import draw

X = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 5, 64)), "f")
DRAWS = {"hidden": draw(jax.random.key(0), jnp.arange(4), X.shape[1:])}


def value_and_grad(fn, x, draws, approximate):
  """Returns the results, and the gradient of a sum that is not linear."""

  def total(x):
    y = fn(x, draws, 0.25, approximate)
    return jnp.sum(jnp.sin(y.astype("f"))), y

  (_, y), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
  return np.asarray(y, "f"), np.asarray(grad, "f")


@pytest.mark.parametrize("draws", [DRAWS, {}])
@pytest.mark.parametrize("approximate", [True, False])
def test_the_numbers_are_those_of_autodiff(draws, approximate):
  want = value_and_grad(gelu_dropout, X, draws, approximate)
  got = value_and_grad(with_saved_slope, X, draws, approximate)
  assert (want[0] == 0).mean() == pytest.approx(0.25 if draws else 0, abs=0.03)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-7)
  # 1 + tanh cancels below -3: what is left of it has errors of 2^-24, times x.
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=3e-6)


def test_in_bfloat16_it_is_as_good():
  half = X.astype(jnp.bfloat16)
  exact = value_and_grad(gelu_dropout, half.astype("f"), DRAWS, True)
  auto = value_and_grad(gelu_dropout, half, DRAWS, True)
  saved = value_and_grad(with_saved_slope, half, DRAWS, True)
  error = lambda got: [
    np.sqrt(np.mean((g - e) ** 2)) for g, e in zip(got, exact, strict=True)
  ]
  assert min(error(auto)) > 1e-4
  assert np.all(np.less(error(saved), 1.1 * np.asarray(error(auto))))


def saved_shapes(fn):
  saved = jax.eval_shape(lambda x: jax.vjp(fn, x)[1], X)
  return [x.shape for x in jax.tree.leaves(saved)]


def test_only_in_a_step_on_such_a_chip_the_derivative_is_saved(monkeypatch):
  """It alone: neither x nor what the noise is made of."""
  fn = lambda x: gelu_dropout(x, DRAWS, 0.25, True)
  in_step = tiny.in_step(fn)
  assert len(saved_shapes(in_step)) > 1
  monkeypatch.setitem(CHOICES, "cpu", Choices(save_slope=True))
  assert saved_shapes(tiny.in_step(fn)) == [X.shape]
  assert len(saved_shapes(fn)) > 1
