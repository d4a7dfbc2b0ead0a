"""Digests of arrays, which depend on the values but not on the sharding.

Orbax stores no checksum of array data, and restores a flipped bit without an
error. Therefore a checkpoint stores a digest of each array. The digest is a sum
over the elements of a function of an element's bits and its position, so it is
the same for every mesh and number of processes. The devices compute it when the
state is saved, without a copy of the state; numpy computes it when weights are
read.

The bits w of element i (a 64-bit number counts as two elements) are mixed by

    x = mix((w ^ i*0x9E3779B1) * 0x85EBCA6B),   mix(x) = x ^ x >> 15
    x = mix(x * 0xC2B2AE35)

modulo 2^32. Each step is invertible, so two values of w never give the same x.
The digest is (sum of x, sum of x*(2i + 1)), each modulo 2^32. A change of one
element always changes both sums. A change of several elements leaves both
unchanged with a probability of about 2^-64. The digest does not protect from
forgery. The multipliers are from MurmurHash3 and, for positions, 2^32
divided by the golden ratio.
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

from vit_jax.param_groups import path_of

PLACE, FIRST, SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
CHUNK = 1 << 16  # elements per call of numpy, so that they fit the caches


class Digest(NamedTuple):
  """The digest of an array.

  dtype: Name of its type, such as "bfloat16".
  shape: Its shape.
  sums: 16 hexadecimal digits: the two sums of the module's formula.
  """

  dtype: str
  shape: tuple[int, ...]
  sums: str


def of_state(tree: Any) -> "PendingDigests":
  """Computes the digests of all arrays of a tree, on their own devices.

  With one process, it does not wait for the devices. Several processes exchange
  their sums, so all of them must call it in their main threads. After it
  returns, the arrays may be donated. It compiles a program for each shape,
  except on a CPU, where numpy computes.

  Args:
    tree: Arrays of jax.
  """
  return PendingDigests(
    {
      path_of(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
  )


class PendingDigests:
  """Digests that the devices may still compute; made by `of_state`."""

  def __init__(self, leaves: dict[str, jax.Array]):
    self._types = {path: (x.dtype.name, x.shape) for path, x in leaves.items()}
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
      path: Digest(*dtype_and_shape, _hex(_total(self._sums[path])))
      for path, dtype_and_shape in self._types.items()
    }


def of_numpy(tree: Any) -> dict[str, Digest]:
  """Returns path -> digest of a tree of arrays, computed by numpy."""
  digests = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    x = np.asarray(leaf)
    digests[path_of(path)] = Digest(x.dtype.name, x.shape, _hex(sums_of(x)))
  return digests


def sums_of(x: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
  """Returns the two sums of an array, uint32 [2].

  Args:
    x: Any array of numbers.
    places: If x is a part of an array, the position of each element in the
      whole array, uint32; None if x is the whole.

  >>> sums_of(np.zeros(1, np.float32))
  array([0, 0], dtype=uint32)
  """
  bits = _bits(x)
  first = second = 0
  mixed_places, odd_places = _of_places()
  w = np.empty(min(CHUNK, bits.size), np.uint32)
  other = np.empty_like(w)
  for begin in range(0, bits.size, CHUNK):  # in place, to save memory
    part = bits[begin : begin + CHUNK]
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
  """Returns i*`PLACE` and 2i + 1 for the positions i of a chunk."""
  places = np.arange(CHUNK, dtype=np.uint32)
  return places * np.uint32(PLACE), 2 * places + np.uint32(1)


def _bits(x: np.ndarray) -> np.ndarray:
  """Returns the elements' bits: an unsigned integer each, two of 64 bits."""
  flat = np.ascontiguousarray(x).reshape(-1)
  size = flat.dtype.itemsize
  return flat.view(np.uint32 if size >= 4 else f"u{size}")


def _is_on_host(x: jax.Array) -> bool:
  return all(d.platform == "cpu" for d in x.sharding.device_set)


def sums_on_host(x: jax.Array) -> np.ndarray:
  """Returns the sums of the shards of this process, uint32 [2].

  If several devices have the same shard, only the one with `replica_id` 0
  counts.
  """
  total = np.zeros(2, np.uint32)
  for shard in x.addressable_shards:
    if shard.replica_id == 0:
      part = np.asarray(shard.data)
      places = None
      if part.shape != x.shape:
        places = np.zeros((), np.uint32)
        for size, where in zip(x.shape, shard.index, strict=True):
          along_axis = np.arange(size, dtype=np.uint32)[where]
          places = places[..., None] * np.uint32(size) + along_axis
        places = _of_elements(places, part.dtype.itemsize)
      total += sums_of(part, places)
  return total


