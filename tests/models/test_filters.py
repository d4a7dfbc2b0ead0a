"""Filters of a first layer, and their principal components."""

import numpy as np
import pytest

from vit_jax.families.resnet import BiTConfig
from vit_jax.families.vit import ViTConfig
from vit_jax.models.filters import filters_of, principal_components

RNG = np.random.default_rng(0)


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


def test_a_model_may_have_no_filters_of_pixels():
  for params in ({}, {"stem": {"kernel": np.ones((2, 2, 4, 8))}, "cls": 1.0}):
    with pytest.raises(ValueError, match="B/8 has no filters of pixels"):
      filters_of(ViTConfig(variant="B/8"), params)


def test_which_filters():
  kernel = RNG.normal(size=(8, 8, 3, 16)).astype("f")
  what, components = filters_of(
    ViTConfig(variant="B/8"), {"embedding": {"kernel": kernel}}
  )
  assert what == "the projection of the patches"
  np.testing.assert_array_equal(components, kernel)
  root = RNG.normal(3, 2, size=(7, 7, 3, 16)).astype("f")
  params = {
    "conv_root": {"kernel": root},
    "embedding": {"kernel": np.zeros((1, 1, 64, 16), "f")},
  }
  for config in (ViTConfig(variant="R50+B/16"), BiTConfig()):
    what, components = filters_of(config, params)
    assert what == "the 7 × 7 filters of the root"
    expected = (root - root.mean((0, 1, 2))) / root.std((0, 1, 2))
    np.testing.assert_allclose(components, expected, atol=1e-4)
