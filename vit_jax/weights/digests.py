"""Digests of arrays that depend on their numbers alone, not on their layout.

Orbax stores no checksum of array data, and a flipped bit is restored without a
word. So a checkpoint keeps a digest of each array: the same for every mesh and
number of processes, since it is a sum over the elements, of a function of an
element's bits and of its place. The devices compute it when the state is
saved, without a copy of the state; numpy when weights are read.

The bits w of element i (those of 64-bit types are two elements) are mixed by

    x = mix((w ^ i*0x9E3779B1) * 0x85EBCA6B),   mix(x) = x ^ x >> 15
    x = mix(x * 0xC2B2AE35)

modulo 2^32, each step of which can be undone: two values of w never give the
same x. The digest is (sum of x, sum of x*(2i + 1)), modulo 2^32 each. So a
change of one element always changes both sums; a change of several leaves them
both as they were with a probability of about 2^-64. It is no protection from
somebody who means to deceive. The multipliers are those of MurmurHash3 and,
for places, 2^32 divided by the golden ratio.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.sharding import path_of

PLACE, FIRST, SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
CHUNK = 1 << 16  # elements that numpy takes at once: what its caches hold


class Digest(NamedTuple):
  """What is known of one array.

  dtype: Name of its type, as "bfloat16".
  shape: Its shape.
  sums: 16 hexadecimal digits: the two sums of the module's formula.
  """

  dtype: str
  shape: tuple[int, ...]
  sums: str


def on_devices(tree: Any) -> "OnDevices":
  """Starts to compute the digests of all arrays of a tree, where they are.

  Returns at once: the arrays may then be donated. Each shape is compiled once.
  All processes must call it, of which each gets all digests.

  Args:
    tree: Arrays of jax; others are taken as numpy does.
  """
  leaves = {
    path_of(path): leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
  sums = {
    path: _jitted(_everywhere(x))(x) if isinstance(x, jax.Array) else sums_of(x)
    for path, x in leaves.items()
  }
  facts = {path: (x.dtype.name, x.shape) for path, x in leaves.items()}
  return OnDevices(facts, sums)


class OnDevices:
  """Digests that may still be computed; `on_devices` makes it."""

  def __init__(self, facts: dict[str, tuple], sums: dict[str, Any]):
    self._facts, self._sums = facts, sums

  def get(self) -> dict[str, Digest]:
    """Waits for the devices; returns path -> digest."""
    sums = jax.device_get(self._sums)
    return {
      path: Digest(*facts, _hex(sums[path]))
      for path, facts in self._facts.items()
    }


def of_numpy(tree: Any) -> dict[str, Digest]:
  """Returns path -> digest of a tree of numpy arrays, or what becomes one."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    x = np.asarray(leaf)
    found[path_of(path)] = Digest(x.dtype.name, x.shape, _hex(sums_of(x)))
  return found


def sums_of(x: np.ndarray) -> np.ndarray:
  """Returns the two sums of an array, uint32 [2].

  >>> sums_of(np.zeros(1, np.float32))
  array([0, 0], dtype=uint32)
  """
  flat = np.ascontiguousarray(x).reshape(-1)
  size = flat.dtype.itemsize
  words = flat.view(np.uint32 if size >= 4 else f"u{size}")
  first = second = 0
  offsets = np.arange(min(CHUNK, words.size), dtype=np.uint32)
  for begin in range(0, words.size, CHUNK):
    w = words[begin : begin + CHUNK].astype(np.uint32)
    i = offsets[: w.size] + np.uint32(begin % 2**32)
    w ^= i * np.uint32(PLACE)
    w *= np.uint32(FIRST)
    w ^= w >> np.uint32(15)
    w *= np.uint32(SECOND)
    w ^= w >> np.uint32(15)
    first += int(w.sum(dtype=np.uint32))
    i += i
    i += np.uint32(1)
    i *= w
    second += int(i.sum(dtype=np.uint32))
  return np.array([first % 2**32, second % 2**32], np.uint32)


def _sums(x: jax.Array) -> jax.Array:
  """`sums_of`, on devices."""
  size = x.dtype.itemsize
  if x.dtype == jnp.bool_:
    w = x.astype(jnp.uint32)
  else:
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
    w = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
  i = jnp.zeros(w.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(w.ndim)):
    place = jax.lax.broadcasted_iota(jnp.uint32, w.shape, axis)
    i += place * jnp.uint32(stride % 2**32)
    stride *= w.shape[axis]
  w = (w ^ i * jnp.uint32(PLACE)) * jnp.uint32(FIRST)
  w = (w ^ w >> 15) * jnp.uint32(SECOND)
  w = w ^ w >> 15
  second = w * (2 * i + 1)
  return jnp.stack([w.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)])


@functools.cache
def _jitted(out: jax.sharding.Sharding):
  return jax.jit(_sums, out_shardings=out)


def _everywhere(x: jax.Array) -> jax.sharding.Sharding:
  """A sharding of small results that all processes see."""
  if isinstance(x.sharding, NamedSharding):
    return NamedSharding(x.sharding.mesh, P())
  return x.sharding


def _hex(sums: np.ndarray) -> str:
  return "".join(f"{int(s):08x}" for s in sums)


def of_json(value: Any) -> str:
  """Returns the SHA-256 of what a JSON value says, not of how it is spelled."""
  text = json.dumps(value, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def differences(
  got: Mapping[str, Digest], want: Mapping[str, Digest]
) -> list[str]:
  """Returns the arrays, with words, in which two sets of digests differ."""
  found = []
  for path in sorted(got.keys() | want.keys()):
    a, b = got.get(path), want.get(path)
    if a == b:
      continue
    if a is None or b is None:
      found.append(f"{path} is {'missing' if a is None else 'not expected'}")
    elif a[:2] != b[:2]:
      found.append(f"{path} is {_told(a)}, expected {_told(b)}")
    else:
      found.append(f"{path} has the digest {a.sums}, expected {b.sums}")
  return found


def _told(digest: Digest) -> str:
  return f"{digest.dtype}[{','.join(map(str, digest.shape))}]"
