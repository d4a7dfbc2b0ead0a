"""KoLeo: values and gradients of the authors' code, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods import on_devices, published

from vit_jax.options import ConfigError
from vit_jax.self_supervised import koleo

FEATURES = np.float32(published()["koleo/features"])


def value(features, num_devices=1, group=None, valid=None):
  """Returns the mean over the batch, and its gradient."""
  if valid is None:
    valid = np.ones(len(features), bool)

  def of_device(features, valid, over):
    total = lambda x: koleo.losses(x, valid, over, group).sum()
    loss, grad = jax.value_and_grad(total)(features)
    count = over.sum(valid.astype(jnp.float32))
    return (over.sum(loss[None]) / count)[None], grad / count

  (loss, *_), grad = on_devices(num_devices, of_device, features, valid)
  return loss, grad


@pytest.mark.parametrize(
  "group, name", [(None, ""), (8, "_two_crops_times_0.1")]
)
def test_loss_and_gradient_are_those_of_the_authors(group, name):
  """Groups stand for their GPUs: two crops, one after the other."""
  factor = 1.0 if group is None else 0.1 * 2
  loss, grad = (factor * x for x in value(FEATURES, 4, group))
  want = published()[f"koleo/loss{name}"]
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  np.testing.assert_allclose(grad, published()[f"koleo/grad{name}"], atol=1e-7)


def test_invalid_rows_are_nobodys_neighbours():
  valid = np.arange(16) < 11
  loss, grad = value(FEATURES, valid=valid)
  want, want_grad = value(FEATURES[:11])
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  np.testing.assert_allclose(grad[:11], want_grad, atol=1e-7)
  assert not grad[11:].any()


def test_equal_rows_have_finite_gradients():
  loss, grad = value(np.ones((4, 3), np.float32))
  assert np.isfinite(loss) and np.isfinite(grad).all()


@pytest.mark.parametrize("rows, group", [(1, None), (4, 1), (5, 4)])
def test_a_row_without_a_neighbour_is_an_error(rows, group):
  with pytest.raises(ConfigError, match="koleo_group"):
    value(np.ones((rows, 3), np.float32), group=group)
