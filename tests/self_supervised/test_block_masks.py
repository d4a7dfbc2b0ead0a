"""Block masks: distribution as in the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods import published
from scipy import ndimage

from vit_jax.self_supervised import block_masks

MASKS = {
  k.removeprefix("masks/"): v
  for k, v in published().items()
  if k.startswith("masks/")
}


@pytest.mark.slow
def test_masks_are_distributed_as_those_of_the_authors():
  """Of 2,000 masks for each target, as there: counts, places, regions."""
  blocks = lambda key, n: block_masks.blocks(key, n, (16, 16))
  draw = jax.jit(jax.vmap(blocks, in_axes=(0, None)))
  keys = jax.random.split(jax.random.key(1), 2000)
  levels = MASKS["quantile_levels"]
  for i, target in enumerate(MASKS["targets"]):
    of = lambda name: MASKS[name][i]  # noqa: B023
    masks = np.asarray(draw(keys, target))
    counts = masks.sum((1, 2))
    assert target - 5 <= counts.min() and counts.max() == target
    # Both means are of 2,000 draws: 4 standard errors of their difference.
    error = 4 * of("std") * (2 / 2000) ** 0.5
    assert abs(counts.mean() - of("mean")) < error
    assert abs(counts.std() - of("std")) < 0.12
    got = np.quantile(counts, levels[2:], method="nearest")
    assert np.abs(got - of("quantiles")[2:]).max() <= 1
    want = of("probability_map")
    deviation = np.sqrt(2 * want * (1 - want) / 2000)
    error = np.abs(masks.mean(0) - want) / deviation
    assert error.max() < 4.5  # the largest of 256
    assert error.mean() < 1.0  # 0.8 for normal numbers
    regions = np.mean([ndimage.label(mask)[1] for mask in masks])
    assert abs(regions - of("regions_mean")) < 0.2


def test_ratios_are_spread_over_the_batch():
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
  want = MASKS["collate_quantiles_masked_only"]
  got = np.quantile(counts, MASKS["quantile_levels"])
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
