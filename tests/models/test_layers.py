"""The linear layers of blocks: rows of one matrix in a step on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.models import layers

SPLIT = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 2, 4)), "f")


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
def test_the_numbers_are_those_of_dot_general(layer, dtype):
  layer = layer.clone(dtype=dtype)
  x = SPLIT if isinstance(getattr(layer, "axis", -1), tuple) else SPLIT[:, :, 0]
  params = jax.jit(layer.init)(jax.random.key(0), x)

  def results(params, x):
    def loss(params, x):
      y = layer.apply(params, x)
      return jnp.sum(jnp.sin(y.astype("f"))), y

    grads, y = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    return jax.tree.leaves((grads, y))

  want = jax.jit(results)(params, x)
  got = jax.jit(tiny.in_step(results))(params, x)
  for a, b in zip(got, want, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    # Sums of 4, 8 or 15 products in another order, and their rounding.
    np.testing.assert_allclose(
      np.asarray(a, "f"),
      np.asarray(b, "f"),
      **(
        dict(rtol=1e-5, atol=1e-6)
        if dtype == "float32"
        else dict(rtol=0.01, atol=0.01)
      ),
    )
