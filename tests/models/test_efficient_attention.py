"""Attention in training: its custom gradient, and attention in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax.config import model_config
from vit_jax.models.attention import dot_product_attention
from vit_jax.models.chip_choices import CHOICES, Choices
from vit_jax.models.efficient_attention import attend
from vit_jax.models.encoder import (
  PLACES,
  EncoderBlock,
  MultiHeadDotProductAttention,
)
from vit_jax.models.noise import draw_all

QKV = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 9, 2, 4)), "f")
TOKENS = QKV.reshape(3, 6, 9, 8)[0]


def loss(fn, *args):
  return lambda qkv: jnp.sum(jnp.sin(fn(*qkv, *args).astype("f")))


def num_products(fn, *args) -> int:
  equations = tiny.equations(jax.make_jaxpr(fn)(*args).jaxpr)
  return sum(e.primitive.name == "dot_general" for e, _ in equations)


@pytest.mark.parametrize("save_weights", [True, False])
def test_the_gradient_is_that_of_the_formula(save_weights):
  plain = loss(dot_product_attention)
  want = jax.jit(jax.value_and_grad(plain))(QKV)
  got = jax.jit(jax.value_and_grad(loss(attend, save_weights)))(QKV)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
  # Rounding of sums over 9 keys.
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("save_weights", [True, False])
def test_the_gradient_in_bfloat16_is_as_good(save_weights):
  """Its error against float32 is that of autodiff in bfloat16, or less."""

  # Without the barrier, XLA for CPUs (jax 0.12) picks a product it lacks.
  def loss(fn, *args):
    barrier = jax.lax.optimization_barrier
    rounded = lambda qkv: barrier(fn(*qkv, *args)).astype("f")
    return lambda qkv: jnp.sum(jnp.sin(rounded(qkv)))

  exact = jax.jit(jax.grad(loss(dot_product_attention)))(QKV)
  half = QKV.astype(jnp.bfloat16)

  def error(fn, *args):
    got = jax.jit(jax.grad(loss(fn, *args)))(half)
    return jnp.sqrt(jnp.mean((got.astype("f") - exact) ** 2))

  auto = error(dot_product_attention)
  assert auto > 1e-3
  assert error(attend, save_weights) < 1.1 * auto


@pytest.mark.parametrize("save_weights", [True, False])
def test_the_backward_pass_gets_weights_only_where_they_are_saved(save_weights):
  fn = loss(attend, save_weights)
  saved = jax.eval_shape(lambda qkv: jax.vjp(fn, qkv)[1], QKV)
  largest = max(x.size for x in jax.tree.leaves(saved))
  assert (largest >= 6 * 2 * 9 * 9) == save_weights


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
  shapes = jax.eval_shape(
    lambda key: module.init(key, TOKENS, None, {}, None), jax.random.key(0)
  )
  numbers = np.random.default_rng(1)
  variables = jax.tree.map(
    lambda x: numbers.normal(0, 0.3, x.shape).astype("f"), shapes
  )

  def fn(variables, tokens, draws):
    return module.apply(variables, tokens, jnp.float32(0.5), draws, None)

  return fn, variables


def drawn():
  shapes = {place: (9, 8) for place in ("attention", "hidden", "mlp")}
  shapes["skip_attention"] = (1, 1)
  keys = jax.random.split(jax.random.key(1), 1)
  draws = draw_all(keys, jnp.arange(6), PLACES, shapes)
  return jax.tree.map(lambda x: x[0], draws)


def of_block(relative):
  """Returns the sum of what a block gives, and the arguments it is taken at."""
  fn, variables = block(relative)

  def loss(variables, tokens, draws):
    tokens, out = fn(variables, tokens, draws)
    return jnp.sum(jnp.sin(tokens)), out

  return loss, (variables, TOKENS, drawn())


def grad(fn):
  return jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))


# 6 images, each with 2 heads x 9 x 9 scores.
@pytest.mark.parametrize(
  "max_scores, relative",
  [
    pytest.param(5 * 162, True, marks=pytest.mark.slow),  # two chunks
    pytest.param(1, False, marks=pytest.mark.nightly),  # each image alone
  ],
)
def test_chunks_give_the_numbers_of_the_whole(
  monkeypatch, max_scores, relative
):
  loss, args = of_block(relative)
  (_, want_out), want = grad(loss)(*args)
  monkeypatch.setitem(CHOICES, "cpu", Choices(max_scores=max_scores))
  in_step = tiny.in_step(loss)
  assert num_products(in_step, *args) > num_products(loss, *args)
  got = grad(in_step)(*args)
  # The same products of the same numbers, in kernels for other numbers of
  # rows, and sums over images in another order: roundings of terms that are at
  # most as large as the largest number. What should be zero, as the gradient of
  # the key's bias, is rounding alone.
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
  count = lambda fn: num_products(fn, variables, TOKENS, drawn())
  whole = count(fn)
  assert count(tiny.in_step(fn)) == whole
  monkeypatch.setitem(CHOICES, "cpu", Choices(max_scores=1))
  assert count(tiny.in_step(fn)) > 3 * whole  # each of six images
  assert count(fn) == whole


@pytest.mark.slow
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
