"""Position embeddings against scipy, the original code and closed forms."""

import pathlib

import numpy as np
import pytest
import scipy.ndimage

from vit_jax.models.posemb import resample_posemb, sincos2d

DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
  "old, new",
  [
    ((4, 4), (6, 6)),
    ((14, 14), (24, 24)),
    ((24, 24), (7, 7)),
    ((3, 5), (8, 2)),
    ((5, 3), (5, 9)),
    ((4, 6), (1, 1)),
    ((1, 4), (3, 4)),
  ],
)
@pytest.mark.parametrize("has_cls_row", [False, True])
def test_equals_scipy(old, new, has_cls_row):
  rng = np.random.default_rng(0)
  num_rows = old[0] * old[1] + has_cls_row
  table = rng.normal(size=(1, num_rows, 8)).astype("f")
  got = resample_posemb(table, old, new, has_cls_row)
  grid = table[0, int(has_cls_row) :].reshape(*old, 8)
  zoom = (new[0] / old[0], new[1] / old[1], 1)
  expected = scipy.ndimage.zoom(grid, zoom, order=1).reshape(-1, 8)
  assert got.dtype == np.float32
  assert got.shape == (1, new[0] * new[1] + has_cls_row, 8)
  # Both interpolate in float64; what is left is one rounding to float32.
  np.testing.assert_allclose(
    got[0, int(has_cls_row) :], expected, rtol=2e-7, atol=2e-7
  )
  if has_cls_row:
    np.testing.assert_array_equal(got[0, 0], table[0, 0])


@pytest.mark.parametrize(
  "kind, old, new",
  [("token", 7, 12), ("token", 7, 5), ("gap", 8, 3), ("gap", 8, 14)],
)
def test_equals_the_original_code(kind, old, new):
  data = np.load(DATA / "posemb_zoom.npz")
  got = resample_posemb(
    data[f"{kind}_{old}x{old}"], (old, old), (new, new), kind == "token"
  )
  np.testing.assert_allclose(
    got, data[f"{kind}_{new}x{new}"], rtol=2e-7, atol=2e-7
  )


def test_equal_grids_change_nothing():
  table = np.random.default_rng(0).normal(size=(1, 13, 4)).astype("f")
  assert resample_posemb(table, (3, 4), (3, 4), has_cls_row=True) is table


def test_corners_stay_and_planes_stay_planes():
  y, x = np.mgrid[:3, :5] / np.array([2.0, 4.0])[:, None, None]
  table = np.stack([y, x, 2 * y - x], -1).reshape(1, 15, 3)
  y, x = np.mgrid[:7, :4] / np.array([6.0, 3.0])[:, None, None]
  expected = np.stack([y, x, 2 * y - x], -1).reshape(1, 28, 3)
  got = resample_posemb(table, (3, 5), (7, 4), has_cls_row=False)
  np.testing.assert_allclose(got, expected, atol=1e-12)  # float64 throughout


def test_rows_are_counted_and_not_guessed():
  # 16 rows: a square, but the caller says 15 patches and a class token.
  table = np.zeros((1, 16, 4), "f")
  assert resample_posemb(table, (3, 5), (1, 2), True).shape == (1, 3, 4)
  with pytest.raises(
    ValueError, match="got 16 rows, expected 17: 4 x 4 patches and a class"
  ):
    resample_posemb(table, (4, 4), (6, 6), has_cls_row=True)


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
