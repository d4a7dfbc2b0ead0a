"""How fast a run goes."""

import contextlib
import time
from collections.abc import Iterator


class Meter:
  """Images per second between log steps, pauses left out.

  Args:
    batch_size: Images per step, over all devices.
    num_devices: Of all processes.
    flops_per_image: Of a training step.
    peak_flops: Of one device, FLOP/s; None where it is not known.
  """

  def __init__(
    self,
    batch_size: int,
    num_devices: int,
    flops_per_image: int,
    peak_flops: float | None,
  ):
    self._batch_size = batch_size
    self._num_devices = num_devices
    self._flops_per_image = flops_per_image
    self._peak_flops = peak_flops
    self._last: tuple[int, float] | None = None

  def rates(self, step: int) -> dict[str, float]:
    """Returns the rates since the last call; the first call has none.

    The first call follows the first step, whose compilation says nothing of
    the speed. `mfu` is a share of the peak, 0 to 1.
    """
    now, last = time.perf_counter(), self._last
    self._last = (step, now)
    if last is None or step == last[0]:
      return {}
    per_second = (step - last[0]) * self._batch_size / (now - last[1])
    per_device = per_second / self._num_devices
    rates = {
      "images_per_second": per_second,
      "images_per_second_per_device": per_device,
    }
    if self._peak_flops:
      rates["mfu"] = per_device * self._flops_per_image / self._peak_flops
    return rates

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves out the time inside, e.g. of an evaluation."""
    start = time.perf_counter()
    yield
    if self._last is not None:
      step, since = self._last
      self._last = (step, since + time.perf_counter() - start)
