"""Rotary positions: stored periods, and coordinates rescaled in training.

test_transformer.py has the formula.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from vit_jax.families import model_config
from vit_jax.models import build
from vit_jax.models.stacking import stack_blocks
from vit_jax.zoo.models import rope

modern = functools.partial(
  model_config,
  name="modern",
  variant="B/4",
  width=32,
  depth=2,
  mlp_dim=24,
  num_heads=2,
  posemb="none",
  rope="dinov3",
)
IMAGES = jnp.asarray(
  np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)), "f"
)
PARAMS = tiny.random_params(build(modern(), 5), IMAGES.shape)


def test_periods_may_be_rounded_as_they_are_stored():
  exact, rounded = (
    rope.angles("dinov3", (2, 1), 64, t)[0, :16]
    for t in ("float32", "bfloat16")
  )
  periods = -np.pi / rounded  # y = -1/2
  stored = (100 ** (np.arange(16) / 16)).astype(ml_dtypes.bfloat16)
  np.testing.assert_allclose(periods, stored.astype("f"), rtol=1e-12)
  assert 1e-3 < np.abs(exact / rounded - 1).max() < 2**-8


def test_a_factor_for_each_block_rescales_the_coordinates(monkeypatch):
  """In training only; the factors are the same for all records."""
  factors, rescaled = [], rope.Angles.rescaled

  def observed(self, factor):
    factors.append(factor)
    return rescaled(self, factor)

  monkeypatch.setattr(rope.Angles, "rescaled", observed)
  model = build(modern(rope_rescale=2.0), 5)

  def factors_of(records, is_training=True):
    rngs = {"dropout": jax.random.key(0)}
    kwargs = dict(is_training=is_training, records=records, rngs=rngs)
    factors.clear()
    model.apply({"params": PARAMS}, IMAGES, **kwargs)
    return list(factors)

  first, second = jax.jit(factors_of)(jnp.array([0, 1]))
  assert [first, second] == jax.jit(factors_of)(jnp.array([7, 3]))
  assert first != second and all(0.5 <= x <= 2.0 for x in (first, second))
  assert not jax.eval_shape(lambda x: factors_of(x, False), jnp.array([0, 1]))
  assert modern(rope_rescale=2.0).for_inference() == modern()


def test_rescaled_angles():
  table = rope.unscaled(modern(), (4, 6), 25)
  got, want = (
    table.rescaled(jnp.float32(1)),
    rope.rotation(modern(), (4, 6), 25),
  )
  np.testing.assert_allclose(got.cos, want.cos, atol=2e-6)
  np.testing.assert_allclose(got.sin, want.sin, atol=2e-6)
  half = table.rescaled(jnp.float32(0.5))
  # cos(x) = 2 cos(x / 2)^2 - 1
  np.testing.assert_allclose(2 * half.cos**2 - 1, want.cos, atol=4e-6)


@pytest.mark.slow
def test_a_scan_has_the_same_factors():
  def logits(seed=0, **options):
    options = modern(rope_rescale=2.0, **options)
    params = stack_blocks(PARAMS, options) if options.scan else PARAMS
    rngs = {"dropout": jax.random.key(seed)}
    apply = functools.partial(build(options, 5).apply, is_training=True)
    with jax.default_matmul_precision("highest"):
      return jax.jit(apply)({"params": params}, IMAGES, rngs=rngs)[0]

  np.testing.assert_allclose(logits(scan=True), logits(), atol=1e-5)
  assert np.abs(logits(seed=1) - logits()).max() > 1e-3
