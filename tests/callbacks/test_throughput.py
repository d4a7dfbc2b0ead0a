"""Images per second, without the pauses; and waiting for input."""

import threading

import pytest

from vit_jax.callbacks import throughput as meter_lib


@pytest.fixture
def clock(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(meter_lib.time, "perf_counter", lambda: now[0])
  return now


def test_rates_leave_out_compilation_and_pauses(clock):
  meter = meter_lib.Meter(8, 2, flops_per_image=5, peak_flops=100.0)
  clock[0] = 100.0  # compilation
  assert meter.rates(1) == {}
  clock[0] = 102.0
  with meter.paused():
    clock[0] = 150.0
  clock[0] = 152.0
  # 10 steps of 8 images in 4 seconds; 5 FLOP an image of 100 FLOP/s a device.
  assert meter.rates(11) == {
    "images_per_second": 20.0,
    "images_per_second_per_device": 10.0,
    "input_wait": 0.0,
    "mfu": 0.5,
  }


def test_no_mfu_without_a_known_peak(clock):
  meter = meter_lib.Meter(8, 2, 5, None)
  meter.rates(1)
  clock[0] = 1.0
  assert "mfu" not in meter.rates(2)


class Device:
  """Counts its memory, or does not, as a CPU."""

  def __init__(self, counts):
    self._counts = counts

  def memory_stats(self):
    return self._counts


@pytest.mark.parametrize(
  "counts, peak",
  [
    ([{"peak_bytes_in_use": 3}, {"peak_bytes_in_use": 5}], 5.0),
    ([None, None], None),
    ([{"bytes_in_use": 3}], None),
    ([], None),
  ],
)
def test_the_most_memory_of_a_device(clock, counts, peak):
  meter = meter_lib.Meter(8, 2, 5, None, map(Device, counts))
  assert meter.rates(1) == {}
  clock[0] = 1.0
  assert meter.rates(2).get("peak_bytes") == peak


class Step:
  """What a device computes, until the test says that it is done."""

  def __init__(self, meter):
    self._done = threading.Event()
    meter.runs(self)
    self._end = meter._idle_since

  def block_until_ready(self):
    self._done.wait()

  def finish(self):
    self._done.set()
    self._end.result()  # the time is taken


@pytest.fixture
def meter(clock):
  meter = meter_lib.Meter(8, 1, 5, None)
  with meter.input():  # before the first step; compilation is no better
    clock[0] += 5.0
  Step(meter).finish()
  meter.rates(1)
  yield meter
  meter.close()


def test_waiting_counts_from_when_the_device_is_idle(clock, meter):
  start = clock[0]
  step = Step(meter)
  with meter.input():
    clock[0] = start + 4.0
    step.finish()
    clock[0] = start + 7.0  # 3 seconds of nothing to do
  step = Step(meter)
  step.finish()
  clock[0] = start + 8.0  # idle, but the input is not asked
  with meter.input():
    clock[0] = start + 10.0  # 2 more
  with meter.paused():
    clock[0] = start + 100.0
  rates = meter.rates(2)
  assert rates["input_wait"] == 0.5
  text = meter.advice(rates)
  assert text.startswith("input       the device waited for images 50% of")
  assert "decode_inception_crop" in text
  assert meter.advice(rates) is None  # once is enough
  clock[0] += 1.0
  assert meter.rates(3)["input_wait"] == 0.0  # told before


def test_waiting_while_a_step_computes_is_no_loss(clock, meter):
  start = clock[0]
  step = Step(meter)
  with meter.input():
    clock[0] = start + 9.0
  step.finish()
  with meter.input():  # takes no time
    pass
  clock[0] = start + 10.0
  rates = meter.rates(2)
  assert rates["input_wait"] == 0.0
  assert meter.advice(rates) is None
  assert meter.advice({"input_wait": 0.1}) is None
  assert meter.advice({}) is None  # the first step has no rates


def test_a_step_that_fails_is_not_the_meters_to_tell(clock, meter):
  class Failed:
    def block_until_ready(self):
      raise RuntimeError

  meter.runs(Failed())
  meter._idle_since.result()
  with meter.input():
    clock[0] += 1.0
