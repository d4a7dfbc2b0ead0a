"""Rows of metrics: one order, however long their scores take; none twice."""

import json
import logging
import threading

import jax
import pytest
import threadpoolctl
from tensorboard.backend.event_processing import event_file_loader

from vit_jax.evaluators.evaluator import Evaluator, EvaluatorConfig
from vit_jax.writers.atomic_files import WriteError
from vit_jax.writers.metric_writer import (
  METRICS,
  GroupMeans,
  MetricLog,
  read_metrics,
)


class Slow(Evaluator):
  """An evaluator whose scores wait until they are let go."""

  def __init__(self, name):
    self.config, self.go = EvaluatorConfig(name), threading.Event()

  def score(self, gathered):
    assert self.go.wait(60)
    return {f"{self.config.name}/x": 0.5 + gathered}


class Recording:
  """A writer of a user's own."""

  def __init__(self):
    self.calls = []

  def write_scalars(self, step, scalars):
    self.calls.append((step, dict(scalars)))

  def flush(self):
    self.calls.append("flush")

  def close(self):
    self.calls.append("close")


def _log(tmp_path, start=0, **arguments):
  return MetricLog(
    str(tmp_path), start, **{"note": lambda text: None} | arguments
  )


def _read(tmp_path):
  return [
    (r["step"], *(k for k in r if "/" in k))
    for r in read_metrics(str(tmp_path))
  ]


def _tensorboard(workdir):
  """Returns what TensorBoard reads of a run, as rows of metrics.jsonl."""
  rows = []
  for path in sorted((workdir / "tensorboard").glob("*tfevents*")):
    for event in event_file_loader.LegacyEventFileLoader(str(path)).Load():
      if event.HasField("summary"):
        values = {v.tag: v.simple_value for v in event.summary.value}
        time = pytest.approx(event.wall_time, abs=0.1)
        rows.append({"step": event.step, "time": time} | values)
  return rows


def test_a_resumed_run_has_no_row_twice(tmp_path):
  """Rows after the checkpoint are removed, and those of another writer."""
  events = tmp_path / "tensorboard" / "events.out.tfevents.1795331887.vm"
  events.parent.mkdir()
  events.write_bytes(b"old")
  with _log(tmp_path) as log:
    log.write(10, {"train/loss": 1.0})
    log.write(10, {"val/top1": 0.5})
    log.write(12, {"train/loss": 0.25})
  with (tmp_path / METRICS).open("a") as f:
    f.write('{"step": 13, "tra')  # killed while writing
  with _log(tmp_path, 10) as log:
    val, few = Slow("val"), Slow("few")
    assert log.missing(10, [val, few]) == [few]
    assert log.missing(10, []) == []
    log.write(12, {"train/loss": 0.75})
    # TensorBoard shows it at once.
    assert _tensorboard(tmp_path) == read_metrics(str(tmp_path))
  text = (tmp_path / METRICS).read_text().splitlines()
  assert [json.loads(line)["step"] for line in text] == [10, 10, 12]
  assert json.loads(text[-1])["train/loss"] == 0.75
  assert _tensorboard(tmp_path) == read_metrics(str(tmp_path))
  with _log(tmp_path):  # a new run
    assert _read(tmp_path) == _tensorboard(tmp_path) == []


def test_a_row_is_not_written_into_the_folder_of_another_run(tmp_path):
  def check():
    raise WriteError("another run took this folder")

  with pytest.raises(WriteError), _log(tmp_path, check_owner=check) as log:
    log.write(1, {"train/loss": 1.0})
  assert _read(tmp_path) == []


def test_a_row_waits_for_the_scores_before_it(tmp_path):
  val, few, later = Slow("val"), Slow("few"), Slow("later")
  stop = threading.Event()
  with _log(tmp_path, until=stop.is_set) as log:
    log.write(1, {"train/loss": 1.0})
    log.write_later(1, val.score, 1)
    log.write_later(1, few.score, 1)
    few.go.set()
    log.write(2, {"train/loss": 0.5})
    log.write_later(2, later.score, 1)
    # A stop ends the wait: the state comes first.
    stop.set()
    log.flush()
    assert _read(tmp_path) == [(1, "train/loss")]
    val.go.set()
    # Scores of the newest step need not be waited for.
    log.flush(before=2)
    assert _read(tmp_path) == [
      (1, "train/loss"),
      (1, "val/x"),
      (1, "few/x"),
      (2, "train/loss"),
    ]
    later.go.set()
    log.flush(before=3)


