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
  """Returns (primitive, type) -> arrays, and whether one is sent in a loop."""
  counts, in_loops, loops_seen = collections.Counter(), 0, 0
  for equation, loops in traced(**changes):
    loops_seen += equation.primitive.name == "scan"
    name = next(
      (s for s in SENDING if equation.primitive.name.startswith(s)), 0
    )
    if name:
      for x in equation.invars:
        counts[name, x.aval.dtype.name] += 1
      in_loops += bool(loops)
  return counts, in_loops, loops_seen


@pytest.mark.parametrize("microbatch", [pytest.param(None, marks=slow), 1])
def test_once_a_step(microbatch):
  counts, in_loops, loops = sent(**SPLIT, optim__microbatch=microbatch)
  assert loops == (microbatch is not None) and in_loops == 0
  # 2 blocks with 6 kernels each, and the embedding's.
  assert counts["all_gather", "bfloat16"] == 13
  assert counts["reduce_scatter", "bfloat16"] == 13
  # Positions and head stay in float32.
  assert counts["all_gather", "float32"] == 2
  assert counts["reduce_scatter", "float32"] == 2


@pytest.mark.parametrize("microbatch", [None, pytest.param(1, marks=slow)])
def test_in_a_scan_a_block_at_a_time(microbatch):
  """Gathered in the forward and in the backward pass, reduced in the latter."""
  changes = dict(model__scan=True, optim__microbatch=microbatch)
  counts, in_loops, _ = sent(**SPLIT, **changes)
  # 6 kernels of the body, and outside of it the embedding's.
  assert counts["all_gather", "bfloat16"] == 2 * 6 + 1
  assert counts["reduce_scatter", "bfloat16"] == 6 + 1
  # Along `data`, which may join slices, their parts cross after the loops.
  assert in_loops == 3 * 6
  assert counts["psum", "bfloat16"] == 6 + 1
  # Positions and head stay in float32.
  assert counts["all_gather", "float32"] == 2
  assert counts["reduce_scatter", "float32"] == 2


@slow
def test_nothing_is_gathered_where_nothing_is_split():
  counts, *_ = sent(mesh__data=8)
  assert {name for name, _ in counts} == {"psum"}


@slow
def test_in_float32_beside_an_axis_that_xla_splits():
  two = dict.fromkeys(("mesh__data", "mesh__fsdp", "mesh__tensor"), 2)
  counts, *_ = sent(**two, model__dtype="bfloat16")
  assert counts["reduce_scatter", "bfloat16"] == counts["psum", "bfloat16"] == 0
  assert counts["all_gather", "bfloat16"] > 0


def test_kernels_are_gathered_as_matrices():
  """A TPU would pad heads of 64 to 128, and copy them before and after."""
  gathered = [
    equation.invars[0].aval.ndim
    for equation, _ in traced(**SPLIT, optim__microbatch=1)
    if equation.primitive.name == "all_gather"
  ]
  assert set(gathered) == {2}


def test_a_barrier_keeps_the_type_of_what_is_sent():
  """And none stands before float32, which XLA would copy for it."""
  made_by, scattered = {}, collections.Counter()
  for equation, _ in traced(**SPLIT, optim__microbatch=1):
    made_by |= dict.fromkeys(equation.outvars, equation)
    if equation.primitive.name.startswith("reduce_scatter"):
      (x,) = equation.invars
      while (maker := made_by[x]).primitive.name == "reshape":
        (x,) = maker.invars
      has_barrier = maker.primitive.name == "optimization_barrier"
      scattered[x.aval.dtype.name, has_barrier] += 1
  assert scattered == {("bfloat16", True): 13, ("float32", False): 2}


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
