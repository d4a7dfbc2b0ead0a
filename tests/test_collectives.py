"""What crosses the links, how often, and in which type."""

import collections
import functools

import jax
import pytest
import tiny

from vit_jax import sharding

SENDING = ("all_gather", "reduce_scatter", "psum")
SPLIT = dict(mesh__data=2, mesh__fsdp=4, model__dtype="bfloat16")


@functools.cache
def traced(**changes):
  """Returns the equations of a step, each with the loops that it is in."""
  parts = tiny.Parts(tiny.config(**changes))
  batch = sharding.to_global(tiny.batch(0, parts.config), parts.mesh)
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


@pytest.mark.parametrize("microbatch", [None, 1])
def test_once_a_step(microbatch):
  changes = {"optim__microbatch": microbatch} if microbatch else {}
  counts, in_loops, loops = sent(**SPLIT, **changes)
  assert loops == (microbatch is not None) and in_loops == 0
  # 2 blocks with 6 kernels each, and the embedding's.
  assert counts["all_gather", "bfloat16"] == 13
  assert counts["reduce_scatter", "bfloat16"] == 13
  # Positions and head stay in float32.
  assert counts["all_gather", "float32"] == 2
  assert counts["reduce_scatter", "float32"] == 2


@pytest.mark.parametrize("microbatch", [None, 1])
def test_in_a_scan_a_block_at_a_time(microbatch):
  """Gathered in the forward and in the backward pass, reduced in the latter."""
  counts, in_loops, _ = sent(
    **SPLIT, model__scan=True, optim__microbatch=microbatch
  )
  # 6 kernels of the body, and outside of it the embedding's.
  assert counts["all_gather", "bfloat16"] == 2 * 6 + 1
  assert counts["reduce_scatter", "bfloat16"] == 6 + 1
  # Along `data`, which may join slices, their parts cross after the loops.
  assert in_loops == 3 * 6
  assert counts["psum", "bfloat16"] == 6 + 1
  # Positions and head stay in float32.
  assert counts["all_gather", "float32"] == 2
  assert counts["reduce_scatter", "float32"] == 2


def test_nothing_is_gathered_where_nothing_is_split():
  counts, *_ = sent(mesh__data=8)
  assert {name for name, _ in counts} == {"psum"}


def test_in_float32_beside_an_axis_that_xla_splits():
  counts, *_ = sent(
    mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__dtype="bfloat16"
  )
  assert counts["reduce_scatter", "bfloat16"] == counts["psum", "bfloat16"] == 0
  assert counts["all_gather", "bfloat16"] > 0


def test_kernels_are_gathered_as_matrices():
  """A TPU would pad heads of 64 to 128, and copy them before and after."""
  gathered = [
    equation.invars[0].aval.ndim
    for equation, _ in traced(**SPLIT)
    if equation.primitive.name == "all_gather"
  ]
  assert set(gathered) == {2}


def test_a_barrier_keeps_the_type_of_what_is_sent():
  """And none stands before float32, which XLA would copy for it."""
  made_by, scattered = {}, collections.Counter()
  for equation, _ in traced(**SPLIT):
    made_by |= dict.fromkeys(equation.outvars, equation)
    if equation.primitive.name.startswith("reduce_scatter"):
      (x,) = equation.invars
      while (maker := made_by[x]).primitive.name == "reshape":
        (x,) = maker.invars
      has_barrier = maker.primitive.name == "optimization_barrier"
      scattered[x.aval.dtype.name, has_barrier] += 1
  assert scattered == {("bfloat16", True): 13, ("float32", False): 2}
