"""KoLeo: values and gradients of the authors' code, on any mesh."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.collectives import Over
from vit_jax.options import ConfigError
from vit_jax.self_supervised import koleo
from vit_jax.sharding import AXES

FILE = pathlib.Path(__file__).parents[1] / "data" / "ssl_dino.npz"


def value(features, num_devices=1, group=None, valid=None):
  """Returns the mean over the batch, and its gradient."""
  if valid is None:
    valid = np.ones(len(features), bool)
  devices = np.array(jax.devices()[:num_devices]).reshape(-1, 1, 1)
  mesh = jax.sharding.Mesh(devices, AXES)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("data"), P("data")),
    out_specs=(P(), P("data")),
    check_vma=False,
  )
  def on_devices(features, valid):
    over = Over()
    total = lambda x: koleo.losses(x, valid, over, group).sum()
    loss, grad = jax.value_and_grad(total)(features)
    count = over.sum(valid.astype(jnp.float32))
    return over.sum(loss[None]) / count, grad / count

  return jax.jit(on_devices)(features, valid)


@pytest.fixture(scope="module")
def published():
  with np.load(FILE) as file:
    return {k: file[k].astype(np.float32) for k in file if "koleo/" in k}


def test_loss_and_gradient_are_those_of_the_authors(published):
  loss, grad = value(published["koleo/features"], 4)
  np.testing.assert_allclose(loss, published["koleo/loss"], rtol=1e-6)
  np.testing.assert_allclose(grad, published["koleo/grad"], atol=1e-7)


def test_groups_stand_for_the_authors_gpus(published):
  """Two crops, one after the other, each a group."""
  loss, grad = value(published["koleo/features"], 4, 8)
  want = published["koleo/loss_two_crops_times_0.1"]
  np.testing.assert_allclose(0.1 * 2 * loss, want, rtol=1e-6)
  want = published["koleo/grad_two_crops_times_0.1"]
  np.testing.assert_allclose(0.1 * 2 * grad, want, atol=1e-7)


def test_invalid_rows_are_nobodys_neighbours(published):
  features = published["koleo/features"]
  valid = np.arange(16) < 11
  loss, grad = value(features, valid=valid)
  want, want_grad = value(features[:11])
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
