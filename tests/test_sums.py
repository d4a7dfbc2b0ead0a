"""Sums over many numbers are in float32, also where products are bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import sharding
from vit_jax.models.encoder import MlpBlock
from vit_jax.objectives import MaskedPatch
from vit_jax.self_supervised.mae import MAE

LONGEST = 16  # addends of a sum in bfloat16


def sums(config):
  """Yields (type, number of addends) of each sum that a step's program has."""
  parts = tiny.Parts(config, jax.devices()[:1])
  batch = sharding.to_global(tiny.batch(0, config), parts.mesh)
  program = jax.make_jaxpr(parts.train_step)(parts.shapes, batch)
  for equation, _ in tiny.equations(program.jaxpr):
    if equation.primitive.name in ("reduce_sum", "cumsum"):
      (x,) = (v.aval for v in equation.invars)
      yield x.dtype.name, x.size // equation.outvars[0].aval.size


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"model__pool": "map", "model__posemb": "learn2d"},
    *(
      pytest.param(changes, marks=pytest.mark.slow)
      for changes in (
        {"model__scan": True},
        {"model__posemb_at": "blocks", "model__dropout": 0.1},
        tiny.HYBRID,
        tiny.RESNET,
      )
    ),
  ],
  ids=str,
)
def test_no_long_sum_in_bfloat16(changes):
  lengths = {*sums(tiny.config(model__dtype="bfloat16", **changes))}
  assert max(n for kind, n in lengths if kind == "float32") > LONGEST
  assert all(n <= LONGEST for kind, n in lengths if kind == "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
  "objective", [MaskedPatch(), MAE(decoder_width=32, decoder_depth=1)], ids=str
)
def test_nor_where_masked_patches_are_predicted(objective):
  config = tiny.config(model__dtype="bfloat16", model__pool="gap")
  config = dataclasses.replace(config, objective=objective)
  assert {kind for kind, n in sums(config) if n > LONGEST} >= {"float32"}
  assert all(n <= LONGEST for kind, n in sums(config) if kind == "bfloat16")


def test_the_gradient_of_a_bias_is_a_sum_in_float32():
  config = tiny.config(model__dtype="bfloat16").model
  block, rng = MlpBlock(config), np.random.default_rng(0)
  x = jnp.zeros((64, 196, config.size.width), "bfloat16")
  params = jax.jit(block.init)(jax.random.key(0), x, {})["params"]
  weights = jnp.asarray(rng.uniform(0, 1, x.shape), x.dtype)

  def loss(params):
    out = block.apply({"params": params}, x, {})
    return (out * weights).astype("float32").sum()

  got = jax.jit(jax.grad(loss))(params)["Dense_1"]["bias"]
  want = np.asarray(weights, "float64").sum((0, 1))
  np.testing.assert_allclose(got, want, rtol=1e-5)
