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
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
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


def of_state(tree: Any) -> "Computed":
  """Computes the digests of all arrays of a tree, where they are.

  The devices are not waited for where one process has all of them; several
  processes add up what each of them has, so all of them call it, in their main
  threads. The arrays may be donated when it has returned. Each shape is
  compiled once, but for arrays in the host's own memory, which numpy reads.

  Args:
    tree: Arrays of jax.
  """
  return Computed(
    {
      path_of(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
  )


class Computed:
  """Digests that the devices may still compute; `of_state` makes it."""

  def __init__(self, leaves: dict[str, jax.Array]):
    self._facts = {path: (x.dtype.name, x.shape) for path, x in leaves.items()}
    sums = [
      sums_on_host(x) if _is_on_host(x) else sums_on_devices(x)
      for x in leaves.values()
    ]
    if jax.process_count() > 1:
      mine = np.stack([_total(x) for x in sums])
      sums = multihost_utils.process_allgather(mine).sum(0, dtype=np.uint32)
    self._sums = dict(zip(leaves, sums, strict=True))

  def get(self) -> dict[str, Digest]:
    """Waits for the devices; returns path -> digest. Any thread may call it."""
    return {
      path: Digest(*facts, _hex(_total(self._sums[path])))
      for path, facts in self._facts.items()
    }


def of_numpy(tree: Any) -> dict[str, Digest]:
  """Returns path -> digest of a tree of numpy arrays, or what becomes one."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    x = np.asarray(leaf)
    found[path_of(path)] = Digest(x.dtype.name, x.shape, _hex(sums_of(x)))
  return found


def sums_of(x: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
  """Returns the two sums of an array, uint32 [2].

  Args:
    x: Any array of numbers.
    places: Number of each element in the array that it is a part of, uint32;
      None: it is the whole.

  >>> sums_of(np.zeros(1, np.float32))
  array([0, 0], dtype=uint32)
  """
  words = _words(x)
  first = second = 0
  mixed_places, odd_places = _of_places()
  w = np.empty(min(CHUNK, words.size), np.uint32)
  other = np.empty_like(w)
  for begin in range(0, words.size, CHUNK):  # in place: memory is the limit
    part = words[begin : begin + CHUNK]
    w, other = w[: part.size], other[: part.size]
    if places is None:
      odd = odd_places
      begin_mixed = np.uint32(begin * PLACE % 2**32)
      np.add(mixed_places[: part.size], begin_mixed, out=other)
    else:
      i = places[begin : begin + CHUNK]
      odd = 2 * i + np.uint32(1)
      np.multiply(i, np.uint32(PLACE), out=other)
    np.bitwise_xor(part, other, out=w)
    w *= np.uint32(FIRST)
    w ^= np.right_shift(w, np.uint32(15), out=other)
    w *= np.uint32(SECOND)
    w ^= np.right_shift(w, np.uint32(15), out=other)
    total = int(w.sum(dtype=np.uint32))
    w *= odd[: part.size]
    first += total
    second += int(w.sum(dtype=np.uint32))
    if places is None:
      second += 2 * begin * total
  return np.array([first % 2**32, second % 2**32], np.uint32)


@functools.cache
def _of_places() -> tuple[np.ndarray, np.ndarray]:
  """Returns i*`PLACE` and 2i + 1 of the places of a chunk."""
  places = np.arange(CHUNK, dtype=np.uint32)
  return places * np.uint32(PLACE), 2 * places + np.uint32(1)


def _words(x: np.ndarray) -> np.ndarray:
  """Returns the elements' bits: an unsigned integer each, two of 64 bits."""
  flat = np.ascontiguousarray(x).reshape(-1)
  size = flat.dtype.itemsize
  return flat.view(np.uint32 if size >= 4 else f"u{size}")


def _is_on_host(x: jax.Array) -> bool:
  return all(d.platform == "cpu" for d in x.sharding.device_set)


def sums_on_host(x: jax.Array) -> np.ndarray:
  """Returns the sums of what this process has of an array, uint32 [2].

  Of shards that several devices have, one has the number 0 and counts.
  """
  total = np.zeros(2, np.uint32)
  for shard in x.addressable_shards:
    if shard.replica_id == 0:
      part = np.asarray(shard.data)
      places = None
      if part.shape != x.shape:
        places = np.zeros((), np.uint32)
        for size, where in zip(x.shape, shard.index, strict=True):
          of_axis = np.arange(size, dtype=np.uint32)[where]
          places = places[..., None] * np.uint32(size) + of_axis
        places = _of_words(places, part.dtype.itemsize)
      total += sums_of(part, places)
  return total


def _of_words(places: np.ndarray, itemsize: int) -> np.ndarray:
  """Returns places of words, of which an element of 64 bits has two."""
  if itemsize <= 4:
    return places.reshape(-1)
  return (2 * places[..., None] + np.arange(2, dtype=np.uint32)).reshape(-1)


def sums_on_devices(x: jax.Array) -> jax.Array:
  """Starts to compute what `sums_of` does, on the devices that have the array.

  No device waits for another: each adds up its own shard.

  Returns:
    uint32 [..., 2]; the sum over all but the last axis is that of the array.
  """
  return program_of(x)(x)


def program_of(x: jax.Array | jax.ShapeDtypeStruct):
  """Returns the jitted function of `sums_on_devices`, for arrays like this."""
  if isinstance(x.sharding, NamedSharding):
    spec = (*x.sharding.spec, *(None,) * (x.ndim - len(x.sharding.spec)))
    return _jitted(x.sharding.mesh, spec)
  return _jitted(None, (None,) * x.ndim)


@functools.cache
def _jitted(mesh: Mesh | None, spec: tuple):
  """Returns the jitted function of arrays that are split in this way."""

  def sums(x: jax.Array, whole: tuple[int, ...]) -> jax.Array:
    words = jnp.uint32
    if x.dtype == jnp.bool_:
      w = x.astype(words)
    else:
      unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, words)
      w = jax.lax.bitcast_convert_type(x, unsigned).astype(words)
    i, stride = jnp.zeros(w.shape, words), w.size // max(1, x.size)
    if w.ndim > x.ndim:  # of 64 bits
      i = jax.lax.broadcasted_iota(words, w.shape, x.ndim)
    for axis in reversed(range(x.ndim)):
      place = jax.lax.broadcasted_iota(words, w.shape, axis)
      if spec[axis] is not None:
        part = jax.lax.axis_index(spec[axis]).astype(words)
        place += part * words(x.shape[axis])
      i += place * words(stride % 2**32)
      stride *= whole[axis]
    w = (w ^ i * words(PLACE)) * words(FIRST)
    w = (w ^ w >> 15) * words(SECOND)
    w = w ^ w >> 15
    second = w * (2 * i + 1)
    found = jnp.stack([w.sum(dtype=words), second.sum(dtype=words)])
    return found.reshape((1,) * x.ndim + (2,))

  def digest(x: jax.Array) -> jax.Array:
    local = functools.partial(sums, whole=x.shape)
    if mesh is None:
      return local(x)
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=P(*spec),
      out_specs=P(*spec, None),
      check_vma=False,
    )(x)

  return jax.jit(digest)


def _total(found: Any) -> np.ndarray:
  """Adds up the sums of the shards that this process has."""
  if isinstance(found, jax.Array):
    parts = [s.data for s in found.addressable_shards if s.replica_id == 0]
    found = np.concatenate(
      [np.zeros((1, 2), np.uint32), *(np.reshape(p, (-1, 2)) for p in parts)]
    )
  return found.reshape(-1, 2).sum(0, dtype=np.uint32)


def _hex(sums: np.ndarray) -> str:
  return "".join(f"{int(s):08x}" for s in sums)


def of_json(value: Any) -> str:
  """Returns a digest of what a JSON value says, not of how it is spelled."""
  text = json.dumps(value, sort_keys=True, separators=(",", ":"))
  return of_bytes(text.encode())


def of_bytes(content: bytes) -> str:
  """Returns the first 32 digits of a SHA-256."""
  return hashlib.sha256(content).hexdigest()[:32]


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
