"""Trackers: what they get, and what their failures do to a run."""

import json
import os
import struct
import sys
import threading
import time

import pytest
import tiny

from vit_jax import run_checks
from vit_jax.config import Config, build, flat, to_dict
from vit_jax.writers import trackers
from vit_jax.writers.metric_writer import MetricLog, read_metrics

CONFIG = Config(trackers=("wandb",))


class Recorder:
  """A tracker in memory, which keeps what it gets."""

  PACKAGE = "json"
  made: list = []

  def __init__(self, workdir, name, id):
    self.name, self.given_id = name, id
    self.rows, self.hparams, self.state = [], None, None
    self.id = id or f"id{len(self.made)}"
    self.where = "in memory"
    self.made.append(self)

  @staticmethod
  def error():
    return None

  def write_hparams(self, hparams):
    self.hparams = hparams

  def write_scalars(self, step, scalars):
    self.rows.append({"step": step, **scalars})

  def close(self, state="finished"):
    self.state = state


def without_time(rows):
  return [{k: v for k, v in r.items() if k != "time"} for r in rows]


@pytest.fixture
def recorder(monkeypatch):
  """A tracker in memory in the place of wandb: a class, `made` its objects."""
  kind = type("Kind", (Recorder,), {"made": []})
  monkeypatch.setitem(trackers.TRACKERS, "wandb", kind)
  return kind


def _log(workdir, start=0, note=lambda text: None):
  return MetricLog(str(workdir), start, config=CONFIG, note=note)


def test_what_a_tracker_gets(tmp_path, recorder):
  """A run that resumes is one run; rows that come twice: the last counts."""
  notes, workdir = [], tmp_path / "b16"
  with _log(workdir, note=notes.append) as log:
    log.write(10, {"val/top1": 0.5})
    log.write(12, {"train/loss": 0.9})  # after the last checkpoint
  (first,) = recorder.made
  assert first.rows == without_time(read_metrics(str(workdir)))
  assert first.name == "b16" and first.given_id is None
  assert first.hparams == flat(to_dict(CONFIG))
  assert first.state == "finished" and notes == ["wandb       in memory"]
  with _log(workdir, 10) as log:
    log.write(12, {"train/loss": 0.9})  # the same bits again
  second = recorder.made[1]
  assert second.given_id == first.id == "id0"
  assert second.rows == [{"step": 12, "train/loss": 0.9}]
  # From the start again: another run.
  with pytest.raises(KeyboardInterrupt), _log(workdir) as log:
    log.write(12, {"train/loss": 0.7})
    raise KeyboardInterrupt
  third = recorder.made[2]
  assert third.given_id is None and third.state == "stopped"
  assert third.rows == [{"step": 12, "train/loss": 0.7}]


@pytest.mark.parametrize("text", [None, "", '{"id": null}'])
def test_a_tracker_without_a_run_gets_every_row(tmp_path, recorder, text):
  """It joined late, or the file with its id is damaged."""
  with _log(tmp_path) as log:
    log.write(10, {"train/loss": 1.0})
  file = tmp_path / "trackers" / "wandb.json"
  file.unlink() if text is None else file.write_text(text)
  with _log(tmp_path, 10) as log:
    log.write(12, {"train/loss": 0.9})
  again = recorder.made[1]
  assert again.given_id is None
  assert again.rows == without_time(read_metrics(str(tmp_path)))


def _fails_at_times(self, step, scalars):
  if step in (2, 3):
    raise ConnectionError("no route to host\nmore")
  self.rows.append(step)


def _cannot_begin(self, workdir, name, id):
  raise ValueError("quota exceeded.")


def _hangs(self, step, scalars):
  threading.Event().wait(2)


@pytest.mark.parametrize(
  "method, function, word",
  [
    ("write_scalars", _fails_at_times, "no route to host"),
    ("__init__", _cannot_begin, "quota exceeded"),
    ("write_scalars", _hangs, "has not answered"),
  ],
)
def test_one_that_fails_stops_nothing(
  tmp_path, recorder, monkeypatch, method, function, word
):
  """It is said once, in a line; the run has its rows."""
  monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.1)
  setattr(recorder, method, function)
  notes = []
  with _log(tmp_path, note=notes.append) as log:
    for step in range(1, 5):
      log.write(step, {"train/loss": 2.0})
  assert [r["step"] for r in read_metrics(str(tmp_path))] == [1, 2, 3, 4]
  assert sum(word in note for note in notes) == 1 and "more" not in notes[-1]
  if function is _fails_at_times:
    assert recorder.made[0].rows == [1, 4]
  assert (tmp_path / "trackers").exists() == (function is not _cannot_begin)


