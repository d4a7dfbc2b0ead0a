"""Dropout's noise: as often as asked, independent, and the record's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.noise import Dropout, keeps

KEY = jax.random.key(3)
RECORDS = jnp.arange(64)
SHAPE = (50, 96)


def kept(key=KEY, records=RECORDS, rate=0.3):
  return np.asarray(keeps(key, records, SHAPE, rate))


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9])
def test_drops_as_often_as_asked(rate):
  drawn = kept(rate=rate)
  # Five standard deviations of a binomial; over all, and over each record's.
  deviation = (rate * (1 - rate) / drawn.size) ** 0.5
  assert abs(drawn.mean() - (1 - rate)) < 5 * deviation
  of_records = drawn.reshape(64, -1).mean(1)
  assert np.abs(of_records - (1 - rate)).max() < 5 * deviation * 8


@pytest.mark.parametrize(
  "other",
  [
    np.roll(kept(), 1, axis=0),
    np.roll(kept(), 1, axis=1),
    np.roll(kept(), 1, axis=2),
    np.roll(kept(), 2, axis=2),
    kept(jax.random.fold_in(KEY, 1)),
    kept(records=RECORDS + 64),
    kept(records=(RECORDS + 1) << 16),
  ],
  ids="record token unit two key records high".split(),
)
def test_neighbours_do_not_know_of_each_other(other):
  drawn = kept()
  correlation = np.corrcoef(drawn.ravel(), other.ravel())[0, 1]
  # Five standard deviations; one neighbour of a record is itself far away.
  assert abs(correlation) < 5 / drawn.size**0.5


def test_units_are_dropped_evenly():
  counts = kept(rate=0.5).sum((0, 1))  # of each of 96 units, out of 3200
  chi_squared = ((counts - 1600) ** 2 / 800).sum()
  assert 50 < chi_squared < 155  # 96 +- 5 sqrt(2 * 96), lower half cut


def test_noise_belongs_to_the_record():
  order = jax.random.permutation(jax.random.key(0), 64)
  np.testing.assert_array_equal(kept(records=RECORDS[order]), kept()[order])
  np.testing.assert_array_equal(kept(records=RECORDS[5:9]), kept()[5:9])


def test_keeps_the_mean_and_nothing_without_records():
  x = jnp.ones((64, *SHAPE))
  dropout = Dropout(0.25)
  apply = lambda records: dropout.apply({}, x, records, rngs={"dropout": KEY})
  values = np.unique(apply(RECORDS))
  np.testing.assert_allclose(values, [0.0, 1 / 0.75], rtol=1e-6)
  np.testing.assert_allclose(apply(RECORDS).mean(), 1.0, atol=0.006)
  assert apply(None) is x
  assert Dropout(0.0).apply({}, x, RECORDS) is x
