"""An image beside where a model looks."""

import numpy as np

from vit_jax.reporting import overlay


def test_the_patch_that_is_looked_at_stays_bright():
  image = np.full((64, 96, 3), 200, np.uint8)
  map = np.zeros((2, 3), "f")
  map[1, 2] = 0.4
  got = overlay.lit(image, map)
  assert got.shape == image.shape
  assert got[48, 80, 0] > 160  # the middle of that patch
  assert got[16, 16, 0] <= 2
  assert got.max() >= 195


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
  assert got.shape == (192, 96 + 4 + 96, 3)
  np.testing.assert_array_equal(got[::6, :96:6], image)
  np.testing.assert_array_equal(got[::6, 100::6], image)
  large = overlay.beside(np.zeros((384, 384, 3), np.uint8), np.ones((4, 4)))
  assert large.size == (384 + 8 + 384, 384)
