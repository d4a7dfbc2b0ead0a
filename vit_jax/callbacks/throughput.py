"""The loop that trains: how fast it goes, and whether it waits for images."""

import collections
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax.sharding import Mesh

from vit_jax.callbacks.phases import Phases
from vit_jax.config import Config
from vit_jax.devices import peak_flops
from vit_jax.step import Facts

TOLD = 0.1  # A larger share of waiting for input is shown and explained.
ADVICE = (
  "input       the device waited for images {:.0%} of the time. To feed it"
  " faster: more CPU cores; data on a faster disk; where data.ops"
  " has decode|inception_crop, decode_inception_crop; stored images not much"
  " larger than the size trained at."
)

PEAK = "peak_bytes_in_use"  # jax's name
AHEAD = 2  # steps given to the device while it computes one


class Meter:
  """Measures images per second and waiting for input between log steps.

  Pauses are left out. `input_wait` is the share, 0 to 1, of the time on the
  clock in which both were true: the loop of this process was inside `input`,
  and the device had finished every step it was given (`runs`). Waiting while a
  step still computes costs nothing, and is not counted; nor is the waiting of
  another process, which lengthens the step. On a CPU that both decodes and
  computes, a small share does not mean that decoding is free.

  Args:
    batch_size: Images per step, over all devices.
    num_devices: Number of devices of all processes.
    flops_per_image: FLOPs of a training step per image.
    peak_flops: Peak of one device, FLOP/s; None where it is not known.
    devices: Those of this process, which may count their memory.
  """

  def __init__(
    self,
    batch_size: int,
    num_devices: int,
    flops_per_image: int,
    peak_flops: float | None,
    devices: Iterable[Any] = (),
  ):
    self._batch_size = batch_size
    self._num_devices = num_devices
    self._flops_per_image = flops_per_image
    self._peak_flops = peak_flops
    self._devices = list(devices)
    self._last: tuple[int, float] | None = None
    self._waited = 0.0
    # A thread that waits for each step, to know when the device became idle.
    self._watcher = concurrent.futures.ThreadPoolExecutor(1, "meter")
    self._idle_since: concurrent.futures.Future | None = None
    self._is_told = False

  def rates(self, step: int) -> dict[str, float]:
    """Returns the rates since the last call; the first call has none.

    The first call follows the first step, whose compilation is no measure of
    the speed. `mfu` is a share of the peak, 0 to 1; `peak_bytes` is the most
    memory that a device of this process held at once since its start, where
    devices count it.
    """
    now, last = time.perf_counter(), self._last
    waited, self._waited = self._waited, 0.0
    self._last = (step, now)
    if last is None or step == last[0]:
      return {}
    per_second = (step - last[0]) * self._batch_size / (now - last[1])
    per_device = per_second / self._num_devices
    rates = {
      "images_per_second": per_second,
      "images_per_second_per_device": per_device,
      "input_wait": waited / (now - last[1]),
    }
    if self._peak_flops:
      rates["mfu"] = per_device * self._flops_per_image / self._peak_flops
    counts = [device.memory_stats() or {} for device in self._devices]
    if peaks := [c[PEAK] for c in counts if PEAK in c]:
      rates["peak_bytes"] = float(max(peaks))
    return rates

  def runs(self, result) -> concurrent.futures.Future[float]:
    """Records that the device was given a step.

    Args:
      result: An array that the step computes, and that is not donated.

    Returns:
      A future of the time when it was computed, by time.perf_counter().
    """
    self._idle_since = self._watcher.submit(_end_of, result)
    return self._idle_since

  @contextlib.contextmanager
  def input(self) -> Iterator[None]:
    """The context in which the loop takes the next batch and sends it."""
    start = time.perf_counter()
    yield
    if self._idle_since is not None and self._idle_since.done():
      idle_since = max(start, self._idle_since.result())
      self._waited += max(0.0, time.perf_counter() - idle_since)

  def advice(self, rates: dict[str, float]) -> str | None:
    """Returns advice on slow input, the first time that it is slow."""
    if self._is_told or rates.get("input_wait", 0.0) <= TOLD:
      return None
    self._is_told = True
    return ADVICE.format(rates["input_wait"])

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves out the time inside, e.g. of an evaluation."""
    start = time.perf_counter()
    yield
    if self._last is not None:
      step, since = self._last
      self._last = (step, since + time.perf_counter() - start)

  def close(self) -> None:
    """Ends the thread, without waiting for the device."""
    self._watcher.shutdown(wait=False, cancel_futures=True)


def meter_of(config: Config, facts: Facts, mesh: Mesh) -> Meter:
  """Returns the meter of a training run on all devices of a mesh."""
  return Meter(
    config.data.batch_size,
    mesh.size,
    config.model.train_flops(facts.image_size, facts.num_classes),
    peak_flops(mesh.devices.flat[0].device_kind),
    mesh.local_devices,
  )


def updates(
  train_step: Callable,
  state: Any,
  batches: Iterable[dict],
  steps: Iterable[int],
  meter: Meter,
  phases: Phases | None = None,
) -> Iterator[tuple[int, Any, dict, concurrent.futures.Future[float]]]:
  """Trains; the host never waits for the newest step.

  No more than `AHEAD` batches wait on the device beside the one that is
  computed.

  Args:
    train_step: (state, batch) -> (state, metrics); may donate the state.
    state: Not to be used afterwards.
    batches: On the devices, or on their way; one for each step at least.
    steps: Their numbers.
    meter: Told of every step, and of the time that a batch takes.
    phases: Told when it waits for a batch, compiles, and of every step; None:
      nobody is told.

  Yields:
    After each step its number, the state, the metrics, and when it ended, see
    `Meter.runs`.
  """
  batches, waiting = iter(batches), collections.deque()
  phases = phases or Phases()
  phase = "compile"
  for step in steps:
    with phases("input"), meter.input():
      batch = next(batches)
    with phases(phase):
      state, metrics = train_step(state, batch)
    phases.beat(step)
    phase = "step"
    end = meter.runs(metrics["loss"])
    waiting.append(end)
    if len(waiting) > AHEAD:
      waiting.popleft().result()
    yield step, state, metrics, end


def _end_of(result) -> float:
  """Returns when the device had computed it; the loop will meet any error."""
  with contextlib.suppress(Exception):
    result.block_until_ready()
  return time.perf_counter()