def test_scores_leave_half_of_the_cores_to_the_input(tmp_path, monkeypatch):
  monkeypatch.setattr("os.cpu_count", lambda: 2)

  def threads():
    pools = threadpoolctl.threadpool_info()
    return {x["num_threads"] for x in pools if x["user_api"] == "blas"}

  before = threads()
  with _log(tmp_path) as log:
    log.write_later(1, lambda _: {"val/threads": float(*threads())}, None)
    log.flush()
  (row,) = read_metrics(str(tmp_path))
  assert row["val/threads"] == 1
  assert threads() == before


def test_scores_that_fail(tmp_path):
  """Some are not finite: the state is. An error is raised in the loop."""
  scores = {"a/1shot": 0.5, "a/5shot": float("inf"), "a/x": float("nan")}
  notes = []
  with _log(tmp_path, note=notes.append) as log:
    log.write_later(8, lambda _: scores, None)
    log.flush()
    log.write_later(9, lambda _: 1 / 0, None)
    with pytest.raises(ZeroDivisionError):
      log.flush()
  (row,) = read_metrics(str(tmp_path))
  assert row.pop("time") > 1e9
  assert row == {"step": 8, "a/1shot": 0.5, "a/not_finite": 2}
  assert "a/5shot is inf, a/x is nan at step 8" in notes[0]


def test_only_process_0_writes_and_scores(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  writer = Recording()
  with _log(tmp_path, writer=writer) as log:
    log.write(3, {"train/loss": 1.0})
    log.write_later(3, lambda _: pytest.fail("must not be called"), 0.0)
    log.flush()
  assert not list(tmp_path.iterdir())
  assert writer.calls == ["close"]


def test_a_writer_of_ones_own(tmp_path):
  """It gets every row; if it fails, the run ends and no row is lost."""
  writer = Recording()
  with _log(tmp_path, writer=writer) as log:
    log.write(1, {"train/loss": 1.0})
    log.flush()
    log.write(2, {"train/loss": 0.5})
  rows = [(1, {"train/loss": 1.0}), (2, {"train/loss": 0.5})]
  assert writer.calls == [rows[0], "flush", rows[1], "close"]
  writer.close = lambda: 1 / 0
  with pytest.raises(ZeroDivisionError), _log(tmp_path, writer=writer) as log:
    log.write(1, {"train/loss": 1.0})
  assert _read(tmp_path) == [(1, "train/loss")]


@pytest.mark.slow
def test_a_writer_of_clu(tmp_path, caplog):
  clu = pytest.importorskip("clu.metric_writers")
  caplog.set_level(logging.INFO, "absl")  # which others silence
  with _log(tmp_path, writer=clu.LoggingWriter()) as log:
    log.write(1, {"train/loss": 2.5})
    log.flush()
  assert "[1] train/loss=2.5" in caplog.text


# Means over groups.
EVALS = [
  EvaluatorConfig(name, group=group)
  for name, group in (("a", "few"), ("val", None), ("b", "few"), ("c", "knn"))
]


def test_the_last_of_a_group_brings_the_mean():
  """Of what all of them have; steps do not mix."""
  means = GroupMeans(EVALS)
  first = {"a/1shot": 0.25, "a/l2=4/1shot": 0.5, "a/only": 1.0}
  assert means.add(10, first) == first
  assert means.add(10, {"val/top1": 0.0}) == {"val/top1": 0.0}
  assert means.add(20, {"b/1shot": 1.0}) == {"b/1shot": 1.0}
  last = {"b/1shot": 0.75, "b/l2=4/1shot": 0.5}
  assert means.add(10, last) == last | {
    "few/1shot": 0.5,
    "few/l2=4/1shot": 0.5,
    "few/sets": 2,
  }
  alone = means.add(10, {"c/top1": 0.125})
  assert alone == {"c/top1": 0.125, "knn/top1": 0.125, "knn/sets": 1}
  assert means.add(20, {"a/1shot": 0.0})["few/1shot"] == 0.5


@pytest.mark.parametrize("start, mean", [(10, 0.5), (8, None)])
def test_scores_from_before_an_interruption_count(tmp_path, start, mean):
  with _log(tmp_path) as log:
    log.write(8, {"train/loss": 0.0})
    log.write(10, {"a/x": 0.0, "val/top1": 0.5})
  with _log(tmp_path, start, evals=EVALS) as log:
    log.write_later(10, lambda _: {"b/x": 1.0}, None)
    log.flush()
  assert read_metrics(str(tmp_path))[-1].get("few/x") == mean
