"""Attention in training: in pieces, and without keeping its scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.models import attention

MESH = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
QKV = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 9, 2, 4)), "f")


def loss(attend):
  return lambda qkv: jnp.sum(jnp.sin(attend(*qkv, None)))


def on_a_device(fn):
  """As in the step: the images are the device's own."""
  return jax.shard_map(
    fn, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False
  )


def products(fn) -> int:
  def count(jaxpr) -> int:
    inner = [
      getattr(v, "jaxpr", v) for e in jaxpr.eqns for v in e.params.values()
    ]
    here = sum(e.primitive.name == "dot_general" for e in jaxpr.eqns)
    return here + sum(count(j) for j in inner if hasattr(j, "eqns"))

  return count(jax.make_jaxpr(fn)(QKV).jaxpr)


# Of 6 images; 2 heads x 9 x 9 scores are of one.
@pytest.mark.parametrize(
  "max_scores, pieces", [(10**6, 1), (3 * 162, 2), (5 * 162, 2), (1, 6)]
)
def test_pieces_are_the_whole(monkeypatch, max_scores, pieces):
  whole = jax.value_and_grad(loss(attention.dot_product_attention))(QKV)
  monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
  fn = on_a_device(loss(attention.attend))
  assert products(fn) == 2 * pieces
  got = jax.value_and_grad(fn)(QKV)
  # The same products of the same numbers; only sums over images differ.
  np.testing.assert_allclose(got[0], whole[0], rtol=1e-5)
  np.testing.assert_allclose(got[1], whole[1], rtol=1e-5, atol=1e-6)


def test_images_that_may_be_elsewhere_are_not_sliced(monkeypatch):
  monkeypatch.setattr(attention, "MAX_SCORES", 1)
  assert products(loss(attention.attend)) == 2


def test_the_backward_pass_keeps_no_scores():
  def largest_kept(attend):
    _, backward = jax.vjp(loss(attend), QKV)
    return max(x.size for x in jax.tree.leaves(backward))

  scores = 6 * 2 * 9 * 9
  assert largest_kept(attention.dot_product_attention) >= scores
  assert largest_kept(attention.attend) < scores
