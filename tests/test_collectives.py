"""What a step sends and sums, how often, and in which type."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import sharding
from vit_jax.models.encoder import MlpBlock
from vit_jax.objectives import MaskedPatch
from vit_jax.self_supervised.mae import MAE

SENDING = ("all_gather", "reduce_scatter", "psum")
SPLIT = dict(mesh__data=2, mesh__fsdp=4, model__dtype="bfloat16")
LONGEST = 16  # addends of a sum in bfloat16
slow = pytest.mark.slow


@functools.cache
def traced(objective=None, devices=None, **changes):
  """Returns the equations of a step, each with the loops that it is in."""
  config = tiny.config(**changes)
  if objective:
    config = dataclasses.replace(config, objective=objective)
  parts = tiny.Parts(config, jax.devices()[:devices])
  batch = sharding.to_global(tiny.batch(0, config), parts.mesh)
  jaxpr = jax.make_jaxpr(parts.train_step)(parts.shapes, batch)
  return [*tiny.equations(jaxpr.jaxpr)]


def sent(**changes):
  """Returns (primitive, type) -> arrays, and how many are sent in a loop."""
  counts, in_loops = collections.Counter(), 0
  for equation, loops in traced(**changes):
    name = next(
      (s for s in SENDING if equation.primitive.name.startswith(s)), None
    )
    if name:
      counts.update((name, x.aval.dtype.name) for x in equation.invars)
      in_loops += bool(loops)
  return counts, in_loops


@pytest.mark.parametrize(
  "scan, kernels, in_loops",
  [
    # 2 blocks with 6 kernels each, and the embedding's: once a step.
    (False, 2 * 6 + 1, 0),
    # A block at a time: gathered in both passes, reduced in the backward one.
    (True, 6 + 1, 3 * 6),
  ],
)
def test_kernels_are_sent_in_bfloat16(scan, kernels, in_loops):
  counts, looped = sent(**SPLIT, optim__microbatch=1, model__scan=scan)
  assert looped == in_loops
  assert counts["reduce_scatter", "bfloat16"] == kernels
  assert counts["all_gather", "bfloat16"] == kernels + 6 * scan
  # Positions and head stay in float32.
  assert counts["reduce_scatter", "float32"] == 2
  assert counts["all_gather", "float32"] == 2


@pytest.mark.parametrize(
  "changes",
  [
    SPLIT | {"optim__microbatch": 1},
    *(
      pytest.param({"devices": 1, "model__dtype": "bfloat16", **x}, marks=slow)
      for x in (
        {"model__pool": "map", "model__posemb": "learn2d"},
        {"model__posemb_at": "blocks", "model__dropout": 0.1},
        {"objective": MaskedPatch(), "model__pool": "gap"},
        {
          "objective": MAE(decoder_width=32, decoder_depth=1),
          "model__pool": "gap",
        },
        tiny.HYBRID,
        tiny.RESNET,
      )
    ),
  ],
  ids=str,
)
def test_no_long_sum_in_bfloat16(changes):
  lengths = set()
  for equation, _ in traced(**changes):
    if equation.primitive.name in ("reduce_sum", "cumsum"):
      (x,) = (v.aval for v in equation.invars)
      size = x.size // equation.outvars[0].aval.size
      lengths.add((x.dtype.name, size))
  assert max(n for kind, n in lengths if kind == "float32") > LONGEST
  assert all(n <= LONGEST for kind, n in lengths if kind == "bfloat16")


@slow
def test_the_gradient_of_a_bias_is_a_sum_in_float32():
  config = tiny.config(model__dtype="bfloat16").model
  block, rng = MlpBlock(config), np.random.default_rng(0)
  x = jnp.zeros((64, 196, config.size.width), "bfloat16")
  shapes = jax.eval_shape(block.init, jax.random.key(0), x, {})["params"]
  params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
  weights = jnp.asarray(rng.uniform(0, 1, x.shape), x.dtype)

  def loss(params):
    out = block.apply({"params": params}, x, {})
    return (out * weights).astype("float32").sum()

  got = jax.jit(jax.grad(loss))(params)["Dense_1"]["bias"]
  want = np.asarray(weights, "float64").sum((0, 1))
  np.testing.assert_allclose(got, want, rtol=1e-5)
