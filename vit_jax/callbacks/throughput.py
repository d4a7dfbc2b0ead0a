"""Training speed, whether a run waits for images, and the learning rate."""

import collections
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from vit_jax.callbacks.base import Callback
from vit_jax.callbacks.progress import SLOW_INPUT
from vit_jax.callbacks.progress import note as print_note

MAX_IN_FLIGHT = 2  # steps given to the devices beside the one they compute
ADVICE = (
  "input       the device waited for images {:.0%} of the time;"
  " docs/troubleshooting.md, Speed, has what feeds it faster."
)
PEAK = "peak_bytes_in_use"  # jax's name


class Throughput(Callback):
  """Adds the rates since the last call of `on_log`, except at the first call.

  The first call follows the first step, which includes compilation. Evaluations
  and saves are left out. The rates:

  images_per_second, images_per_second_per_device.
  input_wait: Share of the time, 0 to 1, in which this process waited for a
    batch and the devices had nothing to compute. Waiting while a step is
    computed does not count, because it costs nothing. Waiting for another
    process does not count either; it lengthens the step. On a CPU, which also
    decodes, a small share does not mean that decoding is free.
  mfu: Share of the peak FLOP/s, 0 to 1; only if the peak is known.
  peak_bytes: The most memory that a device of this process used at once since
    its start; only if devices count it.

  `on_step` also waits, so that at most `MAX_IN_FLIGHT` steps are queued in
  addition to the one that is computed.

  Args:
    batch_size: Images per step, over all devices.
    num_devices: Number of devices of all processes.
    flops_per_image: FLOPs of a training step per image.
    peak_flops: Peak of one device, FLOP/s; None if unknown.
    devices: Devices of this process, which may count their memory.
    note: Prints a line of advice, the first time that input is slow.

  Attributes:
    step_end: Future of the time, by time.perf_counter(), when the newest step
      was computed; None before the first.
  """

  def __init__(
    self,
    batch_size: int,
    num_devices: int,
    flops_per_image: int | float,
    peak_flops: float | None,
    devices: Iterable[jax.Device] = (),
    note: Callable[[str], None] = print_note,
  ):
    self._batch_size = batch_size
    self._num_devices = num_devices
    self._flops_per_image = flops_per_image
    self._peak_flops = peak_flops
    self._devices = list(devices)
    self._note = note
    self._phase, self._phase_began = "start", 0.0
    self._last: tuple[int, float] | None = None  # step, and time without pauses
    self._waited = 0.0
    # A thread that waits for each step, to know when the devices became idle.
    self._watcher = concurrent.futures.ThreadPoolExecutor(1, "throughput")
    self.step_end: concurrent.futures.Future[float] | None = None
    self._in_flight: collections.deque[concurrent.futures.Future[float]] = (
      collections.deque()
    )
    self._has_advised = False

  def on_phase(self, name: str) -> None:
    now = time.perf_counter()
    if self._phase == "input" and self.step_end and self.step_end.done():
      idle_since = max(self._phase_began, self.step_end.result())
      self._waited += max(0.0, now - idle_since)
    elif self._phase in ("evaluation", "save") and self._last:
      step, time_before = self._last
      self._last = step, time_before + now - self._phase_began
    self._phase, self._phase_began = name, now

  def on_step(self, step: int, batch: Mapping, metrics: Mapping) -> None:
    self.step_end = self._watcher.submit(_end_of, metrics["loss"])
    self._in_flight.append(self.step_end)
    if len(self._in_flight) > MAX_IN_FLIGHT:
      self._in_flight.popleft().result()

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    rates = self._rates(step)
    if rates.get("input_wait", 0.0) > SLOW_INPUT and not self._has_advised:
      self._has_advised = True
      self._note(ADVICE.format(rates["input_wait"]))
    return values | rates

  def close(self, error: BaseException | None) -> None:
    # Without waiting for the devices.
    self._watcher.shutdown(wait=False, cancel_futures=True)

  def _rates(self, step: int) -> dict[str, float]:
    now, last = time.perf_counter(), self._last
    waited, self._waited = self._waited, 0.0
    self._last = step, now
    if last is None or step == last[0]:
      return {}
    seconds = now - last[1]
    per_second = (step - last[0]) * self._batch_size / seconds
    per_device = per_second / self._num_devices
    rates = {
      "images_per_second": per_second,
      "images_per_second_per_device": per_device,
      "input_wait": waited / seconds,
    }
    if self._peak_flops:
      rates["mfu"] = per_device * self._flops_per_image / self._peak_flops
    counts = [device.memory_stats() or {} for device in self._devices]
    if peaks := [c[PEAK] for c in counts if PEAK in c]:
      rates["peak_bytes"] = float(max(peaks))
    return rates


def _end_of(result) -> float:
  """Returns when an array was computed; the loop itself meets any error."""
  with contextlib.suppress(Exception):
    result.block_until_ready()
  return time.perf_counter()


class LearningRate(Callback):
  """Adds `lr`, the learning rate of the newest update that was applied.

  A skipped step applies none, so the schedule lags by the number of `skipped`
  steps. `NonFinite`, an earlier callback, counts them.

  Args:
    schedule: Jitted; updates applied so far -> learning rate.
  """

  def __init__(self, schedule: Callable[[jax.Array], jax.Array]):
    self._schedule = schedule

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    updates = step - 1 - int(values.get("skipped", 0))
    rate = self._schedule(jax.device_put(np.int32(updates)))
    return values | {"lr": float(jax.device_get(rate))}
