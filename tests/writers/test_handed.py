"""Trackers of a run that resumes: what they get, after a kill too."""

import json
import time

import pytest
from recording import CONFIG, Recorder, without_time

from vit_jax.writers import trackers
from vit_jax.writers.metric_writer import Writer, read_metrics


def test_a_run_that_resumes_is_one_run(tmp_path, recorder):
  workdir, quiet = str(tmp_path), lambda _: None
  with Writer(workdir, 0, CONFIG, quiet) as writer:
    writer.scalars(10, {"train/loss": 1.0})
    writer.scalars(12, {"train/loss": 0.9})  # after the last checkpoint
  with Writer(workdir, 10, CONFIG, quiet) as writer:
    writer.scalars(12, {"train/loss": 0.9})  # the same bits again
    writer.scalars(12, {"val/top1": 0.5})
    writer.scalars(14, {"train/loss": 0.8})
  first, second = recorder.made
  assert second.about.id == first.id == "id0"
  assert without_time(first.rows + second.rows) == [
    {"step": 10, "train/loss": 1.0},
    {"step": 12, "train/loss": 0.9},
    {"step": 12, "val/top1": 0.5},
    {"step": 14, "train/loss": 0.8},
  ]
  # From the start again: another run.
  with Writer(workdir, 0, CONFIG, quiet) as writer:
    writer.scalars(12, {"train/loss": 0.7})
  third = recorder.made[2]
  assert third.about.id is None
  assert without_time(third.rows) == [{"step": 12, "train/loss": 0.7}]


def test_a_tracker_that_joins_late_gets_all(tmp_path, recorder):
  workdir = str(tmp_path)
  with Writer(workdir) as writer:
    writer.scalars(10, {"train/loss": 1.0})
    writer.scalars(12, {"train/loss": 0.9})
  with Writer(workdir, 10, CONFIG, lambda _: None) as writer:
    writer.scalars(12, {"train/loss": 0.9})
  (it,) = recorder.made
  assert it.rows == read_metrics(workdir)


class Killed(BaseException):
  """Ends a tracker's thread, as a kill of the process does."""


@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_rows_that_a_killed_process_held_are_sent(
  tmp_path, recorder, monkeypatch
):
  """Of lines 10, 20, 30, 40, score of 20, 50 the first three have arrived."""
  workdir, quiet = str(tmp_path), lambda _: None
  rows = [(s, "train/loss") for s in (10, 20, 30, 40)]
  rows += [(20, "val/top1"), (50, "train/loss")]

  def log(self, row):
    if row["step"] == 40:
      raise Killed
    Recorder.log(self, row)

  monkeypatch.setattr(trackers, "SAVE_SECONDS", 0)
  with monkeypatch.context() as m:
    m.setattr(recorder, "log", log)
    with Writer(workdir, 0, CONFIG, quiet) as writer:
      for step, name in rows:
        writer.scalars(step, {name: 0.5})
  with Writer(workdir, 20, CONFIG, quiet) as writer:
    for step in (30, 40, 50, 60):
      writer.scalars(step, {"train/loss": 0.5})
  first, second = recorder.made
  assert first.state is None and second.about.id == first.id
  assert [r["step"] for r in first.rows] == [10, 20, 30]
  assert without_time(second.rows) == [
    {"step": 20, "val/top1": 0.5},  # of those that stay
    *({"step": s, "train/loss": 0.5} for s in (40, 50, 60)),
  ]
  kept = json.loads((tmp_path / "trackers/wandb.json").read_text())
  assert kept == {"id": "id0", "lines": 7, "lacks": [], "ahead": {}}
  # All have arrived, so nothing is sent again; nor by a file of before.
  for text in (None, '{"id": "id0"}'):
    if text:
      (tmp_path / "trackers/wandb.json").write_text(text)
    with Writer(workdir, 50, CONFIG, quiet) as writer:
      writer.scalars(60, {"train/loss": 0.5})
    assert recorder.made[-1].about.id == "id0" and not recorder.made[-1].rows


def test_rows_that_a_tracker_refused_are_sent_by_the_next_run(
  tmp_path, recorder
):
  away = {10, 20, 40}

  def log(self, row):
    if row["step"] in away:
      raise ConnectionError("no route to host")
    Recorder.log(self, row)

  recorder.log = log
  notes, workdir = [], str(tmp_path)
  with Writer(workdir, 0, CONFIG, notes.append) as writer:
    for step in (10, 20, 30, 40, 50):
      writer.scalars(step, {"train/loss": 0.5})
  assert notes[-1].startswith("wandb       lacks 3 rows")
  away -= {20, 40}
  with Writer(workdir, 30, CONFIG, notes.append) as writer:
    for step in (40, 50):
      writer.scalars(step, {"train/loss": 0.5})
  first, second = recorder.made
  assert [r["step"] for r in first.rows] == [30, 50]
  assert [r["step"] for r in second.rows] == [20, 40]
  assert notes[-1].startswith("wandb       lacks 1 rows")
  kept = json.loads((tmp_path / "trackers/wandb.json").read_text())
  assert kept == {"id": "id0", "lines": 5, "lacks": [0], "ahead": {}}


