"""Images per second, without the pauses; and waiting for input."""

import threading
import time
from unittest import mock

import jax
import pytest

from vit_jax.callbacks import CallbackList
from vit_jax.callbacks.throughput import Throughput


def device(stats):
  """Returns a device with these statistics of its memory."""
  return mock.Mock(jax.Device, memory_stats=lambda: stats)


@pytest.fixture
def clock(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])
  return now


def test_rates_leave_out_compilation_and_pauses(clock):
  count = lambda number: {"peak_bytes_in_use": number}
  devices = [device(count(3)), device(count(5))]
  throughput = Throughput(8, 2, 5, peak_flops=100.0, devices=devices)
  hooks = CallbackList([throughput])
  hooks.enter("step")
  clock[0] = 100.0  # compilation
  assert hooks.on_log(1, {"loss": 2.0}) == {"loss": 2.0}
  clock[0] = 102.0
  with hooks.phase("evaluation"):
    clock[0] = 140.0
    with hooks.phase("save"):
      clock[0] = 150.0
  clock[0] = 152.0
  # 10 steps of 8 images in 4 seconds; 5 FLOP an image of 100 FLOP/s a device.
  assert hooks.on_log(11, {}) == {
    "images_per_second": 20.0,
    "images_per_second_per_device": 10.0,
    "input_wait": 0.0,
    "mfu": 0.5,
    "peak_bytes": 5.0,
  }


class Step:
  """What a device computes, until the test says that it is done."""

  def __init__(self):
    self._done = threading.Event()

  def block_until_ready(self):
    self._done.wait()

  def finish(self):
    self._done.set()


class Run:
  """A run after its first step, on a clock of the test's.

  Attributes:
    hooks: Its callbacks.
    notes: What they printed.
    steps: Those given to the device.
  """

  def __init__(self, clock):
    self._clock = clock
    self.notes, self.steps = [], []
    # No peak is known, and a CPU does not count its memory.
    self._throughput = Throughput(
      8, 1, 5, None, [device(None)], self.notes.append
    )
    self.hooks = CallbackList([self._throughput])
    with self.hooks.phase("input"):  # before the first step, no better than
      clock[0] += 5.0  # compilation
    self.finish(self.gives())
    self.hooks.on_log(1, {})

  def gives(self):
    """Gives the device a step."""
    step = Step()
    self.steps.append(step)
    self.hooks.on_step(2, {}, {"loss": step})
    return step

  def finish(self, step):
    """Ends the newest step, at the time that it is."""
    step.finish()
    self._throughput.step_end.result()


@pytest.fixture
def run(clock):
  run = Run(clock)
  yield run
  for step in run.steps:  # a thread waits for each
    step.finish()


def test_waiting_counts_while_the_device_is_idle(clock, run):
  start = clock[0]
  step = run.gives()
  with run.hooks.phase("input"):
    clock[0] = start + 4.0  # the step is computed: no loss
    run.finish(step)
    clock[0] = start + 7.0  # 3 seconds of nothing to do
  run.finish(run.gives())
  clock[0] = start + 8.0  # idle, but the input is not asked
  with run.hooks.phase("input"):
    clock[0] = start + 10.0  # 2 more
  with run.hooks.phase("evaluation"):
    clock[0] = start + 100.0
  values = run.hooks.on_log(2, {})
  assert values["input_wait"] == 0.5
  assert not values.keys() & {"mfu", "peak_bytes"}
  with run.hooks.phase("input"):
    clock[0] += 1.0
  assert run.hooks.on_log(3, {})["input_wait"] == 1.0
  clock[0] += 1.0
  assert run.hooks.on_log(4, {})["input_wait"] == 0.0  # not counted twice
  (text,) = run.notes  # once is enough
  assert text.startswith("input ") and "50%" in text


def test_at_most_two_steps_wait_on_the_device(run):
  steps = [run.gives() for _ in range(2)]
  done = threading.Event()
  thread = threading.Thread(target=lambda: (run.gives(), done.set()))
  thread.start()
  assert not done.wait(0.2)  # the third waits for the first
  steps[0].finish()
  assert done.wait(10.0)
  thread.join()
  steps[1].finish()
