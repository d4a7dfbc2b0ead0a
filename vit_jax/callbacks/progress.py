"""The progress of a run: a bar on a terminal, plain lines in a file.

Everything goes to stderr, so that stdout has results only.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Mapping

from vit_jax.writers import console

REDRAW_SECONDS = 0.1  # Redrawing takes longer than a step of 1 ms.
PER_DEVICE = "images_per_second_per_device"
SMALLEST_BAR = 8  # Columns; a shorter bar says less than the percentage.


class Progress:
  """Shows step, metrics, speed and the time that is left.

  On a terminal one line is redrawn in place. Its bar takes the columns that the
  numbers leave; where it is narrow, the less important numbers are dropped
  first. Elsewhere (a file, a pipe, a job's log) each call with metrics prints
  one line, without carriage returns.

  The time left is the time per step since the first update, evaluations and
  checkpoints included, times the steps left. Compilation is not part of it,
  since it comes before the first update.

  Args:
    total_steps: Length of the run.
    initial_step: Step at which the run starts, more than 0 when it resumes.
    is_shown: False prints nothing: for all processes but the first.
    stream: None: stderr.
    clock: Seconds, for tests.
  """

  def __init__(
    self,
    total_steps: int,
    initial_step: int = 0,
    *,
    is_shown: bool = True,
    stream: io.TextIOBase | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._total = total_steps
    self._step = initial_step
    self._metrics: dict[str, float | None] = {}
    self._is_shown = is_shown
    self._stream = sys.stderr if stream is None else stream
    self._clock = clock
    self._start = clock()
    self._first: tuple[float, int] | None = None  # Time and step.
    self._drawn_at = -float("inf")
    self._is_open = True
    self._is_bar = is_shown and _is_terminal(self._stream)
    self._blocks = _blocks(self._stream)
    if self._is_bar:
      self._draw()

  def update(self, step: int, metrics: Mapping | None = None) -> None:
    """Records that `step` updates are applied.

    Args:
      step: Counted from the start of the training, not of this process.
      metrics: The newest numbers by their names in metrics.jsonl, without
        "train/"; None keeps the ones shown. A value of None is left out; "mfu"
        is a share from 0 to 1.
    """
    now = self._clock()
    if self._first is None:
      self._first = (now, step)
    self._step = step
    if metrics is not None:
      self._metrics = dict(metrics)
    if self._is_bar:
      is_due = now - self._drawn_at >= REDRAW_SECONDS
      if metrics is not None or is_due or step >= self._total:
        self._draw()
    elif self._is_shown and metrics is not None:
      self._write(f"step {'  '.join(self._head() + self._fields())}\n")

  def note(self, text: str | None) -> None:
    """Prints text, above the bar where there is one; nothing for None."""
    if not self._is_shown or text is None:
      return
    if self._is_bar and self._is_open:
      self._write(f"\r\x1b[K{text}\n")
      self._draw()
    else:
      self._write(f"{text}\n")

  def close(self) -> None:
    """Leaves the bar as it is on the screen; later calls do nothing."""
    if self._is_open and self._is_bar:
      self._draw()
      self._write("\n")
    self._is_open = self._is_bar = False

  def __enter__(self):
    return self

  def __exit__(self, *exception) -> None:
    # Also after an exception: its traceback starts on a line of its own.
    self.close()

  def _head(self) -> list[str]:
    share = self._step / self._total if self._total else 1.0
    return [f"{self._step:,}/{self._total:,}", f"{100 * share:.1f}%"]

  def _fields(self) -> list[str]:
    return _formatted(self._metrics) + self._time_left()

  def _time_left(self) -> list[str]:
    now = self._clock()
    if self._step >= self._total:
      return [f"took {format_seconds(now - self._start)}"]
    if self._first is None or self._step == self._first[1]:
      return []
    seconds = (now - self._first[0]) / (self._step - self._first[1])
    return [f"ETA {format_seconds(seconds * (self._total - self._step))}"]

  def _draw(self) -> None:
    self._drawn_at = self._clock()
    # One column stays free: a full line makes some terminals wrap.
    width = _columns(self._stream) - 1
    count, percent = self._head()
    metrics = dict(self._metrics)
    while True:
      fields = _formatted(metrics) + self._time_left()
      text = "  ".join([percent, count, *fields])
      room = width - len(text) - 1
      if room >= SMALLEST_BAR or not metrics:
        break
      metrics.pop(_least_needed(metrics))
    bar = self._bar(min(room, 40)) + " " if room >= SMALLEST_BAR else ""
    self._write(f"\r{bar}{text[:width]}\x1b[K")

  def _bar(self, width: int) -> str:
    full, empty = self._blocks
    share = self._step / self._total if self._total else 1.0
    num_full = min(int(share * width), width)
    return full * num_full + empty * (width - num_full)

  def _write(self, text: str) -> None:
    console.write(self._stream, text)


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


def _formatted(metrics: Mapping) -> list[str]:
  """Returns texts in the order of `_FORMATS`, then of names that it lacks."""
  shown = {k: v for k, v in metrics.items() if v is not None}
  if shown.get(PER_DEVICE) == shown.get("images_per_second"):
    shown.pop(PER_DEVICE, None)  # One device: the same number again.
  for name in ("skipped", "undecodable"):
    if not shown.get(name, True):
      shown.pop(name)
  if shown.get("input_wait", 1.0) <= 0.1:
    shown.pop("input_wait")  # The normal case.
  known = [text(shown.pop(k)) for k, text in _FORMATS.items() if k in shown]
  return known + [f"{name} {value:.4g}" for name, value in shown.items()]


def _loss(value) -> str:
  return f"loss {value:.4f}" if abs(value) < 1000 else f"loss {value:.3e}"


def _rate(value) -> str:
  return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


_FORMATS = {
  "loss": _loss,
  "lr": lambda v: f"lr {v:.2e}",
  "grad_norm": lambda v: f"|g| {v:.3g}",
  "param_norm": lambda v: f"|w| {v:.3g}",
  "epoch": lambda v: f"epoch {v:.2f}",
  "images_per_second": lambda v: f"{_rate(v)} img/s",
  PER_DEVICE: lambda v: f"{_rate(v)} img/s/device",
  "mfu": lambda v: f"MFU {100 * v:.1f}%",
  "peak_bytes": lambda v: f"mem {v / 2**30:.2f} GiB",
  "input_wait": lambda v: f"input wait {100 * v:.0f}%",
}


def _least_needed(metrics: Mapping) -> str:
  """Returns the order in which to drop: unknown names first, the loss last."""
  keep = (
    "grad_norm",
    PER_DEVICE,
    "epoch",
    "lr",
    "mfu",
    "input_wait",
    "images_per_second",
    "loss",
  )
  return min(metrics, key=lambda k: keep.index(k) if k in keep else -1)


def _is_terminal(stream: io.TextIOBase) -> bool:
  return stream.isatty() and os.environ.get("TERM") != "dumb"


def _columns(stream: io.TextIOBase) -> int:
  """Returns the width now, so that the bar follows a resized window."""
  try:
    return os.get_terminal_size(stream.fileno()).columns or 80
  except (OSError, ValueError):  # No file descriptor, as in a notebook.
    return 80


def _blocks(stream: io.TextIOBase) -> tuple[str, str]:
  try:
    "█░".encode(getattr(stream, "encoding", None) or "ascii")
  except (UnicodeEncodeError, LookupError):
    return "#", "."
  return "█", "░"


def note(text: str | None) -> None:
  """Prints lines to stderr, above the bar where a run shows one.

  Args:
    text: The lines; None or "": nothing is printed.
  """
  if text and _bar is not None:
    _bar.note(text)
  elif text:
    console.write(sys.stderr, f"{text}\n")


_bar: Progress | None = None  # the bar on the screen


def show(bar: Progress | None) -> None:
  """Sets the bar that `note` prints above."""
  global _bar
  _bar = bar
