"""GELU and dropout with their derivative, which some chips keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.models import hidden_by_chip
from vit_jax.models.hidden_by_chip import hidden, with_slope
from vit_jax.models.noise import draw

X = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 5, 64)), "f")
DRAWS = {"hidden": draw(jax.random.key(0), jnp.arange(4), X.shape[1:])}
MESH = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


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
  want = value_and_grad(hidden, X, draws, approximate)
  got = value_and_grad(with_slope, X, draws, approximate)
  assert (want[0] == 0).mean() == pytest.approx(0.25 if draws else 0, abs=0.03)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-7)
  # 1 + tanh cancels below -3: what is left of it has errors of 2^-24, times x.
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=3e-6)


def test_in_bfloat16_it_is_as_good():
  half = X.astype(jnp.bfloat16)
  exact = value_and_grad(hidden, half.astype("f"), DRAWS, True)
  auto = value_and_grad(hidden, half, DRAWS, True)
  kept = value_and_grad(with_slope, half, DRAWS, True)
  error = lambda got: [
    np.sqrt(np.mean((g - e) ** 2)) for g, e in zip(got, exact, strict=True)
  ]
  assert min(error(auto)) > 1e-4
  assert np.all(np.less(error(kept), 1.1 * np.asarray(error(auto))))


def test_what_is_kept():
  """The derivative alone: neither x nor what the noise is made of."""
  fn = lambda x: with_slope(x, DRAWS, 0.25, True)
  kept = jax.eval_shape(lambda x: jax.vjp(fn, x)[1], X)
  assert [x.shape for x in jax.tree.leaves(kept)] == [X.shape]


def test_only_in_a_step_on_such_a_chip(monkeypatch):
  used = []

  def spy(*args):
    used.append(1)
    return with_slope(*args)

  monkeypatch.setattr(hidden_by_chip, "with_slope", spy)

  def use(in_step: bool):
    fn = lambda x: hidden(x, DRAWS, 0.25, True)
    if in_step:
      fn = jax.shard_map(
        fn, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False
      )
    jax.eval_shape(fn, X)

  use(in_step=True)
  monkeypatch.setattr(hidden_by_chip, "KEEP_SLOPE", ("cpu",))
  use(in_step=False)
  assert not used
  use(in_step=True)
  assert used
