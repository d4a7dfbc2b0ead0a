"""Trackers: what they are told, and what their failures do to a run."""

import json
import os
import pathlib
import struct
import sys
import threading
import time

import jax
import numpy as np
import pytest
import tiny
from recording import CONFIG

from vit_jax.config import Config, build, flat, to_dict
from vit_jax.writers import trackers
from vit_jax.writers.metric_writer import Writer, read_metrics


def test_a_choice_for_every_tracker():
  (field,) = (
    f for f in Config.__dataclass_fields__.values() if f.name == "trackers"
  )
  assert list(field.metadata["choices"]) == list(trackers.TRACKERS)
  config, faults = build({"trackers": "wandb,trackio"})
  assert (config.trackers, faults) == (("wandb", "trackio"), [])
  _, faults = build({"trackers": ("wandb", "mlfow")})
  assert faults == [
    "config.trackers: got 'mlfow', expected one of wandb, mlflow, trackio. Did"
    " you mean 'mlflow'?"
  ]


def test_what_a_tracker_is_told(tmp_path, recorder):
  notes = []
  with Writer(str(tmp_path / "b16"), 0, CONFIG, notes.append) as writer:
    writer.scalars(5, {"train/loss": 2.0})
    writer.scalars(3, {"val/top1": 0.5})  # scores come later
  (it,) = recorder.made
  assert it.rows == read_metrics(str(tmp_path / "b16"))
  assert it.about.name == "b16" and it.about.id is None
  assert it.about.config == flat(to_dict(CONFIG))
  assert it.about.config["data.batch_size"] == 4096
  assert it.state == "finished"
  assert notes == ["wandb       in memory"]


