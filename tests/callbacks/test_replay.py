"""A bit flipped on purpose is caught, and the device named where it can be."""

import jax
import numpy as np
import pytest
import tiny

from vit_jax import sharding
from vit_jax.callbacks import replay

MESH = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)


@pytest.fixture(scope="module")
def parts():
  return tiny.Parts(tiny.config(**MESH, optim__ema_decay=0.9))


def flipped(x, bit, place, devices):
  """The array with one bit flipped in the parts that some devices hold."""
  held = []
  for shard in x.addressable_shards:
    data = np.array(shard.data)
    if shard.device in devices:
      data.view(np.uint32).reshape(-1)[place] ^= np.uint32(1 << bit)
    held.append(jax.device_put(data, shard.device))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, held)


def run(parts, every_steps, num_steps, spoil=lambda call, state: state):
  """Steps of which `spoil` may change the result, by the number of the call."""
  calls = 0

  def train_step(state, batch):
    nonlocal calls
    calls += 1
    state, metrics = parts.train_step(state, batch)
    return spoil(calls, state), metrics

  step = replay.checked(
    train_step, parts.shapes, parts.mesh, start=0, every_steps=every_steps
  )
  state = parts.state()
  for i in range(num_steps):
    batch = sharding.to_global(tiny.batch(i, parts.config), parts.mesh)
    state, _ = step(state, batch)
  return state, calls


@pytest.mark.slow
def test_it_changes_no_bit_and_computes_two_of_three_once(parts):
  plain, calls = run(parts, 0, 6)
  assert calls == 6
  checked, calls = run(parts, 3, 6)
  assert calls == 8
  for a, b in zip(*map(jax.tree.leaves, (plain, checked)), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  ("bit", "call"),  # of the step, or of the same step again
  [
    (0, 2),
    pytest.param(31, 3, marks=pytest.mark.slow),
    pytest.param(0, 3, marks=pytest.mark.slow),
    pytest.param(31, 2, marks=pytest.mark.slow),
  ],
)
def test_a_flipped_bit_is_caught(parts, call, bit):
  devices = parts.mesh.devices.flat

  def spoil(number, state):
    if number != call:
      return state
    kernel = state.params["head"]["kernel"]
    params = {**state.params, "head": {**state.params["head"]}}
    params["head"]["kernel"] = flipped(kernel, bit, 5, [devices[3]])
    return state.replace(params=params)

  with pytest.raises(replay.DeviceFault) as e:
    run(parts, 2, 2, spoil)
  text = str(e.value)
  assert text.startswith("step 2 was computed twice, and the results differ: 1")
  assert f"the first is params/head/kernel, on {devices[3]}. Neither" in text


@pytest.mark.slow
def test_a_fault_of_all_devices_is_told_as_such(parts):
  """As a gradient is that was wrong before it was summed."""

  def spoil(number, state):
    moved = jax.tree.map(lambda x: x * (1 + 2e-7), state.params)
    return state.replace(params=moved) if number == 2 else state

  with pytest.raises(replay.DeviceFault, match="on all devices, so that the"):
    run(parts, 2, 2, spoil)


def test_a_device_that_repeats_its_fault_differs_from_its_copies(parts):
  device = parts.mesh.devices.flat[6]

  def spoil(number, state):
    if number == 1:
      return state
    count = jax.tree.leaves(state.opt_state)[0]
    return state.replace(
      opt_state=jax.tree.map(
        lambda x: flipped(x, 3, 0, [device]) if x is count else x,
        state.opt_state,
      )
    )

  with pytest.raises(replay.DeviceFault, match=f"count, on {device}"):
    run(parts, 2, 2, spoil)


def test_every_place_and_bit_counts(parts):
  digest = replay.digests(
    jax.tree.map(lambda x: x.sharding, parts.shapes), parts.mesh
  )
  state = parts.state()
  before = np.asarray(digest(state))
  leaves, tree = jax.tree.flatten(state)
  assert before.shape == (8, len(leaves))
  rng = np.random.default_rng(0)
  for number, leaf in enumerate(leaves):
    device = parts.mesh.devices.flat[number % 8]
    size = leaf.addressable_shards[0].data.size
    changed = flipped(leaf, rng.integers(32), rng.integers(size), [device])
    after = digest(
      jax.tree.unflatten(
        tree, [*leaves[:number], changed, *leaves[number + 1 :]]
      )
    )
    assert np.argwhere(np.asarray(after) != before).tolist() == [
      [number % 8, number]
    ]
