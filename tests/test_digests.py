"""Digests: the same for every layout, another one for every flipped bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import digests, sharding
from vit_jax.config import MeshConfig

FEW = functools.partial(settings, derandomize=True, deadline=None)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8"])
SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)


def _array(shape, dtype, seed=0):
  numbers = 100 * np.random.default_rng(seed).normal(size=shape)
  if dtype == "bool":
    return numbers > 0
  return np.asarray(np.abs(numbers), jnp.dtype(dtype))


def _sum(result):
  return np.asarray(result).reshape(-1, 2).sum(0, dtype=np.uint32)


@pytest.mark.parametrize("where", ["host", "devices"])
@pytest.mark.parametrize(
  "shape, dtype, axes",
  [
    ((3, 5, 7), "bfloat16", ()),
    ((3, 5, 7), "uint8", ()),
    ((3, 5, 7), "bool", ()),
    ((), "float32", ()),
    ((2, 0, 3), "float32", ()),
    ((8, 12), "float32", ("data", "tensor")),
    ((8, 12), "float32", (None, ("data", "fsdp"))),
    ((4, 6), "float64", ("fsdp", "data")),
    ((3, digests.CHUNK - 5), "float32", ()),  # in chunks
  ],
)
def test_all_ways_and_meshes_agree(shape, dtype, axes, where):
  mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  x = _array(shape, dtype)
  of = getattr(digests, f"sums_on_{where}")
  with jax.enable_x64(dtype == "float64"):
    spread = jax.device_put(x, NamedSharding(mesh, P(*axes)))
    assert spread.dtype == dtype
    for array in spread, jnp.asarray(x):
      np.testing.assert_array_equal(_sum(of(array)), digests.sums_of(x))


@FEW(max_examples=50)
@given(SHAPES, DTYPES, SEEDS, st.data())
def test_every_flipped_bit_changes_both_sums(shape, dtype, seed, data):
  x = _array(shape, dtype, seed)
  want = digests.sums_of(x)
  bit = data.draw(st.integers(0, 8 * x.nbytes - 1))
  y = x.reshape(-1).copy()
  y.view(np.uint8)[bit // 8] ^= 1 << bit % 8
  assert (digests.sums_of(y.reshape(shape)) != want).all()


@FEW(max_examples=100)
@given(SEEDS, st.integers(0, 31), st.sets(st.integers(0, 99), min_size=2))
def test_no_flips_of_one_bit_in_several_numbers_are_missed(seed, bit, places):
  """Sign bits above all, whose weights in a sum of words add up to 2^32."""
  x = _array((100,), "float32", seed).view(np.uint32)
  y = x.copy()
  y[[*places]] ^= np.uint32(1 << bit)
  assert tuple(digests.sums_of(y)) != tuple(digests.sums_of(x))


def test_order_zeros_and_signs_count():
  x = _array((100,), "float32")
  zero = np.zeros(100, np.float32)
  result = [x, x[::-1], np.roll(x, 1), zero, -zero, np.full(100, np.nan, "f")]
  assert len({bytes(digests.sums_of(y)) for y in result}) == len(result)


def test_of_a_state():
  """Digests on disk must be those of later versions, too."""
  tree = {"a": {"b": _array((2, 3), "float32")}, "c": _array((), "int32")}
  result = digests.of_state(jax.device_put(tree)).get()
  assert result == digests.of_numpy(tree)
  assert result["a/b"][:2] == ("float32", (2, 3))
  x = np.arange(10, dtype=np.float32)
  assert digests.of_numpy({"x": x})["x"].sums == "92038694f26f23ec"


def test_differences():
  a = digests.of_numpy({"a": np.ones(2, "f"), "b": np.ones(3, "f")})
  b = digests.of_numpy({"b": np.ones((3, 1), "f"), "c": np.ones(1, "f")})
  c = digests.of_numpy({"a": np.ones(2, "f"), "b": np.zeros(3, "f")})
  one, two, three = digests.differences(a, b)
  assert one.startswith("a ") and "float32[3,1]" in two and "missing" in three
  assert digests.differences(a, dict(a)) == []
  (text,) = digests.differences(c, a)
  assert "b has the digest" in text and a["b"].sums in text


def test_the_order_of_json_does_not_matter():
  one, other = {"b": 1, "a": [2]}, {"a": [2], "b": 1}
  assert digests.of_json(one) == digests.of_json(other)
  assert digests.of_json({"a": 1}) != digests.of_json({"a": 2})
