"""Block masks: distribution as in the authors' code."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.self_supervised import block_masks

FILE = pathlib.Path(__file__).parents[1] / "data" / "ssl_dino.npz"
GRID = (16, 16)


@pytest.fixture(scope="module")
def published():
  with np.load(FILE) as file:
    return {k: file[k] for k in file if k.startswith("masks/")}


@pytest.fixture(scope="module")
def drawn(published):
  """2,000 masks for each target, as there."""
  draw = jax.jit(
    jax.vmap(lambda key, n: block_masks.blocks(key, n, GRID), in_axes=(0, None))
  )
  keys = jax.random.split(jax.random.key(1), 2000)
  return [np.asarray(draw(keys, n)) for n in published["masks/targets"]]


@pytest.mark.slow
def test_counts_are_those_of_the_authors(published, drawn):
  for i, (target, masks) in enumerate(
    zip(published["masks/targets"], drawn, strict=True)
  ):
    counts = masks.sum((1, 2))
    assert target - 5 <= counts.min() and counts.max() == target
    # Both means are of 2,000 draws: 4 standard errors of their difference.
    error = 4 * published["masks/std"][i] * (2 / 2000) ** 0.5
    assert abs(counts.mean() - published["masks/mean"][i]) < error
    assert abs(counts.std() - published["masks/std"][i]) < 0.12
    levels = published["masks/quantile_levels"][2:]
    got = np.quantile(counts, levels, method="nearest")
    assert np.abs(got - published["masks/quantiles"][i, 2:]).max() <= 1


@pytest.mark.slow
def test_the_probability_of_each_patch_is_that_of_the_authors(published, drawn):
  for i, masks in enumerate(drawn):
    want = published["masks/probability_map"][i]
    error = np.abs(masks.mean(0) - want)
    deviation = np.sqrt(2 * want * (1 - want) / 2000)
    assert (error / deviation).max() < 4.5  # the largest of 256
    assert (error / deviation).mean() < 1.0  # 0.8 for normal numbers


@pytest.mark.slow
def test_masked_patches_form_as_few_regions(published, drawn):
  ndimage = pytest.importorskip("scipy.ndimage")
  for i, masks in enumerate(drawn):
    regions = np.mean([ndimage.label(mask)[1] for mask in masks])
    assert abs(regions - published["masks/regions_mean"][i]) < 0.2


def test_ratios_are_spread_over_the_batch(published):
  crops = jnp.arange(64)

  @jax.jit
  def ratios(key, crops):
    return block_masks.ratios(key, crops, 64, 0.5, 0.1, 0.5)

  ratio = ratios(jax.random.key(0), crops)
  masked = np.sort(ratio[ratio > 0])
  assert len(masked) == 32
  borders = np.linspace(0.1, 0.5, 33)
  assert ((borders[:-1] <= masked) & (masked <= borders[1:])).all()
  assert (np.diff(np.nonzero(ratio)[0]) != 1).any()  # in no order
  # A part of the crops has the ratios that it has in the whole batch.
  part = ratios(jax.random.key(0), crops[9:17])
  np.testing.assert_array_equal(part, ratio[9:17])

  counts = []
  for seed in range(60):
    ratio = ratios(jax.random.key(seed), crops)
    counts += [int(256 * r) for r in np.asarray(ratio) if r]
  want = published["masks/collate_quantiles_masked_only"]
  got = np.quantile(counts, published["masks/quantile_levels"])
  # Blocks take up to 5 patches more away from theirs.
  np.testing.assert_allclose(got[3:], want[3:], atol=3)


def test_places_and_weights_of_masked_patches():
  keys = jax.random.split(jax.random.key(2), 6)
  ratio = jnp.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
  draw = jax.jit(lambda *args: block_masks.draw(*args, (4, 6), 0.5))
  masked, places, weights = map(np.asarray, draw(keys, ratio))
  assert places.shape == weights.shape == (6, 12)
  for mask, place, weight in zip(masked, places, weights, strict=True):
    assert set(place[weight > 0]) == set(np.nonzero(mask)[0])
    assert len(set(place)) == 12
    np.testing.assert_allclose(weight.sum(), mask.any(), rtol=1e-6)
  assert not masked[0].any() and masked[1:].any(1).all()
  again = draw(keys[::-1], ratio[::-1])
  np.testing.assert_array_equal(again.masked[::-1], masked)