def test_a_service_that_is_away_gets_all_later(tmp_path, recorder, monkeypatch):
  workdir, notes = str(tmp_path), []
  with Writer(workdir, 0, CONFIG, notes.append) as writer:
    writer.scalars(10, {"train/loss": 0.5})
  with monkeypatch.context() as m:
    m.setattr(recorder, "__init__", lambda self, about: 1 / 0)
    with Writer(workdir, 10, CONFIG, notes.append) as writer:
      writer.scalars(20, {"train/loss": 0.5})
  assert notes[-1].startswith("wandb       lacks 1 rows")
  with Writer(workdir, 20, CONFIG, notes.append) as writer:
    writer.scalars(30, {"train/loss": 0.5})
  first, second = recorder.made
  assert second.about.id == first.id
  assert first.rows + second.rows == read_metrics(workdir)


def test_two_kills_between_checkpoints_send_nothing_twice(tmp_path, recorder):
  workdir, kept = str(tmp_path), tmp_path / "trackers/wandb.json"

  def went(start, steps):
    with Writer(workdir, start, CONFIG, lambda _: None) as writer:
      for step in steps:
        writer.scalars(step, {"train/loss": 0.5, "train/lr": 0.1})
    return json.loads(kept.read_text())["ahead"]

  assert went(0, (10, 20, 30, 40)) == {}
  assert went(20, (30,)) == {"train/loss": [40], "train/lr": [40]}
  assert went(20, ()) == {"train/loss": [30, 40], "train/lr": [30, 40]}
  assert went(20, (30, 40, 50)) == {}
  sent = [r["step"] for tracker in recorder.made for r in tracker.rows]
  assert sent == [10, 20, 30, 40, 50]


def test_rows_of_a_run_killed_while_a_service_opens_are_sent(
  tmp_path, recorder, monkeypatch
):
  workdir, quiet = str(tmp_path), lambda _: None
  with Writer(workdir, 0, CONFIG, quiet) as writer:
    for step in (10, 20, 30, 40):
      writer.scalars(step, {"train/loss": 0.5})
  with monkeypatch.context() as m:
    m.setattr(trackers, "CLOSE_SECONDS", 0)
    m.setattr(recorder, "__init__", lambda self, about: time.sleep(99))
    with Writer(workdir, 20, CONFIG, quiet) as writer:
      for step in (30, 35, 40, 50):
        writer.scalars(step, {"train/loss": 0.5})
  with Writer(workdir, 50, CONFIG, quiet) as writer:
    writer.scalars(60, {"train/loss": 0.5})
  sent = [r["step"] for tracker in recorder.made for r in tracker.rows]
  assert sent == [10, 20, 30, 40, 35, 50, 60]
  # Of a run that begins anew the file of before tells nothing.
  with monkeypatch.context() as m:
    m.setattr(trackers, "CLOSE_SECONDS", 0)
    m.setattr(recorder, "__init__", lambda self, about: time.sleep(99))
    with Writer(workdir, 0, CONFIG, quiet) as writer:
      writer.scalars(10, {"train/loss": 0.5})
  with Writer(workdir, 10, CONFIG, quiet) as writer:
    writer.scalars(20, {"train/loss": 0.5})
  assert recorder.made[-1].about.id is None
  assert [r["step"] for r in recorder.made[-1].rows] == [10, 20]


def test_what_was_handed_over_cannot_be_kept(tmp_path, recorder):
  """The tracker gets its rows; it is told once."""
  (tmp_path / "trackers").write_text("")
  notes = []
  with Writer(str(tmp_path), 0, CONFIG, notes.append) as writer:
    for step in (10, 20):
      writer.scalars(step, {"train/loss": 0.5})
  (it,) = recorder.made
  assert it.rows == read_metrics(str(tmp_path)) and it.state == "finished"
  told, where = notes
  assert told.startswith("wandb       failed: FileExistsError:")
  assert where == "wandb       in memory"


@pytest.mark.parametrize(
  "text",
  [
    "",
    "{}",
    "[]",
    '{"id": null}',
    '{"id": "id0", "lines": 1, "lacks": "x"}',
    '{"id": "id0", "ahead": {"a": ["x"]}}',
  ],
)
def test_a_damaged_file_stops_nothing(tmp_path, recorder, text):
  """What the tracker gets is another run, with every line."""
  workdir, notes = str(tmp_path), []
  with Writer(workdir, 0, CONFIG, notes.append) as writer:
    writer.scalars(10, {"train/loss": 1.0})
  (tmp_path / "trackers" / "wandb.json").write_text(text)
  with Writer(workdir, 10, CONFIG, notes.append) as writer:
    writer.scalars(12, {"train/loss": 0.9})
  again = recorder.made[1]
  assert again.about.id is None and again.rows == read_metrics(workdir)
  assert any("wandb.json cannot be read" in note for note in notes)
