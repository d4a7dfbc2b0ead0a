"""Dropout's noise: its rate, independence, and dependence on the record.

Then where the Transformers drop, and how often.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import ViT

from vit_jax.families import model_config
from vit_jax.families.vit import ViTConfig
from vit_jax.models import build
from vit_jax.models.noise import Dropout, bits, draw, draw_all, drop, threshold
from vit_jax.models.stacking import stack_blocks

KEY = jax.random.key(3)
RECORDS = jnp.arange(64)
SHAPE = (50, 96)


@jax.jit
def survives(key, records, rate):
  ones = jnp.ones((len(records), *SHAPE))
  return drop(ones, draw(key, records, SHAPE), rate) > 0


def survivors(key=KEY, records=RECORDS, rate=0.3):
  return np.asarray(survives(key, records, rate))


@functools.partial(jax.jit, static_argnums=1)
def drawn_bits(records, shape):
  return bits(draw(KEY, records, shape))


@functools.cache
def many_bits():
  """4.2 million draws, of 64 records with 64 rows and 1,024 columns."""
  return np.asarray(drawn_bits(jnp.arange(64), (64, 1024)))


def dropped_scores():
  """The same at a rate of 0.5, with mean 0 and variance 1."""
  return np.where(many_bits() >> 31, np.float32(1), np.float32(-1))


@pytest.mark.parametrize("rate", [1e-3, 0.5])
def test_drops_as_often_as_asked(rate):
  drawn = survivors(rate=rate)
  # Five standard deviations of a binomial; over all, and over each record's.
  deviation = (rate * (1 - rate) / drawn.size) ** 0.5
  assert abs(drawn.mean() - (1 - rate)) < 5 * deviation
  of_records = drawn.reshape(64, -1).mean(1)
  assert np.abs(of_records - (1 - rate)).max() < 5 * deviation * 8


@pytest.mark.parametrize("rate", [0.0, 1e-7, 0.1 / 23, 0.999])
def test_the_threshold_is_as_exact_as_float32(rate):
  for given in (rate, jnp.float32(rate)):  # a constant, or of one block's depth
    dropped = (int(threshold(given)) + 2**31) / 2**32
    # Half a step of float32 at 2^31, and the rate's own rounding.
    assert abs(dropped - rate) <= 2**-26 + rate * 2**-24
  assert survivors(rate=jnp.float32(0)).all()


def test_upper_bits_are_uniform():
  for shift in (24, 20, 16):
    counts = np.bincount((many_bits() >> shift).ravel() & 255, minlength=256)
    expected = counts.sum() / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 255) < 5 * (2 * 255) ** 0.5


def test_neighbours_do_not_know_of_each_other():
  drawn = survivors()
  for other in (
    survivors(jax.random.fold_in(KEY, 1)),
    survivors(records=RECORDS + 64),
    survivors(records=(RECORDS + 1) << 16),
  ):
    correlation = np.corrcoef(drawn.ravel(), other.ravel())[0, 1]
    # Five standard deviations.
    assert abs(correlation) < 5 / drawn.size**0.5


@pytest.mark.parametrize("what", ["records", "rows", "columns"])
def test_pairs_are_independent(what):
  scores = dropped_scores()
  if what == "records":
    scores = scores.reshape(64, -1)
  elif what == "rows":  # of 32 records
    scores = scores[:32].reshape(-1, 1024)
  else:
    scores = scores.reshape(-1, 1024).T
  number, size = scores.shape
  pairs = (scores @ scores.T)[np.triu_indices(number, 1)] / size**0.5
  # A sum of ones and minus ones is nearly normal: the largest of n such
  # exceeds sqrt(2 ln n) by 1.5 about once in 5,000 times.
  assert np.abs(pairs).max() < (2 * np.log(len(pairs))) ** 0.5 + 1.5
  # And their squares sum to a chi-squared number.
  assert abs((pairs**2).mean() - 1) < 5 * (2 / len(pairs)) ** 0.5


def test_no_lag_is_correlated():
  scores = dropped_scores().reshape(64, -1)
  size = scores.shape[1]
  total = 0
  for part in np.split(scores, 4):
    spectrum = np.fft.rfft(part, 2 * size)
    total += np.fft.irfft((np.abs(spectrum) ** 2).sum(0))[:size]
  lags = np.arange(1, size - 64)
  z = total[lags] / (64 * (size - lags)) ** 0.5
  # The largest of 65,000 normal numbers is 4.3 in the mean, and above 6 in one
  # case of 8,000. Consecutive numbers through a short hash had 10.7.
  assert np.abs(z).max() < 6, (lags[np.abs(z).argmax()], z)
  assert abs(z.std() - 1) < 0.05


def test_noise_belongs_to_the_record():
  order = jax.random.permutation(jax.random.key(0), 64)
  np.testing.assert_array_equal(
    survivors(records=RECORDS[order]), survivors()[order]
  )
  np.testing.assert_array_equal(
    survivors(records=RECORDS[5:9]), survivors()[5:9]
  )


@pytest.mark.slow
def test_layers_draw_together_what_each_would_draw_alone():
  places = "attention", "skip", "mlp"
  shapes = {"mlp": (5, 7), "attention": (5, 7), "skip": (1, 1)}
  keys = jax.random.split(KEY, 3)
  together = draw_all(keys, RECORDS[:4], places, shapes)
  assert together.keys() == shapes.keys()
  for layer, key in enumerate(keys):
    of_place = dict(zip(places, jax.random.split(key, 3), strict=True))
    for place, shape in shapes.items():
      alone = draw(of_place[place], RECORDS[:4], shape)
      got = jax.tree.map(lambda a, i=layer: a[i], together[place])
      jax.tree.map(np.testing.assert_array_equal, got, alone)


def test_keeps_the_mean_and_nothing_without_records():
  x = jnp.ones((64, *SHAPE))
  dropout = Dropout(0.25)
  apply = lambda records: dropout.apply({}, x, records, rngs={"dropout": KEY})
  values = np.unique(apply(RECORDS))
  np.testing.assert_allclose(values, [0.0, 1 / 0.75], rtol=1e-6)
  np.testing.assert_allclose(apply(RECORDS).mean(), 1.0, atol=0.006)
  assert apply(None) is x
  assert Dropout(0.0).apply({}, x, RECORDS) is x


@pytest.mark.slow
def test_dropout_in_bfloat16_is_rounded_once():
  # All 128 numbers of bfloat16 from 1 to 2, and the gradient of each.
  number = jnp.arange(128, 256, dtype=jnp.bfloat16) / 128
  x = jnp.tile(number, (64, 50, 1))

  @jax.jit
  def both(x):
    rngs = {"dropout": KEY}
    fn = lambda x: Dropout(0.1).apply({}, x, RECORDS, rngs=rngs)
    y, pull = jax.vjp(fn, x)
    return y, *pull(x)

  for got in both(x):
    assert got.dtype == jnp.bfloat16
    got = np.asarray(got, "d").max((0, 1))  # of those that were kept
    exact = np.asarray(number, "d") / 0.9
    # Half of the last of 8 bits, and float32's own rounding.
    half = 2.0 ** (np.floor(np.log2(exact)) - 8) * (1 + 2**-14)
    assert (np.abs(got - exact) <= half).all()
    # The error of one number is up to 2^-8, as often up as down: over 128
    # numbers a standard deviation of 1.2e-4 of their mean, 1.7; 4 of them. A
    # divisor rounded to bfloat16 makes it 1.7e-3.
    assert abs(got.mean() / exact.mean() - 1) < 5e-4


# In the models.

TINY = dict(num_classes=5, patch=4, width=8, depth=3, mlp_dim=16, num_heads=2)
PARAMS = tiny.random_params(ViT(**TINY), (1, 4, 8, 3), 0.3)


def images(number):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.uniform(-1, 1, (number, 4, 8, 3)), "float32")


@functools.cache
def compiled(is_training, **options):
  """A scan, which compiles its draws once."""
  model = ViT(**TINY, **options, scan=True)
  return jax.jit(functools.partial(model.apply, is_training=is_training))


def apply(x, seed=None, is_training=True, **options):
  return compiled(is_training, **options)(
    {"params": stack_blocks(PARAMS, ViTConfig)},
    x,
    rngs=None if seed is None else {"dropout": jax.random.key(seed)},
  )


def test_dropout_has_the_paper_s_places():
  model = ViT(**TINY, dropout=0.25)

  def fn(key):
    rngs = {"dropout": key}
    return model.apply(
      {"params": PARAMS}, images(2), is_training=True, rngs=rngs
    )

  text = str(jax.make_jaxpr(fn)(jax.random.key(0)))
  # After the positions; and in each of 3 blocks after attention, GELU and MLP.
  assert text.count(" = ge ") == 1 + 3 * 3


@pytest.mark.slow
def test_dropout_is_off_in_evaluation_and_a_function_of_the_key():
  x = images(200)
  expected, _ = apply(x, is_training=False)
  np.testing.assert_array_equal(apply(x)[0], expected)  # at rate 0
  off, _ = apply(x, is_training=False, stochastic_depth=0.2, dropout=0.25)
  np.testing.assert_array_equal(off, expected)
  first, again = (apply(x, seed=1, dropout=0.25) for _ in range(2))
  np.testing.assert_array_equal(first[0], again[0])
  for other in expected, apply(x, seed=2, dropout=0.25)[0]:
    assert np.abs(first[0] - other).max() > 0.01
  for i in range(3):
    for branch in ("attention", "mlp"):
      zeros = np.mean(first[1][f"encoderblock_{i}"][branch] == 0)
      # 200 * 3 * 8 draws: a standard deviation of 0.006; 4 of them.
      assert zeros == pytest.approx(0.25, abs=0.025)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["linear", "constant"])
def test_stochastic_depth(rule):
  """Block l of 0, 1, 2 drops a branch of an example with chance 0.5 l / 2."""
  sizes = {k: v for k, v in TINY.items() if k not in ("num_classes", "patch")}
  options = model_config(
    "modern",
    variant="B/4",
    **sizes,
    scan=True,
    stochastic_depth=0.5,
    stochastic_depth_rule=rule,
  )
  params = {"params": stack_blocks(PARAMS, ViTConfig)}
  model, x = build(options, 5), images(2000)
  _, plain = jax.jit(model.apply)(params, x)
  training = functools.partial(model.apply, is_training=True)
  _, out = jax.jit(training)(params, x, rngs={"dropout": KEY})
  rates = (0.0, 0.25, 0.5) if rule == "linear" else (0.5,) * 3
  for i, rate in enumerate(rates):
    block = out[f"encoderblock_{i}"]
    dropped = {k: np.all(block[k] == 0, (1, 2)) for k in ("attention", "mlp")}
    # Standard deviation at most sqrt(0.25 / 2000) = 0.011; 4 of them.
    for branch in dropped.values():
      assert np.mean(branch) == pytest.approx(rate, abs=0.045 * (rate > 0))
    both = np.mean(dropped["attention"] & dropped["mlp"])
    assert both == pytest.approx(rate**2, abs=0.045 * (rate > 0))
    if i == (rule == "linear"):  # the first that drops, whose input is whole
      survives = ~dropped["attention"]
      np.testing.assert_allclose(
        block["attention"][survives],
        plain[f"encoderblock_{i}"]["attention"][survives] / (1 - rate),
        rtol=1e-5,
        atol=1e-5,
      )


@pytest.mark.slow
def test_stochastic_depth_keeps_the_expectation_in_bfloat16():
  # Block 1 of 0, 1, 2 drops with chance 0.1; block 0 drops none.
  x = images(2000)
  _, plain = apply(x, is_training=False, dtype="bfloat16")
  _, out = apply(x, seed=4, stochastic_depth=0.2, dtype="bfloat16")
  expected = np.asarray(plain["encoderblock_1"]["attention"], "d")
  got = np.asarray(out["encoderblock_1"]["attention"], "d")
  survives = ~np.all(got == 0, (1, 2))
  got, expected = got[survives], expected[survives]
  slope = np.sum(got * expected) / np.sum(expected**2)
  # 43,000 numbers that are each rounded by up to 2^-9: a standard deviation of
  # 1e-5. With 0.9 rounded to bfloat16 it is 1.0017 times as large.
  assert slope == pytest.approx(1 / 0.9, rel=1e-4)
