"""What became of a run: finished, still going, stopped, or not known."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from vit_jax.callbacks import run_record
from vit_jax.callbacks.run_lock import RunLock
from vit_jax.reporting import runs
from vit_jax.reporting.run_state import remarks, state

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


def _run(rows, process=None, metadata=None, config=CONFIG):
  path = pathlib.Path("nowhere")
  return runs.Run("a", path, config, metadata or {}, rows, process or {})


def test_finished():
  found = state(_run(_rows(100, NOW - 1e6)), NOW)
  assert found == ("finished", "finished: 100 steps", None)


def test_a_run_without_metrics_is_not_called_finished(tmp_path):
  process = HERE | {"ended": 9999.0, "how": "finished"}
  run = runs.Run("a", tmp_path, CONFIG, {"step": 100}, [], process)
  found = state(run, NOW)
  assert found.kind == "unknown" and found.text == (
    "metrics.jsonl is missing; process.json says that the run finished, and"
    " metadata.json that step 100 of 100 was saved"
  )
  (tmp_path / "metrics.jsonl").touch()
  found = state(runs.Run("a", tmp_path, {}, {}, [], process), NOW)
  assert found.kind == "unknown" and found.text == (
    "metrics.jsonl has no line that can be read; process.json says that the run"
    " finished"
  )


def test_what_was_bad_on_the_way_is_told():
  """As `finite` writes it, and as a row of any other origin has it."""
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
  found = state(_run(_rows(40, NOW - 5), HERE), NOW)
  assert found.kind == "going" and found.seconds_left == 60.0
  assert found.text == (
    "still going, at step 40 of 100 (40.0 %), last line 5s before this page was"
    " written; about 1m00s left"
  )


@pytest.mark.parametrize("silence, kind", [(599, "going"), (601, "stopped")])
def test_without_its_process_the_silence_tells(silence, kind):
  assert state(_run(_rows(40, NOW - silence)), NOW).kind == kind
  assert state(_run(_rows(40, NOW - silence), HERE), NOW).kind == kind


def test_slow_lines_are_waited_for():
  rows = [{"step": s, "time": 100.0 * s} for s in (1, 2, 3)]
  assert state(_run(rows), 300.0 + 1990.0).kind == "going"
  assert state(_run(rows), 300.0 + 2010.0).kind == "stopped"


def test_gaps_before_the_last_start_do_not_count():
  """A run that lay for a day is not given twenty days."""
  rows = [{"step": 10, "time": 1.0}, *_rows(40, NOW - 700)]
  assert state(_run(rows, HERE), NOW).kind == "stopped"


def test_an_error_is_the_reason():
  process = HERE | {"ended": 9999.0, "how": "OSError: disk full."}
  found = state(_run(_rows(40, NOW - 5), process), NOW)
  assert found.kind == "stopped"
  assert ": OSError: disk full. The same command begins anew" in found.text


def test_a_run_that_diverged_has_its_own_advice():
  how = "FloatingPointError: loss is nan: lower it, in a new --workdir."
  process = HERE | {"ended": 9999.0, "how": how}
  found = state(_run(_rows(40, NOW - 5), process), NOW)
  assert found.text.endswith(f": {how.rstrip('.')}")


def test_where_it_resumes(tmp_path):
  for step in (8, 24, 16):
    (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
  (tmp_path / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
  run = runs.Run("a", tmp_path, CONFIG, {}, _rows(40, 0.0))
  assert state(run, NOW).text.endswith("resumes from step 24")


def test_the_length_of_a_run_is_recorded():
  rows = _rows(40, NOW - 1e6)
  assert _run(rows, metadata={"total_steps": 7}).total_steps == 7
  unknown = state(_run(rows, config={}), NOW)
  assert unknown.kind == "unknown" and "not recorded" in unknown.text
  assert state(_run([], config={}), NOW).kind == "unknown"


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


def test_all_steps_but_not_all_scores():
  parent = {"pid": os.getppid()}  # it goes on
  parent["ticks"] = run_record._start_ticks(os.getppid())
  mine = HERE | run_record.new() | parent
  rows = _rows(100, NOW)
  assert state(_run(rows, mine), NOW).kind == "going"
  dead = mine | {"ticks": -1}
  found = state(_run(rows, dead), NOW)
  assert found.kind == "stopped" and "ended before the run did" in found.text
  assert state(_run(rows, HERE), NOW).kind == "finished"  # nobody can tell


def test_all_steps_but_an_error_after_them():
  """The last evaluation failed: the scores are not there."""
  process = HERE | {"ended": NOW, "how": "OSError: disk full"}
  found = state(_run(_rows(100, NOW), process), NOW)
  assert found.kind == "stopped"
  assert found.text == (
    "stopped: all 100 steps are done, but then: OSError: disk full; the same"
    " command completes it"
  )
