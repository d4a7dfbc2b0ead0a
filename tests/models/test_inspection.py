"""Attention distances and filters in closed forms; models without them.

test_transformer.py compares weights, maps and tables of positions.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.families.resnet import BiTConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models import inspection
from vit_jax.models.filters import filters_of, principal_components


def test_a_model_without_attention_is_refused():
  options = BiTConfig(variant="R26x0.5", stage_blocks=(1,))
  for function in inspection.attention_of, inspection.attention_map:
    with pytest.raises(ValueError, match="R26x0.5, which has no attention"):
      function(options, {"head": {}}, jnp.zeros((1, 8, 8, 3)))


@pytest.mark.parametrize("grid, has_cls", [((2, 5), 1), ((1, 4), 0)])
def test_uniform_attention_has_the_mean_distance_of_the_grid(grid, has_cls):
  rows, columns = grid
  # The distances of all offsets, by how often they occur, over n^2.
  total = sum(
    (rows - abs(y)) * (columns - abs(x)) * (y * y + x * x) ** 0.5
    for y in range(1 - rows, rows)
    for x in range(1 - columns, columns)
  )
  n = rows * columns + has_cls
  uniform = jnp.full((2, 3, n, n), 1 / n)  # images, heads
  got = inspection.mean_distance(uniform, grid, (16, 16))
  assert got.shape == (2, 3)
  np.testing.assert_allclose(got, 16 * total / (rows * columns) ** 2, rtol=1e-6)


@pytest.mark.parametrize("y, x, far", [(0, 1, 14), (1, 1, 452**0.5)])
def test_one_neighbour_is_a_patch_away(y, x, far):
  """Each patch of 3 x 4 to one (y, x) away, or its mirror at the border."""
  weights = np.zeros((1, 1, 13, 13), "f")
  weights[..., 0] = 0.75  # the class token takes most, and does not count
  for row, column in np.ndindex(3, 4):
    to_y = row + y if row + y < 3 else row - y
    to_x = column + x if column + x < 4 else column - x
    weights[0, 0, 1 + 4 * row + column, 1 + 4 * to_y + to_x] = 0.25
  weights[0, 0, 5, 1:] = 0  # nor does a patch that sees nothing else
  got = inspection.mean_distance(jnp.asarray(weights), (3, 4), (16, 14))
  np.testing.assert_allclose(got, far, rtol=1e-6)


# Filters of a first layer.


def test_components_are_those_of_known_filters():
  """Filters a + 3 c1 u + c2 v for right angles u and v, with c of mean 0."""
  u, v = np.zeros((2, 2, 2, 3))
  u[0, 0], v[1, 1] = [0.6, 0, -0.8], [0, 1, 0]
  c1, c2 = np.array([1, -1, 1, -1]), np.array([1, 1, -1, -1])
  kernel = 5 + 3 * np.multiply.outer(u, c1) + np.multiply.outer(v, c2)
  components = principal_components(kernel.astype("f"), most=2)
  # The sign makes the largest value positive.
  np.testing.assert_allclose(components.images, [-u, v], atol=1e-6)
  np.testing.assert_allclose(components.variances, [0.9, 0.1], rtol=1e-6)


def test_which_filters():
  for params in ({}, {"stem": {"kernel": np.ones((2, 2, 4, 8))}, "cls": 1.0}):
    with pytest.raises(ValueError, match="B/8 has no filters of pixels"):
      filters_of(ViTConfig(variant="B/8"), params)
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(8, 8, 3, 16)).astype("f")
  what, components = filters_of(
    ViTConfig(variant="B/8"), {"embedding": {"kernel": kernel}}
  )
  assert what == "the projection of the patches"
  np.testing.assert_array_equal(components, kernel)
  root = rng.normal(3, 2, size=(7, 7, 3, 16)).astype("f")
  params = {
    "conv_root": {"kernel": root},
    "embedding": {"kernel": np.zeros((1, 1, 64, 16), "f")},
  }
  for config in (ViTConfig(variant="R50+B/16"), BiTConfig()):
    what, components = filters_of(config, params)
    assert what == "the 7 × 7 filters of the root"
    expected = (root - root.mean((0, 1, 2))) / root.std((0, 1, 2))
    np.testing.assert_allclose(components, expected, atol=1e-4)