def _of_elements(places: np.ndarray, itemsize: int) -> np.ndarray:
  """Returns the position of each 32-bit word; 64-bit elements have two."""
  if itemsize <= 4:
    return places.reshape(-1)
  return (2 * places[..., None] + np.arange(2, dtype=np.uint32)).reshape(-1)


def sums_on_devices(x: jax.Array) -> jax.Array:
  """Starts to compute the sums, on the devices that have the array.

  Each device adds up its own shard and does not wait for the others.

  Returns:
    uint32 [..., 2]; summed over all but the last axis, the sums of the array.
  """
  return program_of(x)(x)


def program_of(x: jax.Array | jax.ShapeDtypeStruct):
  """Returns the jitted function of `sums_on_devices` for arrays like this."""
  if isinstance(x.sharding, NamedSharding):
    spec = (*x.sharding.spec, *(None,) * (x.ndim - len(x.sharding.spec)))
    return _jitted(x.sharding.mesh, spec)
  return _jitted(None, (None,) * x.ndim)


@functools.cache
def _jitted(mesh: Mesh | None, spec: tuple):
  """Returns the jitted function for arrays with this sharding."""

  def sums(x: jax.Array, whole: tuple[int, ...]) -> jax.Array:
    u32 = jnp.uint32
    if x.dtype == jnp.bool_:
      w = x.astype(u32)
    else:
      unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, u32)
      w = jax.lax.bitcast_convert_type(x, unsigned).astype(u32)
    i, stride = jnp.zeros(w.shape, u32), w.size // max(1, x.size)
    if w.ndim > x.ndim:  # 64 bits are two numbers
      i = jax.lax.broadcasted_iota(u32, w.shape, x.ndim)
    for axis in reversed(range(x.ndim)):
      place = jax.lax.broadcasted_iota(u32, w.shape, axis)
      if spec[axis] is not None:
        part = jax.lax.axis_index(spec[axis]).astype(u32)
        place += part * u32(x.shape[axis])
      i += place * u32(stride % 2**32)
      stride *= whole[axis]
    w = (w ^ i * u32(PLACE)) * u32(FIRST)
    w = (w ^ w >> 15) * u32(SECOND)
    w = w ^ w >> 15
    second = w * (2 * i + 1)
    both = jnp.stack([w.sum(dtype=u32), second.sum(dtype=u32)])
    return both.reshape((1,) * x.ndim + (2,))

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


def _total(sums: np.ndarray | jax.Array) -> np.ndarray:
  """Adds up the sums of the shards that this process has."""
  if isinstance(sums, jax.Array):
    parts = [s.data for s in sums.addressable_shards if s.replica_id == 0]
    sums = np.concatenate(
      [np.zeros((1, 2), np.uint32), *(np.reshape(p, (-1, 2)) for p in parts)]
    )
  return sums.reshape(-1, 2).sum(0, dtype=np.uint32)


def _hex(sums: np.ndarray) -> str:
  return "".join(f"{int(s):08x}" for s in sums)


def of_json(value: Any) -> str:
  """Returns a digest of a JSON value; the order of keys does not matter."""
  text = json.dumps(value, sort_keys=True, separators=(",", ":"))
  return of_bytes(text.encode())


def of_bytes(content: bytes) -> str:
  """Returns the first 32 digits of a SHA-256."""
  return hashlib.sha256(content).hexdigest()[:32]


def differences(
  got: Mapping[str, Digest], want: Mapping[str, Digest]
) -> list[str]:
  """Returns a message for each array in which two sets of digests differ."""
  messages = []
  for path in sorted(got.keys() | want.keys()):
    a, b = got.get(path), want.get(path)
    if a == b:
      continue
    if a is None or b is None:
      state = "missing" if a is None else "not expected"
      messages.append(f"{path} is {state}")
    elif a[:2] != b[:2]:
      messages.append(f"{path} is {_type_text(a)}, expected {_type_text(b)}")
    else:
      messages.append(f"{path} has the digest {a.sums}, expected {b.sums}")
  return messages


def _type_text(digest: Digest) -> str:
  return f"{digest.dtype}[{','.join(map(str, digest.shape))}]"
