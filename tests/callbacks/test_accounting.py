"""What a run cost: closed forms, and once over any number of resumes."""

import doctest

import pytest

from vit_jax.callbacks import accounting
from vit_jax.callbacks.accounting import KEY, Account, batches_seen
from vit_jax.config import model_config


class Clock:
  """Seconds that a test sets."""

  now = 5.0

  def __call__(self):
    return self.now


def test_examples():
  assert doctest.testmod(accounting).failed == 0


def test_closed_form():
  """A patch of 8 on 8 px: one token, and the class token."""
  model = model_config(variant="Ti/8", width=4, depth=1, mlp_dim=8, num_heads=1)
  tokens, width, mlp, classes = 2, 4, 8, 3
  macs = 8 * 8 * 3 * width  # the patch's embedding
  macs += tokens * (4 * width * width + 2 * width * mlp)  # kernels
  macs += 2 * tokens * tokens * width  # scores, and their sums of values
  macs += width * classes
  flops = model.train_flops((8, 8), classes)
  assert flops == 3 * 2 * macs
  account = Account(16, flops, num_devices=4, clock=Clock()).at(1000)
  assert account["images_seen"] == 16_000
  assert account["exaflops"] == 6 * macs * 16_000 / 1e18


def _run(stops, total=100, num_devices=8, seconds=36.0):
  """The account at the end of a run that stops at these steps, and resumes."""
  before, start = None, 0
  for stop in (*stops, total):
    clock = Clock()
    account = Account(10, 2 * 10**15, num_devices, start, before, clock=clock)
    clock.now += seconds * (stop - start)
    before, start = account.at(stop), stop
    clock.now += 999.0  # lost: no checkpoint has it
  return before


@pytest.mark.parametrize("stops", [(), (40,), (10, 20, 90), (100,)])
def test_carried_over_resumes_once(stops):
  account = _run(stops)
  assert account["images_seen"] == 1000
  assert account["exaflops"] == 2.0
  # 100 steps of 36 seconds on 8 devices.
  assert account["device_hours"] == pytest.approx(8.0)
  assert account["init"] is None


def test_batch_and_devices_may_change_where_a_run_resumes():
  clock = Clock()
  first = Account(10, 10**18, 2, clock=clock)
  clock.now += 3600
  then = Account(5, 10**18, 4, 7, first.at(7), clock=clock)
  clock.now += 3600
  account = then.at(9)
  assert account["images_seen"] == 7 * 10 + 2 * 5
  assert account["exaflops"] == 80 and account["device_hours"] == 2 + 4


def test_no_image_is_left_out_however_often_batches_change():
  metadata, step, seen = {}, 0, set()
  for size, steps in ((24, 5), (32, 2), (24, 3), (10, 4)):
    first = batches_seen(metadata, step, size) * size
    assert 0 <= len(seen) - first < size
    seen |= {*range(first, first + steps * size)}
    before = metadata.get(KEY)
    account = Account(size, 1, 1, step, before, position=first)
    step += steps
    metadata = account.metadata(step)
    assert seen == {*range(metadata["position"])}
  assert metadata[KEY]["images_seen"] == 24 * 8 + 32 * 2 + 10 * 4


def test_a_checkpoint_that_states_nothing():
  """Images and FLOPs follow from the step; hours do not."""
  clock = Clock()
  account = Account(10, 10**17, 1, start=20, clock=clock)
  clock.now += 3600
  assert account.at(30) == {
    "images_seen": 300,
    "flops": 300 * 10**17,
    "exaflops": 30.0,
    "device_hours": None,
    "init": None,
  }
  assert "train/device_hours" not in account.metrics(30)
  assert accounting.text(account.at(30)).endswith("device-hours unknown")


def test_the_run_before_is_stated_beside_not_added():
  first = _run(())
  clock = Clock()
  tuned = Account(1, 10**15, 1, init=first, clock=clock)
  clock.now += 1800
  resumed = Account(1, 10**15, 1, 5, tuned.at(5), clock=clock)
  clock.now += 1800
  account = resumed.at(10)
  assert account["init"] == first
  assert account["images_seen"] == 10 and account["device_hours"] == 1.0
  assert accounting.text(account) == (
    "10 images seen, 0.01 exaFLOPs, 1 device-hours; the run before: 1,000"
    " images seen, 2 exaFLOPs, 8 device-hours"
  )
