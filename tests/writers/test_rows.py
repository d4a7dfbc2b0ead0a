"""Rows come in one order, however long their scores take."""

import threading
import types

import jax
import pytest
import threadpoolctl

from vit_jax.callbacks.preemption import Notices
from vit_jax.writers.metric_writer import Writer, read_metrics
from vit_jax.writers.rows import Rows


class Slow:
  """An evaluator whose scores wait until they are let go."""

  def __init__(self, name, value=0.5):
    self.config = types.SimpleNamespace(name=name, group=None)
    self.go, self.value = threading.Event(), value

  def gather(self, params):
    return params

  def score(self, gathered):
    assert self.go.wait(60)
    return {f"{self.config.name}/x": self.value + gathered}


def _rows(tmp_path, resumed_at=0, note=lambda text: None):
  writer = Writer(str(tmp_path), resumed_at)
  return Rows(writer, [], resumed_at, note)


def _read(tmp_path):
  return [
    (r["step"], *(k for k in r if "/" in k))
    for r in read_metrics(str(tmp_path))
  ]


def test_a_row_waits_for_the_scores_before_it(tmp_path):
  rows, val, few = _rows(tmp_path), Slow("val"), Slow("few")
  rows.put(1, {"train/loss": 1.0})
  rows.score(1, val, 1)
  rows.score(1, few, 1)
  few.go.set()
  rows.put(2, {"train/loss": 0.5})
  assert _read(tmp_path) == [(1, "train/loss")]
  val.go.set()
  rows.write(wait=True)
  assert _read(tmp_path) == [
    (1, "train/loss"),
    (1, "val/x"),
    (1, "few/x"),
    (2, "train/loss"),
  ]
  rows.close()


def test_scores_leave_half_of_the_cores_to_the_input(tmp_path, monkeypatch):
  monkeypatch.setattr("os.cpu_count", lambda: 2)

  def threads():
    found = threadpoolctl.threadpool_info()
    return {x["num_threads"] for x in found if x["user_api"] == "blas"}

  class Counts(Slow):
    def score(self, gathered):
      return {"val/threads": float(*threads())}

  before, rows = threads(), _rows(tmp_path)
  rows.score(1, Counts("val"), 1)
  rows.write(wait=True)
  rows.close()
  (row,) = read_metrics(str(tmp_path))
  assert row["val/threads"] == 1
  assert threads() == before


def test_what_a_stopped_run_owes(tmp_path):
  rows, val, few = _rows(tmp_path), Slow("val"), Slow("few")
  val.go.set()
  rows.put(4, {"train/loss": 1.0})
  rows.score(4, val, 1)
  rows.write(wait=True)
  rows.score(4, few, 1)
  rows.close()  # stopped while few was scored
  few.go.set()
  again = _rows(tmp_path, resumed_at=4)
  assert again.owed([val, few]) == [few]
  assert again.owed([]) == []


def test_scores_that_are_not_finite_are_told_and_left_out(tmp_path):
  """They are no fault of the state, and process 0 alone knows them."""
  told = []
  rows, val = _rows(tmp_path, note=told.append), Slow("val", float("nan"))
  val.go.set()
  rows.score(4, val, 1)
  rows.write(wait=True)
  assert _read(tmp_path) == [(4, "val/not_finite")]
  assert told[0] == "not finite  val/x is nan at step 4; not written"


def test_scores_of_a_step_that_is_made_up_for_are_not_waited_for(tmp_path):
  rows, val, few = _rows(tmp_path), Slow("val"), Slow("few")
  rows.score(1, val, 1)
  rows.put(2, {"train/loss": 0.5})
  rows.score(2, few, 1)
  threading.Timer(0.2, val.go.set).start()
  rows.write(wait=True, before=2)
  assert _read(tmp_path) == [(1, "val/x"), (2, "train/loss")]
  few.go.set()
  rows.close()


def test_a_notice_ends_the_wait_for_scores(tmp_path):
  rows, few = _rows(tmp_path), Slow("few")
  notices = Notices(at_once=lambda reason: None)
  rows.score(1, few, 1)
  threading.Timer(0.1, notices.notice, ["SIGTERM"]).start()
  rows.write(wait=True, until=notices.has_come)
  assert _read(tmp_path) == [] and rows.metadata(2) == {"rows": 1}
  few.go.set()
  rows.write(wait=True)
  assert _read(tmp_path) == [(1, "few/x")]
  rows.close()


def test_rows_that_a_checkpoint_counts_and_nobody_has_are_told(tmp_path):
  rows, few, val = _rows(tmp_path), Slow("few"), Slow("val")
  rows.put(1, {"train/loss": 1.0})
  rows.score(2, few, 1)
  rows.put(3, {"train/loss": 1.0})
  rows.score(3, val, 1)
  # That of val is made up for by the run that resumes at 3.
  assert rows.metadata(3) == {"rows": 3}
  rows.close()  # killed
  few.go.set()
  val.go.set()
  told = []
  for expected in (3, 1):
    writer = Writer(str(tmp_path), 3)
    Rows(writer, [], 3, told.append, {"rows": expected})
  (line,) = told
  assert line.startswith("rows        2 up to step 3 are not in metrics.jsonl")


def test_an_error_of_the_scores_is_raised_in_the_loop(tmp_path):
  rows, val = _rows(tmp_path), Slow("val")
  val.score = lambda gathered: 1 / 0
  rows.score(3, val, 0.0)
  with pytest.raises(ZeroDivisionError):
    rows.write(wait=True)
  rows.close()


def test_only_process_0_scores(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  rows, val = _rows(tmp_path), Slow("val")
  val.score = lambda gathered: pytest.fail("must not be called")
  rows.score(3, val, 0.0)
  rows.write(wait=True)
  rows.close()
  assert not list(tmp_path.iterdir())
