"""What became of a run: finished, still going, stopped, or not known."""

import json
import math
import os
import pathlib
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


def test_finished():
  result = state(_run(_rows(100, NOW - 1e6)), NOW)
  assert result == ("finished", "finished: 100 steps", None)


def test_what_went_wrong_on_the_way():
  """As `nonfinite` writes it, and as a row of any other origin has it."""
  rows = _rows(40, NOW) + [{"step": 40, "val/top1": 0.5}]
  assert remarks(_run(rows)) == ""
  counts = {"train/skipped": 2.0, "train/undecodable": 1.0}
  rows += [{"step": 1_050, **counts}, {"step": 1_060, **counts}]
  rows += [{"step": 1_060, "val/not_finite": 1.0}]
  rows += [{"step": 1_070, "train/loss": float("nan"), "few/1shot": math.inf}]
  assert remarks(_run(rows)) == (
    "2 steps skipped; 1 image could not be decoded;"
    " train/loss not finite at 3 logged steps, first at step 1,050;"
    " scores of val not finite at 1 logged step, first at step 1,060;"
    " scores of few not finite at 1 logged step, first at step 1,070"
  )


def test_still_going_and_how_long():
  run = _run(_rows(40, NOW - 5), HERE, last_sign=NOW - 9)
  result = state(run, NOW)
  assert result.kind == "going" and result.seconds_left == 60.0
  assert result.text == (
    "still going, at step 40 of 100 (40.0 %), last line 5s before this page was"
    " written; about 1m00s left"
  )


@pytest.mark.parametrize(
  "silence, kind", [(59, "going"), (61, "stopped"), (None, "stopped")]
)
@pytest.mark.parametrize("steps", [0, 100])
def test_on_another_host_the_heartbeat_tells(silence, kind, steps):
  last = None if silence is None else NOW - silence
  result = state(_run(_rows(steps, NOW - 9e3), HERE, last_sign=last), NOW)
  assert result.kind == kind
  is_named = "no heartbeat since, from elsewhere" in result.text
  assert is_named == (kind == "stopped")


@pytest.mark.parametrize(
  "steps, how, text",
  [
    (
      40,
      "OSError: disk full.",
      ": OSError: disk full. The same command begins",
    ),
    (
      100,  # the last evaluation failed
      "OSError: disk full",
      "stopped after all 100 steps: OSError: disk full. The same command"
      " completes it",
    ),
    (  # with an advice of its own
      40,
      "FloatingPointError: loss is nan: lower it, in a new --workdir.",
      ": FloatingPointError: loss is nan: lower it, in a new --workdir",
    ),
  ],
)
def test_an_error_is_the_reason(steps, how, text):
  process = HERE | {"ended": 9999.0, "how": how}
  result = state(_run(_rows(steps, NOW - 5), process), NOW)
  assert result.kind == "stopped" and text in result.text
  assert ("The same command" in result.text) == ("OSError" in how)


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


def test_without_a_record_only_the_last_step_tells():
  for rows in ([], _rows(40, NOW)):
    unknown = state(_run(rows), NOW)
    assert unknown.kind == "unknown"
    assert "without process.json nothing tells its state" in unknown.text


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
  assert result.text == (
    "stopped after all 100 steps: its process is no longer there. The same"
    " command completes it"
  )
