"""An image beside its attention map."""

import matplotlib as mpl
import numpy as np
import pytest

from vit_jax.inference import overlay


def test_the_patch_with_attention_stays_bright():
  image = np.full((64, 96, 3), 200, np.uint8)
  map = np.zeros((2, 3), "f")
  map[1, 2] = 0.4
  got = overlay.lit(image, map)
  assert got.shape == image.shape
  assert got[48, 80, 0] > 160  # the middle of that patch
  assert got[16, 16, 0] <= 2
  assert got.max() >= 195


def test_other_patches_are_seen_where_one_has_nearly_all():
  """A patch of 0.9 beside 99 others: these are half as bright as it."""
  map = np.full((10, 10), 0.1 / 99, "f")
  map[0, 0] = 0.9
  assert overlay.brightest(map) == pytest.approx(0.2 / 99)
  image = np.full((200, 200, 3), 240, np.uint8)
  got = overlay.lit(image, map)
  assert got[2, 2, 0] >= 239 and got[100, 100, 0] == 120
  squares = np.asarray(overlay.beside(image, map))[100, 408 + 100]
  expected = 255 * np.array(mpl.colormaps["magma"](0.5)[:3])
  np.testing.assert_allclose(squares, expected, atol=1)


def test_the_scale_of_a_map_has_no_effect_and_even_maps_none_at_all():
  image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
  map = np.random.default_rng(1).uniform(size=(4, 4)).astype("f")
  np.testing.assert_array_equal(
    overlay.lit(image, map), overlay.lit(image, map * 1024)
  )
  np.testing.assert_array_equal(overlay.lit(image, np.ones((4, 4))), image)
  assert not overlay.lit(image, np.zeros((4, 4))).any()


def test_small_images_are_enlarged_by_whole_factors():
  image = np.random.default_rng(0).integers(0, 256, (32, 16, 3), np.uint8)
  got = np.asarray(overlay.beside(image, np.ones((2, 1), "f")))
  assert got.shape == (192, 3 * 96 + 2 * 4, 3)
  np.testing.assert_array_equal(got[::6, :96:6], image)
  np.testing.assert_array_equal(got[::6, 100:196:6], image)
  large = overlay.beside(np.zeros((384, 384, 3), np.uint8), np.ones((4, 4)))
  assert large.size == (3 * 384 + 2 * 8, 384)
