"""Fixed position embeddings and rows of biases, against closed forms."""

import numpy as np
import pytest

from vit_jax.models import resample
from vit_jax.models.posemb import sincos2d
from vit_jax.zoo.models import relative_bias


def test_sincos2d_in_closed_form():
  table = sincos2d(3, 5, 16)
  assert table.shape == (15, 16) and table.dtype == np.float32
  frequencies = 10_000.0 ** -(np.arange(4) / 3)
  y, x = 2, 3
  expected = [
    f(v * w) for v in (x, y) for f in (np.sin, np.cos) for w in frequencies
  ]
  np.testing.assert_allclose(table[y * 5 + x], expected, atol=1e-7)


def test_sincos2d_needs_a_multiple_of_four():
  with pytest.raises(ValueError, match="width of 10"):
    sincos2d(2, 2, 10)


def test_rows_of_biases_are_in_reach_and_mirrored():
  grid = (3, 5)
  rows = relative_bias.rows(grid)
  patches = rows[1:, 1:]
  offsets = resample.num_bias_rows(grid) - 3
  assert sorted({*patches.ravel()}) == list(range(offsets))
  # Query and key exchanged, the offset has the other sign.
  np.testing.assert_array_equal(patches + patches.T, offsets - 1)
  assert {*rows[0, 1:]} == {offsets} and {*rows[1:, 0]} == {offsets + 1}
  assert rows[0, 0] == offsets + 2
