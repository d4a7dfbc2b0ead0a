"""Steps whose first state is placed, not compiled; and what two runs share."""

import jax
import numpy as np
import tiny

from vit_jax import param_groups
from vit_jax.models.stacking import stack_blocks

ONE = jax.devices()[:1]
MESH = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)


def drawn(tree, seed: int = 0):
  """Random arrays of these shapes; those of norms are near 1."""
  rng = np.random.default_rng(seed)

  def draw(path, x):
    return rng.normal(path[-1].key == "scale", 0.1, x.shape).astype("f")

  return jax.tree_util.tree_map_with_path(draw, tree)


def by_path(tree):
  """Returns path, such as "head/kernel" -> leaf."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {param_groups.path_of(path): x for path, x in leaves}


def placed(parts: tiny.Parts, params=None):
  """A state before the first step, which nothing has compiled.

  To compile `parts.state()` takes as long as to compile a step.

  Args:
    parts: Its model, optimizer and mesh.
    params: Parameters to start from, of blocks in a loop; None: random ones.
      All other arrays are zero, but fixed parameters are random, too.
  """
  put = lambda x, like: jax.device_put(np.array(x, like.dtype), like.sharding)
  shapes = parts.shapes
  state = jax.tree.map(lambda x: put(np.zeros(x.shape), x), shapes)
  params = drawn(shapes.params) if params is None else params
  if parts.config.model.scan:
    params = stack_blocks(params, parts.config.model)
  copy = lambda: jax.tree.map(put, params, shapes.params)
  return state.replace(
    params=copy(),
    averages={k: copy() for k in shapes.averages},
    fixed=jax.tree.map(put, drawn(shapes.fixed, seed=1), shapes.fixed),
  )


def assert_losses_are_close(one, other, rtol=1e-5):
  """Compares the metrics of two runs, step by step."""
  losses = [[m["loss"] for m in metrics] for metrics in (one, other)]
  np.testing.assert_allclose(*losses, rtol=rtol)
