"""Resizing against scipy, jax, the original code, other libraries, by hand."""

import functools
import pathlib

import jax
import numpy as np
import pytest
import scipy.ndimage
import torch_libraries
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.models.resample import (
  METHODS,
  resample_patch_kernel,
  resample_posemb,
)

EXACT = settings(derandomize=True, deadline=None, max_examples=30)
GRID = st.tuples(st.integers(1, 24), st.integers(1, 24))
DATA = pathlib.Path(__file__).parents[1] / "data"


@EXACT
@given(GRID, GRID, st.integers(0, 2))
def test_equals_scipy(old, new, num_class_rows):
  rng = np.random.default_rng(0)
  num_rows = old[0] * old[1] + num_class_rows
  table = rng.normal(size=(1, num_rows, 3)).astype("f")
  got = resample_posemb(table, old, new, num_class_rows)
  if new == old:
    assert got is table
  grid = table[0, num_class_rows:].reshape(*old, 3)
  zoom = (new[0] / old[0], new[1] / old[1], 1)
  expected = scipy.ndimage.zoom(grid, zoom, order=1).reshape(-1, 3)
  assert got.dtype == np.float32
  assert got.shape == (1, new[0] * new[1] + num_class_rows, 3)
  # Both interpolate in float64; what is left is one rounding to float32.
  np.testing.assert_allclose(
    got[0, num_class_rows:], expected, rtol=2e-7, atol=2e-7
  )
  np.testing.assert_array_equal(
    got[0, :num_class_rows], table[0, :num_class_rows]
  )


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


def test_rows_are_counted_and_not_guessed():
  # 16 rows: a square, but the caller says 15 patches and a class token.
  table = np.zeros((1, 16, 4), "f")
  assert resample_posemb(table, (3, 5), (1, 2), 1).shape == (1, 3, 4)
  with pytest.raises(
    ValueError, match="got 16 rows, expected 17: 4 x 4 patches and a class"
  ):
    resample_posemb(table, (4, 4), (6, 6), 1)


@EXACT
@given(st.sampled_from([*METHODS]), st.integers(1, 30), st.integers(1, 30))
def test_weights_keep_constants_and_symmetry(method, old, new):
  weights = METHODS[method](old, new)
  assert weights.shape == (new, old)
  np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-13)
  if method == "dinov2":  # its grid is longer by a tenth at the end
    return
  if new > 1 or method != "zoom":  # whose single point is the first
    np.testing.assert_allclose(weights, weights[::-1, ::-1], atol=1e-13)
  if new == old:
    np.testing.assert_array_equal(weights, np.eye(old))


@pytest.mark.parametrize(
  "method, old, new, row, expected",
  [
    ("zoom", 3, 5, 1, [1 / 2, 1 / 2, 0]),
    ("bilinear", 2, 4, 0, [1, 0]),
    ("bilinear", 2, 4, 1, [3 / 4, 1 / 4]),
    # Twice as wide: 3, 3, 1 quarters, and a fourth outside.
    ("bilinear", 4, 2, 0, [3 / 7, 3 / 7, 1 / 7, 0]),
    # Keys' cubic at distances of 5, 1, 3, 7 quarters; 7 and 3 are outside in
    # the first row, and dropped, or else the first point's.
    ("bicubic", 4, 8, 3, np.array([-9, 111, 29, -3]) / 128),
    ("bicubic", 4, 8, 0, np.array([111, -9, 0, 0]) / 102),
    ("timm", 4, 8, 0, np.array([111, -9, 0, 0]) / 102),
    ("hf", 4, 8, 3, np.array([-27, 225, 67, -9]) / 256),
    ("hf", 4, 8, 0, np.array([-9 + 67 + 225, -27, 0, 0]) / 256),
    # Not widened: distances of 3, 1, 1, 3 halves.
    ("hf", 8, 2, 0, np.array([-3, 19, 19, -3, 0, 0, 0, 0]) / 32),
    ("linear", 8, 2, 0, [0, 1 / 2, 1 / 2, 0, 0, 0, 0, 0]),
    # A tenth more rows: the second is at 3/2 21 / 2.1 - 1/2, not at 15.25.
    ("dinov2", 21, 2, 1, np.array([0] * 13 + [-3, 19, 19, -3] + [0] * 4) / 32),
  ],
)
def test_weights_in_closed_form(method, old, new, row, expected):
  got = METHODS[method](old, new)[row]
  np.testing.assert_allclose(got, expected, atol=1e-15)


# Functions that resize a grid [1, h, w, d] as a library does: jax, timm, Meta's
# DINOv2 and transformers, whose grids are square at first.


def by_jax(method, antialias):
  return lambda grid, new: jax.image.resize(
    grid, (1, *new, grid.shape[-1]), method, antialias
  )


def by_timm(grid, new):
  import torch

  layers = torch_libraries.load("timm.layers")
  _, *old, d = grid.shape
  table = torch.tensor(grid.reshape(1, -1, d))
  return layers.resample_abs_pos_embed(table, list(new), old, 0).numpy()


def by_dinov2(grid, new):
  """Meta's code passes the factors (new + 0.1) / old to torch."""
  torch = torch_libraries.load("torch")
  old = grid.shape[1:3]
  resized = torch.nn.functional.interpolate(
    torch.tensor(grid).permute(0, 3, 1, 2),
    scale_factor=tuple((n + 0.1) / o for n, o in zip(new, old, strict=True)),
    mode="bicubic",
  )
  return resized.permute(0, 2, 3, 1).numpy()


