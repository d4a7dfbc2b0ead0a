"""Fingerprints of steps: the same on any mesh, kept through stops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import batch as batch_lib
from vit_jax import sharding
from vit_jax.callbacks import fingerprints
from vit_jax.callbacks.fingerprints import Fingerprints, read
from vit_jax.config import MeshConfig


def prints(batch):
  return [int(x) for x in batch_lib.fingerprints(batch)]


@pytest.fixture
def batch():
  return tiny.batch(0, tiny.config())


@pytest.mark.parametrize("is_multilabel", [False, True])
def test_devices_on_a_mesh_and_numpy_agree(batch, is_multilabel):
  if is_multilabel:
    batch["label"] = np.random.default_rng(0).random((16, 10), np.float32)
  mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  spread = sharding.to_global(batch, mesh)
  assert [int(x) for x in jax.jit(batch_lib.fingerprints)(spread)] == prints(
    batch
  )


def test_golden(batch):
  """Files of an earlier version must compare with those of a later one."""
  assert prints(batch) == [2163583326, 3889765271, 2967209685, 1]


def test_they_tell_records_order_and_pixels_apart(batch):
  records, order, pixels, undecodable = prints(batch)
  swapped = {k: v.copy() for k, v in batch.items()}
  for value in swapped.values():
    value[[2, 5]] = value[[5, 2]]
  other = prints(swapped)
  assert other[0] == records and other[1] != order and other[2] != pixels
  for key, change in (("index", 1), ("label", 1), ("mask", None)):
    changed = {k: v.copy() for k, v in batch.items()}
    changed[key][3] = (
      not changed[key][3] if change is None else (changed[key][3] + change)
    )
    other = prints(changed)
    assert other[0] != records and other[1] != order and other[2] == pixels
    assert other[3] == undecodable + (key == "mask")
  brighter = {**batch, "image": batch["image"].copy()}
  brighter["image"][7, 3, 3, 1] ^= 1
  other = prints(brighter)
  assert other[:2] == [records, order] and other[2] != pixels
  # Neighbours that change places, along each axis.
  for axis in (1, 2, 3):
    rolled = {**batch, "image": np.roll(batch["image"], 1, axis)}
    assert prints(rolled)[2] != pixels


def of_step(step):
  loss = np.float32(1 / step).view(np.uint32)
  return jnp.array([step * 7, step * 11, 3, 1, *[loss] * 3, 1], jnp.uint32)


def run(folder, start, end, fetched=()):
  """Steps of which the file gets those up to the last in `fetched`."""
  writer = Fingerprints(str(folder), start)
  for step in range(start + 1, end + 1):
    writer.add(step, of_step(step))
    if step in fetched:
      writer.fetch()
  return writer


def test_a_stopped_run_has_the_bytes_of_one_that_was_not(tmp_path):
  run(tmp_path / "one", 0, 20, fetched=(5, 20))
  run(tmp_path / "two", 0, 14, fetched=(7, 12))  # killed: 13, 14 are lost
  found = read(tmp_path / "two")
  assert found["step"].tolist() == list(range(1, 13))
  np.testing.assert_array_equal(
    found["loss"], (1 / np.arange(1, 13)).astype(np.float32)
  )
  path = tmp_path / "two" / fingerprints.FILE
  with path.open("ab") as file:
    file.write(b"\7" * 13)  # cut off within a record
  writer = run(tmp_path / "two", 8, 20, fetched=(10, 20))
  assert writer.before["step"].tolist() == list(range(1, 9))
  files = [tmp_path / name / fingerprints.FILE for name in ("one", "two")]
  assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_not_fetched_is_bounded(tmp_path):
  writer, one = Fingerprints(str(tmp_path)), of_step(1)
  assert not writer.is_full
  for step in range(1, fingerprints.MOST_PENDING + 1):
    writer.add(step, one)
  assert writer.is_full
  taken = writer.fetch(leave=fingerprints.NEWEST)
  assert len(taken) == fingerprints.MOST_PENDING - fingerprints.NEWEST
  assert len(writer.fetch()) == fingerprints.NEWEST and not writer.is_full
  assert len(writer.fetch()) == 0


@pytest.mark.parametrize(
  "damage",
  [
    lambda data: b"",
    lambda data: data[: len(fingerprints.MAGIC) - 3],
    lambda data: b"other" + data[5:],
    lambda data: data[:-7],
    lambda data: data + bytes(64),
    lambda data: data[: len(fingerprints.MAGIC) + 64] + data,
  ],
)
def test_odd_bytes_leave_what_is_whole(tmp_path, damage):
  run(tmp_path, 0, 6, fetched=(6,))
  whole = read(tmp_path)
  path = tmp_path / fingerprints.FILE
  path.write_bytes(damage(path.read_bytes()))
  found = read(tmp_path)
  steps = found["step"].tolist()
  assert steps == sorted(set(steps)) and len(found) <= len(whole) + 3


def test_a_run_without_them(tmp_path):
  assert len(read(tmp_path)) == 0
