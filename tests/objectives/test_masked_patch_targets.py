"""Targets of masked patch prediction, and which patches are corrupted."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import masked_patch as lib


@pytest.mark.parametrize(
  "color, number",
  [
    ((255, 255, 255), 511),
    ((224, 100, 31), 7 * 64 + 3 * 8),
    ((32, 64, 159), 1 * 64 + 2 * 8 + 4),
  ],
)
def test_a_color_is_the_three_upper_bits_of_each_channel(color, number):
  patches = np.broadcast_to(np.array(color, np.uint8), (2, 3, 8, 8, 3))
  assert np.all(lib.colors(jnp.asarray(patches), 1) == number)


def test_a_color_is_that_of_the_mean():
  patch = np.zeros((1, 1, 8, 8, 3), np.uint8)
  patch[..., :4, :, 0] = 64  # the mean is 32 exactly, the first of level 1
  assert lib.colors(jnp.asarray(patch), 1).item() == 64
  patch[..., 0, 0, 0] = 63  # and less than 32 by 1/64
  assert lib.colors(jnp.asarray(patch), 1).item() == 0


def test_a_small_patch_has_the_means_of_cells_row_by_row():
  blues = np.arange(16).reshape(4, 4) // 2
  patch = np.zeros((1, 1, 8, 8, 3), np.uint8)
  patch[0, 0, :, :, 2] = np.kron(blues, np.ones((2, 2))) * 32
  result = lib.colors(jnp.asarray(patch), 4)
  np.testing.assert_array_equal(result[0, 0], blues.ravel())


def test_patches_are_in_the_order_of_the_tokens():
  """A convolution with a kernel of ones sums the pixels of each patch."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (2, 24, 16, 3), np.uint8)
  embed = nn.Conv(1, (8, 8), (8, 8), "VALID", kernel_init=nn.initializers.ones)
  sums, _ = embed.init_with_output(jax.random.key(0), images.astype(np.float32))
  patches = lib.patches_of(jnp.asarray(images), 8)
  assert patches.shape == (2, 6, 8, 8, 3)
  want = patches.astype(jnp.float32).sum((2, 3, 4))
  np.testing.assert_array_equal(sums.reshape(2, 6), want)


draw = jax.jit(lib.draw, static_argnums=2)


@pytest.fixture(scope="module")
def drawn():
  """196 patches of each of 500 records: 49,000 corrupted ones."""
  return jax.device_get(draw(jax.random.key(0), jnp.arange(500), 196))


@pytest.mark.parametrize("num_patches, num_corrupted", [(196, 98), (9, 4)])
def test_half_of_the_patches_are_corrupted(drawn, num_patches, num_corrupted):
  if num_patches != 196:
    drawn = draw(jax.random.key(0), jnp.arange(500), num_patches)
  places, sources, _ = jax.device_get(drawn)
  assert places.shape == sources.shape == (500, num_corrupted)
  assert min(places.min(), sources.min()) >= 0
  assert max(places.max(), sources.max()) < num_patches
  assert all(len(set(row)) == num_corrupted for row in places)


def _is_rate(result, rate):
  """Within five standard deviations of a binomial's share."""
  return abs(result.mean() - rate) < 5 * np.sqrt(
    rate * (1 - rate) / result.size
  )


def test_of_these_80_10_and_10_percent_are_masked_replaced_and_left(drawn):
  is_masked = drawn.is_masked
  is_other = drawn.sources != drawn.places
  assert not np.any(is_masked & is_other)
  assert _is_rate(is_masked, 0.8)
  assert _is_rate(is_other, 0.1)
  assert _is_rate(~is_masked & ~is_other, 0.1)


def test_any_place_and_any_other_patch_is_as_likely(drawn):
  share = np.bincount(drawn.places.ravel(), minlength=196) / 500
  assert abs(share - 0.5).max() < 5 * np.sqrt(0.25 / 500)
  is_other = drawn.sources != drawn.places
  away = (drawn.sources - drawn.places)[is_other] % 196
  share = np.bincount(away, minlength=196)[1:] / is_other.sum()
  assert abs(share - 1 / 195).max() < 5 * np.sqrt(1 / 195 / is_other.sum())


def test_the_record_decides_and_not_its_place(drawn):
  order = np.random.default_rng(0).permutation(500)[:7]
  again = draw(jax.random.key(0), jnp.asarray(order), 196)
  for few, many in zip(again, drawn, strict=True):
    np.testing.assert_array_equal(few, many[order])
  other = draw(jax.random.key(1), jnp.asarray(order), 196)
  assert np.any(other.places != again.places)
  assert len({tuple(sorted(row)) for row in drawn.places}) == 500


def test_corrupted_tokens_are_those_of_the_plan():
  tokens = jnp.arange(10.0).reshape(1, 5, 2)
  plan = lib.Plan(
    places=jnp.array([[3, 0, 1]]),
    sources=jnp.array([[3, 4, 1]]),  # itself, another, itself
    is_masked=jnp.array([[True, False, False]]),
  )
  result = jax.jit(lib.corrupt)(tokens, jnp.array([-1.0, -2.0]), plan)
  want = [[8.0, 9.0], [2.0, 3.0], [4.0, 5.0], [-1.0, -2.0], [8.0, 9.0]]
  np.testing.assert_array_equal(result[0], want)
