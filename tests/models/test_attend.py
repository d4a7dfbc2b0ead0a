"""Attention in training: its custom gradient, and attention in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax.config import model_config
from vit_jax.models import attention_by_chip
from vit_jax.models.attention import dot_product_attention
from vit_jax.models.encoder import (
  PLACES,
  EncoderBlock,
  MultiHeadDotProductAttention,
)
from vit_jax.models.noise import draw_all

MESH = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
QKV = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 9, 2, 4)), "f")
TOKENS = QKV.reshape(3, 6, 9, 8)[0]


def loss(attend, *args):
  return lambda qkv: jnp.sum(jnp.sin(attend(*qkv, *args).astype("f")))


def on_a_device(fn):
  """Wraps `fn` as the step does, where images are the device's own."""
  return jax.shard_map(
    fn, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False
  )


def products(fn, *args) -> int:
  def count(jaxpr) -> int:
    inner = [
      getattr(v, "jaxpr", v) for e in jaxpr.eqns for v in e.params.values()
    ]
    here = sum(e.primitive.name == "dot_general" for e in jaxpr.eqns)
    return here + sum(count(j) for j in inner if hasattr(j, "eqns"))

  return count(jax.make_jaxpr(fn)(*args).jaxpr)


@pytest.mark.parametrize("keep", [True, False])
def test_the_gradient_is_that_of_the_formula(keep):
  plain = loss(dot_product_attention)
  want = jax.jit(jax.value_and_grad(plain))(QKV)
  got = jax.jit(jax.value_and_grad(loss(attention_by_chip.attend, keep)))(QKV)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
  # Rounding of sums over 9 keys.
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
def test_the_gradient_in_bfloat16_is_as_good(keep):
  """Its error against float32 is that of autodiff in bfloat16, or less."""

  # Without the barrier, XLA for CPUs (jax 0.12) picks a product it lacks.
  def loss(attend, *args):
    barrier = jax.lax.optimization_barrier
    fn = lambda qkv: barrier(attend(*qkv, *args)).astype("f")
    return lambda qkv: jnp.sum(jnp.sin(fn(qkv)))

  exact = jax.jit(jax.grad(loss(dot_product_attention)))(QKV)
  half = QKV.astype(jnp.bfloat16)

  def error(fn, *args):
    got = jax.jit(jax.grad(loss(fn, *args)))(half)
    return jnp.sqrt(jnp.mean((got.astype("f") - exact) ** 2))

  auto = error(dot_product_attention)
  assert auto > 1e-3
  assert error(attention_by_chip.attend, keep) < 1.1 * auto


@pytest.mark.parametrize("keep", [True, False])
def test_the_backward_pass_keeps_weights_only_if_told(keep):
  fn = loss(attention_by_chip.attend, keep)
  kept = jax.eval_shape(lambda qkv: jax.vjp(fn, qkv)[1], QKV)
  largest = max(x.size for x in jax.tree.leaves(kept))
  assert (largest >= 6 * 2 * 9 * 9) == keep


def block(relative: bool):
  """Returns a block and its variables; it takes (tokens, draws)."""
  options = model_config(
    "vit",
    width=8,
    depth=1,
    num_heads=2,
    mlp_dim=8,
    dropout=0.5,
    pool="gap",
    posemb="relative" if relative else "learn",
  )
  module = EncoderBlock(options, (3, 3))
  variables = jax.jit(module.init)(jax.random.key(0), TOKENS, None, {}, None)

  def fn(variables, tokens, draws):
    return module.apply(variables, tokens, jnp.float32(0.5), draws, None)

  return fn, variables


def drawn():
  shapes = {place: (9, 8) for place in ("attention", "hidden", "mlp")}
  shapes["skip_attention"] = (1, 1)
  keys = jax.random.split(jax.random.key(1), 1)
  draws = draw_all(keys, jnp.arange(6), PLACES, shapes)
  return jax.tree.map(lambda x: x[0], draws)


# 6 images, each with 2 heads x 9 x 9 scores.
@pytest.mark.parametrize(
  "max_scores, pieces", [(10**6, 1), (3 * 162, 2), (5 * 162, 2), (1, 6)]
)
@pytest.mark.parametrize(
  "relative", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_pieces_are_the_whole(monkeypatch, max_scores, pieces, relative):
  fn, variables = block(relative)

  def loss(variables, tokens, draws):
    tokens, out = fn(variables, tokens, draws)
    return jnp.sum(jnp.sin(tokens)), out

  grad = lambda fn: jax.jit(
    jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)
  )
  args = (variables, TOKENS, drawn())
  whole = grad(loss)(*args)
  monkeypatch.setattr(attention_by_chip, "FAST_MEMORY", ("cpu",))
  monkeypatch.setattr(attention_by_chip, "MAX_SCORES", max_scores)
  in_step = on_a_device(loss)
  of_mlp = 2
  assert products(in_step, *args) - of_mlp == pieces * (
    products(loss, *args) - of_mlp
  )
  got = grad(in_step)(*args)
  # The same products of the same numbers, in kernels for other numbers of
  # rows, and sums over images in another order: roundings of terms that are at
  # most as large as the largest number. What should be zero, as the gradient of
  # the key's bias, is rounding alone.
  (_, want_out), want = whole
  (_, got_out), got = got
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6 * np.abs(w).max()),
    got_out,
    want_out,
  )
  largest = max(np.abs(w).max() for w in jax.tree.leaves(want))
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6 * largest),
    got,
    want,
  )


def test_only_in_a_step_on_such_a_chip(monkeypatch):
  """Elsewhere images may be spread over devices, or their number be unknown."""
  fn, variables = block(False)
  monkeypatch.setattr(attention_by_chip, "MAX_SCORES", 1)
  count = lambda wrap: products(wrap(fn), variables, TOKENS, drawn())
  attention, mlp = 4 + 2, 2
  assert count(on_a_device) == attention + mlp
  monkeypatch.setattr(attention_by_chip, "FAST_MEMORY", ("cpu",))
  assert count(on_a_device) == 6 * attention + mlp
  assert count(lambda fn: fn) == attention + mlp


def test_outside_of_a_step_it_differentiates_forwards_and_twice():
  module = MultiHeadDotProductAttention(2)
  variables = jax.jit(module.init)(jax.random.key(0), TOKENS, TOKENS)
  fn = lambda x: jnp.sum(jnp.sin(module.apply(variables, x, x)))
  twice = jax.jit(lambda x: jax.jvp(jax.grad(fn), (x,), (x,))[1])(TOKENS)
  step = 1e-2
  near = [jax.jit(jax.grad(fn))(TOKENS * (1 + s)) for s in (step, -step)]
  slope = (near[0] - near[1]) / (2 * step)
  # Error of a difference quotient: step squared, and rounding over the step.
  np.testing.assert_allclose(twice, slope, rtol=1e-3, atol=3e-3)
