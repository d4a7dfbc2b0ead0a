"""Fixed position embeddings against closed forms."""

import numpy as np
import pytest

from vit_jax.models.posemb import sincos2d


def test_sincos2d_in_closed_form():
  table = sincos2d(3, 5, 16)
  assert table.shape == (15, 16) and table.dtype == np.float32
  frequencies = 10_000.0 ** -(np.arange(4) / 3)
  y, x = 2, 3
  expected = [
    f(v * w) for v in (x, y) for f in (np.sin, np.cos) for w in frequencies
  ]
  np.testing.assert_allclose(table[y * 5 + x], expected, atol=1e-7)


@pytest.mark.parametrize("width", [4, 10])
def test_sincos2d_needs_a_multiple_of_four(width):
  with pytest.raises(ValueError, match=f"a width of {width}, expected a mult"):
    sincos2d(2, 2, width)
