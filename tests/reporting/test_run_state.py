"""What became of a run: finished, still going, stopped, or not known."""

import json
import math
import os
import re
import subprocess
import sys

import fake_runs
import pytest
from etils import epath

from vit_jax.callbacks import run_record
from vit_jax.callbacks.run_lock import RunLock
from vit_jax.checkpointing import retention
from vit_jax.tools.reporting import runs
from vit_jax.tools.reporting.run_state import remarks, state

NOW = 10_000.0
CONFIG = {"total_steps": 100, "data": {"dataset": "digits"}}
ELSEWHERE = {"host": "elsewhere", "pid": 1, "ticks": 1, "began": 9000.0}
ELSEWHERE |= {"ended": None, "how": None}


def _rows(steps, end):
  """Lines of a run that takes a second a step, the last at `end`."""
  return [
    {"step": s, "time": end - (steps - s), "train/loss": 1.0}
    for s in range(10, steps + 1, 10)
  ]


def _run(rows, process=None, last_sign=None):
  return fake_runs.run(rows, CONFIG, process=process or {}, last_sign=last_sign)


def _elsewhere(steps, last_sign):
  return _run(_rows(steps, NOW - 9e3), ELSEWHERE, last_sign)


def _ended(steps, how):
  return _run(_rows(steps, NOW), ELSEWHERE | {"ended": 9999.0, "how": how})


@pytest.mark.parametrize(
  "run, kind, words",
  [
    (_run(_rows(100, NOW - 1e6)), "finished", ["100 steps"]),
    (_run([]), "unknown", ["process.json"]),
    (_run(_rows(40, NOW)), "unknown", ["process.json"]),
    # On another host the heartbeat tells.
    (_elsewhere(0, NOW - 59), "going", []),
    (_elsewhere(0, NOW - 61), "stopped", ["no heartbeat", "elsewhere"]),
    (_elsewhere(100, NOW - 61), "stopped", ["no heartbeat", "completes it"]),
    (_elsewhere(0, None), "stopped", ["no heartbeat"]),
    # An error is the reason.
    (_ended(40, "OSError: full."), "stopped", ["OSError: full. ", "anew"]),
    # Here the last evaluation failed.
    (_ended(100, "OSError: full"), "stopped", ["OSError", "completes it"]),
    # This one says itself what to change.
    (_ended(40, "FloatingPointError: lower it"), "stopped", ["lower it"]),
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


def test_how_long_it_takes_and_where_it_resumes(tmp_path):
  """A copy without checkpoints does not begin anew."""
  result = state(_run(_rows(40, NOW - 5), ELSEWHERE, NOW - 9), NOW)
  assert result.kind == "going" and result.seconds_left == 60.0
  for text in ("step 40 of 100 (40.0 %)", "5s", "1m00s left"):
    assert text in result.text
  run = runs.Run("a", tmp_path, CONFIG, {}, _rows(40, 0.0), ELSEWHERE)
  folder = tmp_path / "checkpoints"
  assert state(run, NOW).text.endswith("begins anew")
  retention.note_newest(epath.Path(folder), 24)
  assert "of step 24 is not in this folder" in state(run, NOW).text
  for name in ("8", "24", "16", "40.orbax-checkpoint-tmp"):
    (folder / name).mkdir(parents=True)
  assert state(run, NOW).text.endswith("resumes from step 24")


@pytest.mark.slow
def test_the_process_itself(tmp_path):
  """A real one: alive, then killed, so that it could not write its end."""
  code = (
    "import sys; from vit_jax.callbacks.run_lock import RunLock\n"
    f"with RunLock({str(tmp_path)!r}):\n"
    "  print('begun', flush=True); sys.stdin.read()"
  )
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  process = subprocess.Popen([sys.executable, "-c", code], **pipes)
  assert process.stdout.readline() == "begun\n"
  (tmp_path / "config.json").write_text(json.dumps(CONFIG))
  assert state(runs.find_runs(tmp_path)[0]).kind == "going"
  process.kill()
  os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
  dead = state(runs.find_runs(tmp_path)[0])
  assert dead.kind == "stopped" and "no longer there" in dead.text
  process.communicate()
  assert state(runs.find_runs(tmp_path)[0]).kind == "stopped"


def test_a_run_of_this_process(tmp_path):
  read = lambda: json.loads((tmp_path / run_record.FILE).read_text())
  with RunLock(str(tmp_path)):
    record = read()
    # It has all steps, but not all scores.
    assert state(_run(_rows(100, NOW), record), NOW).kind == "going"
    other = record | {"ticks": -1}  # the number is another process's by now
    assert "no longer there" in state(_run(_rows(100, NOW), other), NOW).text
  assert state(_run(_rows(100, NOW), read()), NOW).kind == "finished"
