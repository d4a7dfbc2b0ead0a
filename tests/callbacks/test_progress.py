"""Plain lines in a file, one redrawn line on a terminal."""

import doctest
import io
import re

import pytest

from vit_jax.callbacks import progress

METRICS = {
  "loss": 6.91234,
  "lr": 4e-4,
  "images_per_second": 1234.5,
  "images_per_second_per_device": 154.3,
  "mfu": 0.412,
}


class _Terminal(io.StringIO):
  encoding = "utf-8"

  def isatty(self):
    return True

  def lines(self):
    """What each line shows after its last redraw."""
    shown = [line.split("\r")[-1] for line in self.getvalue().split("\n")]
    return [line.replace("\x1b[K", "") for line in shown]


class _Clock:
  now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture
def columns(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  set_to = lambda n: monkeypatch.setattr(progress, "_columns", lambda _: n)
  set_to(80)
  return set_to


def test_examples():
  assert doctest.testmod(progress).failed == 0


def test_a_file_gets_one_line_per_log_step():
  file, clock = io.StringIO(), _Clock()
  with progress.Progress(1000, 200, stream=file, clock=clock) as bar:
    for step in range(201, 211):
      clock.now += 3.0
      bar.update(step, METRICS if step % 5 == 0 else None)
    bar.note("checkpoint written")
  # 790 steps left at 3 s each.
  assert file.getvalue().splitlines() == [
    "step 205/1,000  20.5%  loss 6.9123  lr 4.00e-04  1,234 img/s"
    "  154 img/s/device  MFU 41.2%  ETA 39m45s",
    "step 210/1,000  21.0%  loss 6.9123  lr 4.00e-04  1,234 img/s"
    "  154 img/s/device  MFU 41.2%  ETA 39m30s",
    "checkpoint written",
  ]
  assert "\r" not in file.getvalue() and "\x1b" not in file.getvalue()


@pytest.mark.parametrize(
  "share, shown", [(0.1, ""), (0.104, "  input wait 10%"), (1.0, "100%")]
)
def test_waiting_for_input_is_shown_above_a_tenth(share, shown):
  file = io.StringIO()
  bar = progress.Progress(10, stream=file, clock=_Clock())
  bar.note(None)  # nothing to say
  bar.update(10, {"loss": 0.5, "input_wait": share})
  assert shown in file.getvalue()
  assert bool(shown) == ("input" in file.getvalue())
  assert file.getvalue().count("\n") == 1


def test_the_last_line_tells_the_time_taken():
  file, clock = io.StringIO(), _Clock()
  bar = progress.Progress(10, stream=file, clock=clock)
  clock.now = 75.0
  bar.update(10, {"loss": 0.5, "mfu": None})
  assert file.getvalue() == "step 10/10  100.0%  loss 0.5000  took 1m15s\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_a_bar_never_reaches_the_last_column(columns, width):
  columns(width)
  terminal, clock = _Terminal(), _Clock()
  with progress.Progress(93_835, stream=terminal, clock=clock) as bar:
    for step in range(0, 93_835, 9000):
      clock.now += 1234.0
      bar.update(step, METRICS)
  redraws = re.split(r"[\r\n]", terminal.getvalue().replace("\x1b[K", ""))
  assert max(map(len, redraws)) < width
  assert terminal.getvalue().count("\n") == 1


def test_a_narrow_terminal_keeps_what_matters(columns):
  columns(60)
  terminal, clock = _Terminal(), _Clock()
  bar = progress.Progress(1000, stream=terminal, clock=clock)
  bar.update(0, METRICS)
  clock.now = 5.0
  bar.update(500, METRICS)
  bar.close()
  (line, _) = terminal.lines()
  assert line == "████░░░░ 50.0%  500/1,000  loss 6.9123  1,234 img/s  ETA 5s"


def test_a_note_stands_above_the_bar(columns):
  terminal = _Terminal()
  bar = progress.Progress(10, stream=terminal)
  bar.update(5, {"loss": 1.0})
  bar.note("val/top1 0.7512")
  bar.close()
  bar.close()
  note, last, end = terminal.lines()
  assert note == "val/top1 0.7512"
  assert "50.0%  5/10  loss 1.0000" in last and end == ""


def test_redraws_are_rare_and_the_last_step_is_always_drawn(columns):
  terminal, clock = _Terminal(), _Clock()
  bar = progress.Progress(1000, stream=terminal, clock=clock)
  for step in range(1, 1001):
    clock.now += 1e-3
    bar.update(step)
  assert terminal.getvalue().count("\r") < 15
  assert "1,000/1,000" in terminal.lines()[-1]


def test_other_processes_are_silent():
  file = io.StringIO()
  with progress.Progress(10, stream=file, is_shown=False) as bar:
    bar.update(1, METRICS)
    bar.note("hello")
  assert file.getvalue() == ""


def test_a_terminal_without_unicode(columns):
  terminal = _Terminal()
  terminal.encoding = "ascii"
  with progress.Progress(10, stream=terminal) as bar:
    bar.update(5)
  assert terminal.lines()[0].isascii() and "#" in terminal.lines()[0]


def test_nan_is_shown():
  file = io.StringIO()
  progress.Progress(10, stream=file).update(1, {"loss": float("nan")})
  assert "loss nan" in file.getvalue()


def test_one_device_is_told_once_and_unknown_names_come_last():
  file = io.StringIO()
  rates = {"images_per_second": 50.0, "images_per_second_per_device": 50.0}
  metrics = {"zeta": 2.0, **rates, "grad_norm": 1.5, "epoch": 0.1}
  progress.Progress(10, stream=file).update(1, metrics)
  assert file.getvalue() == (
    "step 1/10  10.0%  |g| 1.5  epoch 0.10  50.0 img/s  zeta 2\n"
  )