def test_a_package_that_is_missing(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  assert trackers.errors(Config()) == []
  config = tiny.config(trackers=("wandb",), fake_data=True)
  with pytest.raises(ValueError, match="config.trackers: wandb: "):
    run_checks.setup(config, str(tmp_path))


def test_a_tracker_of_ones_own(tmp_path):
  """An import path; the file of its run has this name."""
  name = "test_trackers:Recorder"
  config, errors = build({"trackers": f"wandb,{name}"})
  assert (config.trackers, errors) == (("wandb", name), [])
  with MetricLog(str(tmp_path), config=build({"trackers": name})[0]) as log:
    log.write(3, {"val/top1": 0.5})
  own = Recorder.made.pop()
  assert own.rows == [{"step": 3, "val/top1": 0.5}]
  assert (tmp_path / "trackers" / f"{name}.json").exists()
  (error,) = trackers.errors(build({"trackers": "test_trackers:Recordr"})[0])
  assert error.startswith("config.trackers: ") and "Recordr" in error


# W&B itself, without a network.


@pytest.fixture
def offline(monkeypatch):
  wandb = pytest.importorskip("wandb")
  for name in list(os.environ):
    if name.startswith("WANDB_"):
      monkeypatch.delenv(name)
  monkeypatch.setenv("WANDB_MODE", "offline")
  wandb.teardown()  # forgets the environment that it has read
  return wandb


def records(path):
  """Yields the records of a .wandb file: LevelDB's log format, 7 bytes on."""
  data, at, whole = path.read_bytes(), 7, b""
  while at + 7 <= len(data):
    if (left := 2**15 - at % 2**15) < 7:  # of a block
      at += left
      continue
    size, kind = struct.unpack_from("<HB", data, at + 4)
    whole += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # all of it, or its last part
      yield whole
      whole = b""


def in_wandb(workdir):
  """Returns what `wandb sync` would send: rows, ids and exit codes."""
  from wandb.proto import wandb_internal_pb2

  rows, ids, exits = [], set(), []
  for path in sorted((workdir / "wandb").glob("offline-run-*/*.wandb")):
    for data in records(path):
      record = wandb_internal_pb2.Record.FromString(data)
      kind = record.WhichOneof("record_type")
      if kind == "history":
        row = {
          i.key or "/".join(i.nested_key): json.loads(i.value_json)
          for i in record.history.item
        }
        rows.append({k: v for k, v in row.items() if not k.startswith("_")})
      elif kind == "run":
        ids.add(record.run.run_id)
      elif kind == "exit":
        exits.append(record.exit.exit_code)
  return rows, ids, exits


def wait(condition):
  """W&B writes its file in a process of its own."""
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.1)


@pytest.mark.slow
def test_wandb_has_the_rows_of_a_run(tmp_path, offline):
  """A run that fails, resumes and finishes is one run of W&B."""
  with pytest.raises(FloatingPointError), _log(tmp_path) as log:
    log.write(10, {"train/loss": 1.0})
    log.write(12, {"train/loss": 0.9})
    wait(lambda: len(in_wandb(tmp_path)[0]) == 2)  # also before a kill
    raise FloatingPointError
  with _log(tmp_path, 10) as log:
    log.write(12, {"train/loss": 0.9})
    log.write(14, {"val/top1": 0.5})
  wait(lambda: len(in_wandb(tmp_path)[2]) == 2)
  first, again, last = without_time(read_metrics(str(tmp_path)))
  rows, ids, exits = in_wandb(tmp_path)
  assert rows == [first, again, again, last]
  assert len(ids) == 1 and exits == [1, 0]


@pytest.mark.nightly
def test_the_login_is_checked_before_a_run(monkeypatch, offline):
  assert trackers.errors(CONFIG) == []
  monkeypatch.setenv("WANDB_MODE", "online")
  for key, word in ((None, "WANDB_API_KEY"), ("0" * 5, "AuthenticationError")):
    monkeypatch.setenv("NETRC", os.devnull)
    if key:
      monkeypatch.setenv("WANDB_API_KEY", key)
    offline.teardown()  # forgets the environment that it has read
    (error,) = trackers.errors(CONFIG)
    assert word in error
