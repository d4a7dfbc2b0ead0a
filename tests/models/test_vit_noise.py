"""Randomness and rounding in the Vision Transformer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import ViT

from vit_jax.families.vit import ViTConfig
from vit_jax.models.attention import dot_product_attention
from vit_jax.models.stacking import stack_blocks

TINY = dict(num_classes=5, patch=4, width=8, depth=3, mlp_dim=16, num_heads=2)


def images(number=2):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.uniform(-1, 1, (number, 4, 8, 3)), "float32")


def random_params(model):
  return tiny.random_params(model, images().shape, 0.3)


PARAMS = random_params(ViT(**TINY))


@functools.cache
def compiled(is_training, **options):
  model = ViT(**TINY, **options)
  return jax.jit(functools.partial(model.apply, is_training=is_training))


def apply(x=None, seed=None, is_training=True, **options):
  params = stack_blocks(PARAMS, ViTConfig) if options.get("scan") else PARAMS
  return compiled(is_training, **options)(
    {"params": params},
    images() if x is None else x,
    rngs=None if seed is None else {"dropout": jax.random.key(seed)},
  )


@pytest.mark.slow
def test_dropout_is_off_in_evaluation_and_a_function_of_the_key():
  x = images(200)
  expected, _ = apply(x, is_training=False, scan=True)
  np.testing.assert_array_equal(apply(x, scan=True)[0], expected)  # at rate 0
  options = dict(dropout=0.25, scan=True)  # a scan compiles its draws once
  off, _ = apply(x, is_training=False, stochastic_depth=0.2, **options)
  np.testing.assert_array_equal(off, expected)
  first, again = (apply(x, seed=1, **options)[0] for _ in range(2))
  np.testing.assert_array_equal(first, again)
  other, _ = apply(x, seed=2, **options)
  assert np.abs(first - other).max() > 0.01
  assert np.abs(first - expected).max() > 0.01


def test_dropout_has_the_paper_s_places():
  model = ViT(**TINY, dropout=0.25)

  def fn(key):
    return model.apply(
      {"params": PARAMS}, images(), is_training=True, rngs={"dropout": key}
    )

  text = str(jax.make_jaxpr(fn)(jax.random.key(0)))
  # After the positions; and in each of 3 blocks after attention, GELU and MLP.
  assert text.count(" = ge ") == 1 + 3 * 3


@pytest.mark.slow
def test_dropout_drops_as_often_as_asked():
  _, out = apply(images(200), seed=3, dropout=0.25, scan=True)
  for i in range(3):
    for branch in ("attention", "mlp"):
      zeros = np.mean(out[f"encoderblock_{i}"][branch] == 0)
      # 200 * 3 * 8 draws: a standard deviation of 0.006; 4 of them.
      assert zeros == pytest.approx(0.25, abs=0.025)


@pytest.mark.slow
def test_stochastic_depth():
  number = 2000
  x = images(number)
  _, plain = apply(x, is_training=False, scan=True)
  _, out = apply(x, seed=4, stochastic_depth=0.5, scan=True)
  # Block l of 0, 1, 2 drops a branch of an example with chance 0.5 l / 2.
  for i, rate in enumerate((0.0, 0.25, 0.5)):
    block = out[f"encoderblock_{i}"]
    dropped = {k: np.all(block[k] == 0, (1, 2)) for k in ("attention", "mlp")}
    # Standard deviation at most sqrt(0.25 / 2000) = 0.011; 4 of them.
    for branch in dropped.values():
      assert np.mean(branch) == pytest.approx(rate, abs=0.045 * (rate > 0))
    both = np.mean(dropped["attention"] & dropped["mlp"])
    assert both == pytest.approx(rate**2, abs=0.045 * (rate > 0))
    if i == 1:  # whose input no chance has touched, since block 0 drops none
      survives = ~dropped["attention"]
      np.testing.assert_allclose(
        block["attention"][survives],
        plain["encoderblock_1"]["attention"][survives] / (1 - rate),
        rtol=1e-5,
        atol=1e-5,
      )


@pytest.mark.slow
def test_stochastic_depth_keeps_the_expectation_in_bfloat16():
  # Block 1 of 0, 1, 2 drops with chance 0.1; block 0 drops none.
  x, options = images(2000), dict(dtype="bfloat16", scan=True)
  _, plain = apply(x, is_training=False, **options)
  _, out = apply(x, seed=4, stochastic_depth=0.2, **options)
  expected = np.asarray(plain["encoderblock_1"]["attention"], "d")
  got = np.asarray(out["encoderblock_1"]["attention"], "d")
  survives = ~np.all(got == 0, (1, 2))
  slope = np.sum(got[survives] * expected[survives]) / np.sum(
    expected[survives] ** 2
  )
  # 43,000 numbers that are each rounded by up to 2^-9: a standard deviation of
  # 1e-5. With 0.9 rounded to bfloat16 it is 1.0017 times as large.
  assert slope == pytest.approx(1 / 0.9, rel=1e-4)
  assert out["encoderblock_1"]["after_mlp"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_bfloat16_is_close_and_ends_in_float32():
  def run(dtype):
    model = ViT(**TINY, pool="map", pre_logits=True, dtype=dtype)
    params = random_params(model)
    assert {a.dtype.name for a in jax.tree.leaves(params)} == {"float32"}
    return jax.jit(model.apply)({"params": params}, images())

  expected, _ = run("float32")
  logits, out = run("bfloat16")
  assert out["stem"].dtype == out["with_posemb"].dtype == jnp.bfloat16
  assert out["encoderblock_2"]["after_mlp"].dtype == jnp.bfloat16
  for name in ("encoded", "pooled", "pre_logits", "logits"):
    assert out[name].dtype == jnp.float32, name
  # Eight bits: 2^-9 per rounding, of values up to 3, in some 20 roundings.
  np.testing.assert_allclose(logits, expected, atol=0.06)
  assert np.abs(logits - expected).max() > 1e-5  # it is another arithmetic


def test_attention_in_closed_form():
  rng = np.random.default_rng(0)
  query, key, value = jnp.asarray(rng.normal(size=(3, 2, 5, 3, 4)), "f")
  scores = np.einsum("bqhd,bkhd->bhqk", query, key, dtype="d") / 4**0.5
  weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
  expected = np.einsum("bhqk,bkhd->bqhd", weights, value)
  got = dot_product_attention(query, key, value)
  # Float32 sums of five products of values near 1.
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_scores_are_float32_in_bfloat16():
  # Scores of 200 and 200.5, over sqrt(2): bfloat16 has steps of 1 there, and
  # would make the weights equal.
  query = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
  key = jnp.asarray([[200, 0], [200, 0.5]], jnp.bfloat16).reshape(1, 2, 1, 2)
  value = jnp.asarray([[0, 0], [1, 1]], jnp.bfloat16).reshape(1, 2, 1, 2)
  (got, _) = dot_product_attention(query, key, value).ravel()
  expected = 1 / (1 + np.exp(-0.5 / 2**0.5))
  assert float(got) == pytest.approx(expected, abs=2**-8)