def test_only_the_first_process_tells(tmp_path, recorder, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  with Writer(str(tmp_path), 0, CONFIG) as writer:
    writer.scalars(1, {"train/loss": 2.0})
  assert not recorder.made


@pytest.mark.parametrize(
  "error, state",
  [(FloatingPointError, "failed"), (KeyboardInterrupt, "stopped")],
)
def test_the_state_of_a_run_that_ends_early(tmp_path, recorder, error, state):
  with pytest.raises(error):
    with Writer(str(tmp_path), 0, CONFIG, lambda _: None) as writer:
      writer.scalars(1, {"train/loss": 2.0})
      raise error
  (it,) = recorder.made
  assert it.state == state and len(it.rows) == 1


def test_a_failure_is_told_once_and_stops_nothing(tmp_path, recorder):
  def log(self, row):
    if row["step"] in (2, 3):
      raise ConnectionError("no route to host\nmore")
    self.rows.append(row)

  recorder.log = log
  notes = []
  with Writer(str(tmp_path), 0, CONFIG, notes.append) as writer:
    for step in range(1, 5):
      writer.scalars(step, {"train/loss": 2.0})
  assert [r["step"] for r in recorder.made[0].rows] == [1, 4]
  assert [r["step"] for r in read_metrics(str(tmp_path))] == [1, 2, 3, 4]
  assert notes == [
    "wandb       in memory",
    "wandb       failed: ConnectionError: no route to host. The run goes on"
    " without it where it must; metrics.jsonl has every row.",
    "wandb       lacks 2 rows; metrics.jsonl has them all.",
  ]


def test_one_that_cannot_begin(tmp_path, recorder):
  def __init__(self, about):
    raise ValueError("quota exceeded.")

  recorder.__init__ = __init__
  notes = []
  with Writer(str(tmp_path), 0, CONFIG, notes.append) as writer:
    writer.scalars(1, {"train/loss": 2.0})
  assert notes[0].startswith("wandb       failed: ValueError: quota exceeded. ")
  assert notes[1:] == ["wandb       lacks 1 rows; metrics.jsonl has them all."]
  assert not (tmp_path / "trackers").exists()


def test_one_that_hangs_holds_up_nothing(tmp_path, recorder, monkeypatch):
  monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
  hangs = threading.Event()
  recorder.log = lambda self, row: hangs.wait(20)
  notes, began = [], time.monotonic()
  with Writer(str(tmp_path), 0, CONFIG, notes.append) as writer:
    for step in range(100):
      writer.scalars(step, {"train/loss": 2.0})
  assert time.monotonic() - began < 5
  hangs.set()
  assert "has not answered for 0 s; the last rows may be missing" in notes[-1]
  assert len(read_metrics(str(tmp_path))) == 100


def test_packages_that_are_missing(monkeypatch):
  for name in ("wandb", "mlflow", "trackio"):
    monkeypatch.setitem(sys.modules, name, None)
  assert trackers.faults(Config()) == []
  assert trackers.faults(Config(trackers=("mlflow", "trackio"))) == [
    f"config.trackers: {name}: got no {name}, expected installed packages: pip"
    " install '.[trackers]' in the checkout of vit_jax."
    for name in ("mlflow", "trackio")
  ]


def test_names_that_mlflow_refuses():
  allowed = trackers.MLflow._allowed
  assert allowed("few/l2=1024/5shot") == "few/l2_1024/5shot"
  assert allowed("a b-c.d:e_f") == "a b-c.d:e_f"


# The libraries themselves, without a network.


@pytest.fixture
def offline(tmp_path, monkeypatch):
  for kind in trackers.TRACKERS.values():
    pytest.importorskip(kind.PACKAGE)
  for name in list(os.environ):
    if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
      monkeypatch.delenv(name)
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
  monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
  # Read when it is imported.
  import wandb
  from trackio import sqlite_storage, utils

  wandb.teardown()

  for module in (utils, sqlite_storage):
    monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")


def flat_metrics(rows):
  """Returns the set of (step, name, value)."""
  return {
    (r["step"], k, v)
    for r in rows
    for k, v in r.items()
    if k not in ("step", "time")
  }


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

  found, ids, exits = [], set(), []
  for path in sorted((workdir / "wandb").glob("offline-run-*/*.wandb")):
    for data in records(path):
      record = wandb_internal_pb2.Record.FromString(data)
      kind = record.WhichOneof("record_type")
      if kind == "history":
        row = {
          i.key or "/".join(i.nested_key): json.loads(i.value_json)
          for i in record.history.item
        }
        found.append({k: v for k, v in row.items() if not k.startswith("_")})
      elif kind == "run":
        ids.add(record.run.run_id)
      elif kind == "exit":
        exits.append(record.exit.exit_code)
  return found, ids, exits


def in_mlflow():
  from mlflow import MlflowClient

  client = MlflowClient()
  experiment = client.get_experiment_by_name("vit_jax")
  (run,) = client.search_runs([experiment.experiment_id])
  found = [
    {"step": m.step, name: m.value}
    for name in run.data.metrics
    for m in client.get_metric_history(run.info.run_id, name)
  ]
  return found, run


def in_trackio():
  from trackio.sqlite_storage import SQLiteStorage

  (name,) = SQLiteStorage.get_runs("vit_jax")
  rows = SQLiteStorage.get_logs("vit_jax", name)
  return [{k: v for k, v in r.items() if k != "timestamp"} for r in rows]


@pytest.mark.nightly
@pytest.mark.usefixtures("offline")
def test_all_three_have_the_numbers_of_a_run(tmp_path, monkeypatch):
  """A run that fails, resumes and finishes is one run in each of them."""
  monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "commands")
  from test_train import Stopped, _config, _stop_after

  from vit_jax import train

  workdir = tmp_path / "run"
  config = _config(trackers=tuple(trackers.TRACKERS))
  with monkeypatch.context() as m:
    _stop_after(m, 13)  # the last checkpoint is that of step 8
    with pytest.raises(Stopped):
      train.train_and_evaluate(config, str(workdir))
  cut = flat_metrics(read_metrics(str(workdir)))
  assert max(step for step, *_ in cut) == 12
  train.train_and_evaluate(config, str(workdir))
  rows = flat_metrics(read_metrics(str(workdir)))
  # What depends on the clock is as the first process measured it.
  names = {(step, name) for step, name, _ in cut}
  expected = cut | {r for r in rows if r[:2] not in names}
  assert {(step, name) for step, name, _ in rows} == {
    (step, name) for step, name, _ in expected
  }
  in_both = {r[:2] for r in cut & rows}
  assert (12, "train/loss") in in_both  # computed twice, to the same bit

  found, ids, exits = in_wandb(workdir)
  assert flat_metrics(found) == expected
  assert sum(len(r) - 1 for r in found) == len(expected)  # nothing twice
  assert len(ids) == 1 and exits == [1, 0]

  found, run = in_mlflow()
  allowed = trackers.MLflow._allowed
  assert {
    (step, name, np.float64(value)) for step, name, value in flat_metrics(found)
  } == {(step, allowed(name), value) for step, name, value in expected}
  assert len(found) == len(expected)
  assert run.info.status == "FINISHED" and run.info.run_name == "run"
  assert run.data.params["data.dataset"] == "digits"
  assert run.data.params["evals.few.shots"] == "[1, 5]"

  found = in_trackio()
  assert flat_metrics(found) == expected
  assert sum(len(r) - 1 for r in found) == len(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_rows_are_in_the_file_of_wandb_before_a_kill(tmp_path):
  it = trackers.WandB(trackers.About("run", str(tmp_path), {}, None))
  it.log({"step": 1, "time": 0.0, "train/loss": 2.0})
  end = time.monotonic() + 5
  while not (found := in_wandb(tmp_path)[0]) and time.monotonic() < end:
    time.sleep(0.1)
  it.finish("stopped")
  assert found == [{"step": 1, "train/loss": 2.0}]


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_what_is_checked_before_a_run(tmp_path, monkeypatch):
  import wandb

  assert trackers.faults(Config(trackers=("wandb", "mlflow", "trackio"))) == []
  monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
  monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/other")
  monkeypatch.setenv("WANDB_MODE", "online")
  monkeypatch.setenv("NETRC", os.devnull)
  wandb.teardown()  # forgets the environment that it has read
  no_key, no_store = trackers.faults(Config(trackers=("wandb", "mlflow")))
  assert no_key == (
    "config.trackers: wandb: got no API key, expected one: run `wandb login`,"
    " or set WANDB_API_KEY, or WANDB_MODE=offline."
  )
  assert no_store.startswith(
    "config.trackers: mlflow: MlflowException: The file"
  )
  assert no_store.endswith(" Set MLFLOW_TRACKING_URI to a server's address.")

  monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody answers
  for key, expected in (
    ("0" * 40, []),
    (
      "0" * 5,
      [
        "config.trackers: wandb: AuthenticationError: WANDB_API_KEY invalid:"
        " API key must have 40+ characters, has 5."
      ],
    ),
  ):
    monkeypatch.setenv("WANDB_API_KEY", key)
    wandb.teardown()
    assert trackers.faults(Config(trackers=("wandb",))) == expected


def test_a_run_of_the_trainer_is_checked(tmp_path, monkeypatch):
  from vit_jax import experiment as experiment_lib

  monkeypatch.setitem(sys.modules, "trackio", None)
  config = tiny.config(trackers=("trackio",), fake_data=True)
  with pytest.raises(
    ValueError, match="config.trackers: trackio: got no track"
  ):
    experiment_lib.check(config, str(tmp_path))
