"""Plain lines in a file, a bar on a terminal, nothing of other processes."""

import io
import sys
import time

import pytest

from vit_jax.callbacks import CallbackList, progress

METRICS = {
  "loss": 6.91234,
  "lr": 4e-4,
  "images_per_second": 1234.5,
  "images_per_second_per_device": 154.3,
  "mfu": 0.412,
  "input_wait": 0.104,
}


class Terminal(io.StringIO):
  encoding = "utf-8"

  def isatty(self):
    return True

  def lines(self):
    """What each line shows after its last redraw."""
    lines = self.getvalue().replace("\x1b[A", "").split("\n")
    return [line.rstrip("\r").split("\r")[-1].rstrip() for line in lines]


def _started(total, start=0, **options):
  hooks = CallbackList([progress.Progress(total, **options)])
  hooks.on_start(start, None, {})
  return hooks


def test_a_file_gets_one_line_per_log_step(capsys, monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  with _started(1000, 200) as hooks:
    for step in range(201, 206):
      now[0] += 3.0
      hooks.on_step(step, {}, {})
    assert hooks.on_log(205, METRICS) == METRICS
    progress.note("checkpoint written")
    now[0] += 60.0
    hooks.on_step(1000, {}, {})
    hooks.on_log(1000, {"loss": 0.5})
  assert capsys.readouterr().err.splitlines() == [
    # 795 steps left at 3 s each.
    "step 205/1,000  20.5%  loss 6.9123  lr 4.00e-04  1,234 img/s"
    "  154 img/s/device  MFU 41.2%  input wait 10%  ETA 39m45s",
    "checkpoint written",
    "step 1,000/1,000  100.0%  loss 0.5000  took 1m15s",
  ]


def test_a_terminal_gets_a_bar_and_notes_above_it(monkeypatch):
  monkeypatch.setattr(sys, "stderr", terminal := Terminal())
  progress.note("before")
  with _started(1000) as hooks:
    for step in range(1, 501):
      hooks.on_step(step, {}, {})
    hooks.on_log(500, METRICS)
    progress.note("val/top1 0.7512")
  before, note, bar, end = terminal.lines()
  assert (before, note, end) == ("before", "val/top1 0.7512", "")
  assert bar.startswith(" 50%|") and "500/1000" in bar
  assert "loss 6.9123  lr 4.00e-04  1,234 img/s" in bar
  assert terminal.getvalue().count("\r") < 15  # a step may take 1 ms


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_other_processes_are_silent(monkeypatch, stream):
  monkeypatch.setattr(sys, "stderr", stderr := stream())
  with _started(10, is_shown=False) as hooks:
    hooks.on_step(1, {}, {})
    hooks.on_log(1, METRICS)
  assert stderr.getvalue() == ""
