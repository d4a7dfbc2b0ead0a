"""Images per second, without the pauses."""

import pytest

from vit_jax import meter as meter_lib


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
    "mfu": 0.5,
  }


def test_no_mfu_without_a_known_peak(clock):
  meter = meter_lib.Meter(8, 2, 5, None)
  meter.rates(1)
  clock[0] = 1.0
  assert "mfu" not in meter.rates(2)
