"""Images per second, without the pauses; and waiting for input."""

import threading
import time
import types

import pytest

from vit_jax.callbacks import CallbackList
from vit_jax.callbacks.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])
  return now


def test_rates_leave_out_compilation_and_pauses(clock):
  hooks = CallbackList([Throughput(8, 2, flops_per_image=5, peak_flops=100.0)])
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
  }


@pytest.mark.parametrize("bytes_, peak", [((3, 5), 5.0), ((None,) * 2, None)])
def test_the_most_memory_of_a_device(clock, bytes_, peak):
  """A CPU does not count its memory."""
  counts = [n and {"peak_bytes_in_use": n} for n in bytes_]
  devices = (types.SimpleNamespace(memory_stats=lambda c=c: c) for c in counts)
  throughput = Throughput(8, 2, 5, None, devices)
  assert throughput.on_log(1, {}) == {}
  clock[0] = 1.0
  values = throughput.on_log(2, {})
  assert values.get("peak_bytes") == peak and "mfu" not in values


class Step:
  """What a device computes, until the test says that it is done."""

  def __init__(self):
    self._done = threading.Event()

  def block_until_ready(self):
    self._done.wait()

  def finish(self):
    self._done.set()


@pytest.fixture
def run(clock):
  """A run after its first step, as its callbacks see it."""
  run = Run(clock)
  yield run
  for step in run.steps:  # a thread waits for each
    step.finish()


class Run:
  """A run on a clock of the test's.

  Attributes:
    hooks: Its callbacks.
    notes: What they printed.
    steps: Those given to the device.
  """

  def __init__(self, clock):
    self._clock = clock
    self.notes, self.steps = [], []
    self._throughput = Throughput(8, 1, 5, None, note=self.notes.append)
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


def test_waiting_counts_from_when_the_device_is_idle(clock, run):
  start = clock[0]
  step = run.gives()
  with run.hooks.phase("input"):
    clock[0] = start + 4.0
    run.finish(step)
    clock[0] = start + 7.0  # 3 seconds of nothing to do
  run.finish(run.gives())
  clock[0] = start + 8.0  # idle, but the input is not asked
  with run.hooks.phase("input"):
    clock[0] = start + 10.0  # 2 more
  with run.hooks.phase("evaluation"):
    clock[0] = start + 100.0
  assert run.hooks.on_log(2, {})["input_wait"] == 0.5
  (text,) = run.notes
  assert text.startswith("input ") and "50%" in text
  with run.hooks.phase("input"):
    clock[0] += 1.0
  assert run.hooks.on_log(3, {})["input_wait"] == 1.0
  clock[0] += 1.0
  assert run.hooks.on_log(4, {})["input_wait"] == 0.0  # not counted twice
  assert len(run.notes) == 1  # once is enough


def test_waiting_while_a_step_computes_is_no_loss(clock, run):
  start = clock[0]
  step = run.gives()
  with run.hooks.phase("input"):
    clock[0] = start + 9.0
  run.finish(step)
  with run.hooks.phase("input"):  # takes no time
    pass
  clock[0] = start + 10.0
  assert run.hooks.on_log(2, {})["input_wait"] == 0.0
  assert not run.notes


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