def by_transformers(grid, new):
  import torch

  vit = torch_libraries.load("transformers.models.vit.modeling_vit")
  _, old, _, d = grid.shape
  config = vit.ViTConfig(image_size=4 * old, patch_size=4, hidden_size=d)
  embeddings = vit.ViTEmbeddings(config)
  table = np.pad(grid.reshape(1, -1, d), ((0, 0), (1, 0), (0, 0)))
  embeddings.position_embeddings.data = torch.tensor(table)
  tokens = torch.zeros(1, new[0] * new[1] + 1, d)
  with torch.no_grad():
    resized = embeddings.interpolate_pos_encoding(
      tokens, 4 * new[0], 4 * new[1]
    )
  return resized[:, 1:].numpy()


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  "method, theirs",
  [
    ("bilinear", by_jax("bilinear", True)),
    ("bicubic", by_jax("bicubic", True)),
    ("hf", by_jax("cubic-pytorch", False)),
    slow("timm", by_timm),
    slow("hf", by_transformers),
    slow("dinov2", by_dinov2),
  ],
)
@pytest.mark.parametrize(
  "old, new",
  [
    ((24, 24), (7, 7)),
    ((14, 14), (15, 13)),
    ((7, 7), (1, 1)),
    ((3, 5), (8, 2)),
  ],
  ids=str,
)
def test_equals_the_libraries(method, theirs, old, new):
  if theirs is by_transformers and old[0] != old[1]:
    pytest.skip("theirs are square at first")
  grid = np.random.default_rng(0).normal(size=(1, *old, 8)).astype("f")
  got = resample_posemb(grid.reshape(1, -1, 8), old, new, 0, method)
  expected = np.reshape(theirs(grid, new), (1, -1, 8))
  # Libraries compute the places of points in float32. A place is a number up to
  # the grid's side, so wrong by 2^-24 times that in each of the directions;
  # filters are less steep than 4 a point.
  atol = 8 * 2.0**-24 * max(*old, *new) * np.abs(grid).max()
  np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("old, new", [((14, 14), (16, 16)), ((3, 5), (4, 5))])
def test_enlarged_patches_have_the_same_embedding(old, new):
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(*old, 3, 4)).astype("f")
  patches = rng.normal(size=(6, *old, 3)).astype("f")
  resized = resample_patch_kernel(kernel, new)
  assert resized.dtype == np.float32 and resized.shape == (*new, 3, 4)
  expected = np.einsum("bhwc,hwcd->bd", patches, kernel)
  enlarged = jax.image.resize(patches, (6, *new, 3), "bilinear")
  got = np.einsum("bhwc,hwcd->bd", enlarged, resized)
  # Up to 768 terms of size 10, of which each has a few roundings to float32;
  # these add up like a random walk: 10 * sqrt(768) * 2^-23 = 3e-5.
  np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
  # The enlarged patch of ones is one of ones.
  np.testing.assert_allclose(
    resized.sum((0, 1)), kernel.sum((0, 1)), rtol=0, atol=1e-4
  )


def test_half_the_patch_sums_its_pixels():
  # Halving takes means of two, B B^T = 1/4 over both sides, w = 4 B kernel.
  kernel = np.random.default_rng(0).normal(size=(8, 6, 3, 4))
  got = resample_patch_kernel(kernel, (4, 3))
  expected = kernel.reshape(4, 2, 3, 2, 3, 4).sum((1, 3))
  np.testing.assert_allclose(got, expected, atol=1e-13)  # float64 throughout


@EXACT
@given(st.integers(2, 32), st.integers(2, 32))
def test_patch_kernels_minimise_the_error(old, new):
  # Normal equations of |B^T w - kernel|^2, one side at a time; B is "hf"'s
  # rule for places and edges with a linear filter, here by np.interp.
  at = (np.arange(new) + 0.5) * old / new - 0.5
  resize = np.stack([np.interp(at, np.arange(old), e) for e in np.eye(old)], 1)
  kernel = np.random.default_rng(0).normal(size=(old, 1, 2, 3))
  new_kernel = resample_patch_kernel(kernel, (new, 1))[:, 0]
  error = np.einsum("qp,qcd->pcd", resize, new_kernel) - kernel[:, 0]
  gradient = np.einsum("qp,pcd->qcd", resize, error)
  np.testing.assert_allclose(gradient, 0, atol=1e-12)  # float64 throughout
  if new >= old:
    np.testing.assert_allclose(error, 0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
  "old, new",
  [((8, 8), (16, 16)), ((16, 16), (14, 14)), ((16, 8), (4, 12))],
)
def test_patch_kernels_equal_timm(old, new):
  import torch

  layers = torch_libraries.load("timm.layers")
  kernel = np.random.default_rng(0).normal(size=(*old, 3, 4)).astype("f")
  got = resample_patch_kernel(kernel, new)
  # timm's default is bicubic and antialiased, the paper's is neither.
  expected = layers.resample_patch_embed(
    torch.tensor(kernel.transpose(3, 2, 0, 1)),
    list(new),
    interpolation="bilinear",
    antialias=False,
  )
  # timm inverts in float32. The matrix of both sides has a condition number
  # below 10, and errors of its entries below 2^-24 times the patch's side.
  atol = 10 * 2.0**-24 * max(*old, *new) * np.abs(got).max()
  np.testing.assert_allclose(
    got, expected.numpy().transpose(2, 3, 1, 0), rtol=0, atol=atol
  )
