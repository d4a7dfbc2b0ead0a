"""The progress of a run: tqdm's bar on a terminal, lines elsewhere.

Everything goes to stderr, so that stdout has only results.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tqdm import tqdm

from vit_jax.callbacks.base import Callback
from vit_jax.writers import console
from vit_jax.writers.console import note

if TYPE_CHECKING:
  from vit_jax.step import TrainState

# Share of waiting for input from which it is shown and explained.
SLOW_INPUT = 0.1


@contextlib.contextmanager
def note_if_slow(what: str, seconds: float = 10.0) -> Iterator[None]:
  """Prints once what the context waits for, if it lasts longer than this.

  A bucket that does not answer holds up a save for minutes.
  """
  text = f"waits       {seconds:g} s so far for {what}"
  timer = threading.Timer(seconds, note, [text])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


class Progress(Callback):
  """Shows step, metrics, speed and remaining time.

  On a terminal a bar is redrawn in place. Elsewhere (a file, a pipe, a job's
  log) each call of `on_log` prints a line.

  The remaining time is the number of remaining steps times the mean time per
  step since the first one. This mean includes evaluations and checkpoints, but
  not the compilation.

  Args:
    total_steps: Length of the run.
    is_shown: False to print nothing, in all processes but the first.
  """

  def __init__(self, total_steps: int, is_shown: bool = True):
    self._total_steps = total_steps
    self._is_shown = is_shown
    self._bar: tqdm | None = None
    self._first: tuple[float, int] | None = None  # time, and step

  def on_start(self, start: int, state: "TrainState", saved: Mapping) -> None:
    self._start = time.monotonic()
    self._bar = tqdm(
      total=self._total_steps,
      initial=start,
      unit="step",
      disable=None if self._is_shown else True,  # None: if it is no terminal
      dynamic_ncols=True,
      smoothing=0.0,  # the speed is the mean since the first step
    )

  def on_step(self, step: int, batch: Mapping, metrics: Mapping) -> None:
    self._bar.update()
    if self._first is None:
      self._first = time.monotonic(), step
      self._bar.unpause()  # the bar's clock starts now

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    fields = metric_texts(values)
    if not self._bar.disable:
      self._bar.set_postfix_str("  ".join(fields))
    elif self._is_shown:
      share = step / self._total_steps
      count = f"{step:,}/{self._total_steps:,}  {100 * share:.1f}%"
      line = "  ".join([f"step {count}", *fields, *self._time_left(step)])
      console.write(sys.stderr, f"{line}\n")
    return values

  def close(self, error: BaseException | None) -> None:
    if self._bar is not None:
      self._bar.close()

  def _time_left(self, step: int) -> list[str]:
    now = time.monotonic()
    if step >= self._total_steps:
      return [f"took {format_seconds(now - self._start)}"]
    if self._first is None or step == self._first[1]:
      return []
    seconds = (now - self._first[0]) / (step - self._first[1])
    return [f"ETA {format_seconds(seconds * (self._total_steps - step))}"]


def format_seconds(seconds: float) -> str:
  """Rounds a duration to two units.

  Example:
    >>> [format_seconds(s) for s in (0.4, 61.0, 3.7e3, 9e4, 1e6)]
    ['0s', '1m01s', '1h01m', '1d01h', '11d13h']
  """
  seconds = int(seconds)
  minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
  if seconds < 60:
    return f"{seconds}s"
  if minutes < 60:
    return f"{minutes}m{seconds % 60:02d}s"
  if hours < 24:
    return f"{hours}h{minutes % 60:02d}m"
  return f"{days}d{hours % 24:02d}h"


def metric_texts(values: Mapping[str, float]) -> list[str]:
  """Returns the metrics of a progress line, with their units.

  Example:
    >>> metric_texts({"loss": 6.9, "skipped": 0.0, "mfu": 0.41})
    ['loss 6.9000', 'MFU 41.0%']
  """
  shown = dict(values)
  per_device = "images_per_second_per_device"
  if shown.get(per_device) == shown.get("images_per_second"):
    shown.pop(per_device, None)  # one device: the same number again
  if shown.get("input_wait", 0.0) <= SLOW_INPUT:
    shown.pop("input_wait", None)
  for name in ("skipped", "undecodable"):
    if not shown.get(name, True):
      shown.pop(name)
  texts = [text(shown[k]) for k, text in _FORMATS.items() if k in shown]
  others = shown.keys() - {*_FORMATS, *_NOT_SHOWN}
  return texts + [f"{k} {shown[k]:.4g}" for k in sorted(others) if "/" not in k]


def _loss(value: float) -> str:
  return f"loss {value:.4f}" if abs(value) < 1000 else f"loss {value:.3e}"


def _rate(value: float) -> str:
  return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


_FORMATS = {
  "loss": _loss,
  "lr": lambda v: f"lr {v:.2e}",
  "grad_norm": lambda v: f"|g| {v:.3g}",
  "param_norm": lambda v: f"|w| {v:.3g}",
  "epoch": lambda v: f"epoch {v:.2f}",
  "images_per_second": lambda v: f"{_rate(v)} img/s",
  "images_per_second_per_device": lambda v: f"{_rate(v)} img/s/device",
  "mfu": lambda v: f"MFU {100 * v:.1f}%",
  "peak_bytes": lambda v: f"mem {v / 2**30:.2f} GiB",
  "input_wait": lambda v: f"input wait {100 * v:.0f}%",
  "skipped": lambda v: f"skipped {v:.0f}",
  "undecodable": lambda v: f"undecodable {v:.0f}",
}
_NOT_SHOWN = ("images_seen", "exaflops", "device_hours", "goodput")
