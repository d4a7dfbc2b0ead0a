"""Rows of biases of scores by offset; test_modern.py has the whole model."""

import numpy as np

from vit_jax.models import resample
from vit_jax.zoo.models import relative_bias

GRID = (3, 5)


def test_rows_are_in_reach_and_mirrored():
  rows = relative_bias.rows(GRID)
  patches = rows[1:, 1:]
  offsets = resample.num_bias_rows(GRID) - 3
  assert sorted({*patches.ravel()}) == list(range(offsets))
  # Query and key exchanged, the offset has the other sign.
  np.testing.assert_array_equal(patches + patches.T, offsets - 1)
  assert {*rows[0, 1:]} == {offsets} and {*rows[1:, 0]} == {offsets + 1}
  assert rows[0, 0] == offsets + 2
