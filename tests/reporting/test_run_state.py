"""What became of a run: finished, still going, stopped, or not known."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest
from etils import epath

from vit_jax.callbacks import run_record
from vit_jax.callbacks.run_lock import RunLock
from vit_jax.checkpointing import retention
from vit_jax.tools.reporting import runs
from vit_jax.tools.reporting.run_state import remarks, state

NOW = 10_000.0
CONFIG = {"total_steps": 100, "data": {"dataset": "digits"}}
HERE = {"host": "elsewhere", "pid": 1, "ticks": 1, "began": 9000.0}
HERE |= {"ended": None, "how": None}


def _rows(steps, end, every=10.0):
  """Lines of a run that takes a second a step, the last at `end`."""
  return [
    {"step": s, "time": end - (steps - s), "train/loss": 1.0}
    for s in range(int(every), steps + 1, int(every))
  ]


def _run(rows, process=None, metadata=None, config=CONFIG, last_sign=None):
  path, process = pathlib.Path("nowhere"), process or {}
  return runs.Run("a", path, config, metadata or {}, rows, process, last_sign)


def _elsewhere(steps, last_sign):
  return _run(_rows(steps, NOW - 9e3), HERE, last_sign=last_sign)


def _ended(how):
  return HERE | {"ended": 9999.0, "how": how}


@pytest.mark.parametrize(
  "run, kind, words",
  [
    (_run(_rows(100, NOW - 1e6)), "finished", ["100 steps"]),
    (_run([]), "unknown", ["process.json"]),
    (_run(_rows(40, NOW)), "unknown", ["process.json"]),
    # On another host the heartbeat tells.
    (_elsewhere(0, NOW - 59), "going", []),
    (_elsewhere(100, NOW - 59), "going", []),
    (_elsewhere(0, NOW - 61), "stopped", ["no heartbeat", "elsewhere"]),
    (_elsewhere(100, NOW - 61), "stopped", ["no heartbeat", "completes it"]),
    (_elsewhere(0, None), "stopped", ["no heartbeat"]),
    # An error is the reason.
    (
      _run(_rows(40, NOW), _ended("OSError: disk full.")),
      "stopped",
      ["OSError: disk full. ", "begins anew"],
    ),
    (  # the last evaluation failed
      _run(_rows(100, NOW), _ended("OSError: disk full")),
      "stopped",
      ["after all 100 steps", "OSError: disk full", "completes it"],
    ),
    (  # it says itself what to change
      _run(_rows(40, NOW), _ended("FloatingPointError: loss is nan: lower it")),
      "stopped",
      ["lower it"],
    ),
  ],
)
def test_the_state_and_its_reason(run, kind, words):
  result = state(run, NOW)
  assert result.kind == kind
  for word in words:
    assert word in result.text
  has_advice = "same command" in result.text
  assert has_advice == (kind == "stopped" and "lower it" not in words)


def test_what_went_wrong_on_the_way():
  """As `nonfinite` writes it, and as a row of any other origin has it."""
  rows = _rows(40, NOW) + [{"step": 40, "val/top1": 0.5}]
  assert remarks(_run(rows)) == ""
  counts = {"train/skipped": 2.0, "train/undecodable": 1.0}
  rows += [{"step": 1_050, **counts}, {"step": 1_060, **counts}]
  rows += [{"step": 1_060, "val/not_finite": 1.0}]
  rows += [{"step": 1_070, "train/loss": float("nan"), "few/1shot": math.inf}]
  for text, named in zip(
    remarks(_run(rows)).split("; "),
    ("2 steps", "1 image", "train/loss .* 3 logged .* 1,050")
    + ("val .* 1 logged .* 1,060", "few .* 1 logged .* 1,070"),
    strict=True,
  ):
    assert re.search(named, text)


def test_still_going_and_how_long():
  run = _run(_rows(40, NOW - 5), HERE, last_sign=NOW - 9)
  result = state(run, NOW)
  assert result.kind == "going" and result.seconds_left == 60.0
  for text in ("step 40 of 100 (40.0 %)", "5s", "1m00s left"):
    assert text in result.text


def test_where_it_resumes(tmp_path):
  for step in (8, 24, 16):
    (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
  (tmp_path / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
  run = runs.Run("a", tmp_path, CONFIG, {}, _rows(40, 0.0), HERE)
  assert state(run, NOW).text.endswith("resumes from step 24")


def test_a_copy_without_checkpoints_does_not_begin_anew(tmp_path):
  run = runs.Run("a", tmp_path, CONFIG, {}, _rows(40, 0.0), HERE)
  assert state(run, NOW).text.endswith("begins anew")
  retention.note_newest(epath.Path(tmp_path / "checkpoints"), 24)
  assert "of step 24 is not in this folder" in state(run, NOW).text


def test_the_length_of_a_run_is_recorded():
  rows = _rows(40, NOW - 1e6)
  assert _run(rows, metadata={"total_steps": 7}).total_steps == 7


@pytest.mark.slow
def test_the_process_itself(tmp_path):
  """A real one: alive, then killed, so that it could not write its end."""
  code = (
    "import time; from vit_jax.callbacks.run_lock import RunLock\n"
    f"with RunLock({str(tmp_path)!r}):\n"
    "  print('begun', flush=True); time.sleep(600)"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
  )
  assert process.stdout.readline() == "begun\n"
  (tmp_path / "config.json").write_text(json.dumps(CONFIG))
  going = state(runs.find_runs(tmp_path)[0])
  assert going.kind == "going" and "before its first line" in going.text
  process.kill()
  os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
  dead = state(runs.find_runs(tmp_path)[0])
  assert dead.kind == "stopped" and "no longer there" in dead.text
  process.wait()
  assert state(runs.find_runs(tmp_path)[0]).kind == "stopped"


def test_its_end_is_written(tmp_path):
  read = lambda: json.loads((tmp_path / run_record.FILE).read_text())
  with RunLock(str(tmp_path)):
    assert read()["ended"] is None and run_record.is_alive(read())
    later = read() | {"ticks": 1}  # another process of the same number
    assert not run_record.is_alive(later) or read()["ticks"] is None
  assert read()["how"] == "finished" and read()["ended"] >= read()["began"]
  with pytest.raises(KeyboardInterrupt), RunLock(str(tmp_path)):
    raise KeyboardInterrupt
  assert read()["how"] == "KeyboardInterrupt"
  with pytest.raises(ValueError), RunLock(str(tmp_path)):
    raise ValueError("what was wrong")
  assert read()["how"] == "ValueError: what was wrong"


def test_all_steps_but_not_all_scores(tmp_path):
  rows = _rows(100, NOW)
  with RunLock(str(tmp_path)):
    record = json.loads((tmp_path / run_record.FILE).read_text())
    assert state(_run(rows, record), NOW).kind == "going"
    dead = record | {"ticks": -1}  # the number is another process's by now
    result = state(_run(rows, dead), NOW)
  assert result.kind == "stopped"
  assert "no longer there" in result.text and "completes it" in result.text
