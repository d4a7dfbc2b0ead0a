"""A run's files in a bucket, gs://, which is here in TensorFlow's memory.

Its errors are TensorFlow's own, `open` is a context, and no folder is there
until a file is in it. Orbax reads buckets by itself, and is not tried here.
"""

import io
import json
import re
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf
from etils import epath

import vit_jax
from vit_jax import experiment, paths
from vit_jax.callbacks import run_lock
from vit_jax.checkpointing import layout, retention
from vit_jax.exporting import convert
from vit_jax.weights import npz_file
from vit_jax.writers import atomic_files, metric_writer


@pytest.fixture
def run(monkeypatch, request):
  """Path of a run; and errors by the name of a function that raises them."""
  names = [n for n in dir(tf.io.gfile) if not n.startswith("_")]
  real = types.SimpleNamespace(**{n: getattr(tf.io.gfile, n) for n in names})
  errors = {}

  def mapped(name):
    def call(*args, **options):
      if name in errors:
        raise errors[name]
      args = [
        re.sub("^(gs|s3)://", r"ram://\1-", a) if isinstance(a, str) else a
        for a in args
      ]
      if name == "GFile" and args[1][0] == "w" and real.exists(args[0]):
        real.remove(args[0])  # TensorFlow's memory would append
      result = getattr(real, name)(*args, **options)
      if name == "glob":
        return [f.replace("ram://gs-", "gs://", 1) for f in result]
      return result

    return call

  for name in names:  # etils reads and writes buckets by them
    monkeypatch.setattr(tf.io.gfile, name, mapped(name))
  return epath.Path(f"gs://bucket/{request.node.name}"), errors


UNAVAILABLE = tf.errors.UnavailableError(None, None, "HTTP 503")


def test_paths():
  path = epath.Path("gs://bucket/run")
  assert paths.is_remote(path) and paths.absolute(path) == path
  assert retention.free_bytes(path / "checkpoints") is None
  assert paths.absolute(epath.Path("run")).is_absolute()


def test_a_new_run(run):
  path, _ = run
  folder = path / "checkpoints"
  assert retention.start(folder) == (0, [])
  assert not experiment.workdir_errors(str(path), is_training=True)
  assert retention.start(folder) == (0, [])
  retention.note_newest(folder, 3)
  start, (error,) = retention.start(folder)
  assert start == 0 and "step 3 is gone" in error


def test_a_bucket_that_may_not_be_written_is_reported_with_an_error(run):
  path, errors = run
  errors["makedirs"] = tf.errors.PermissionDeniedError(None, None, "HTTP 403")
  (error,) = experiment.workdir_errors(str(path), is_training=True)
  assert "where no files can be written (PermissionDeniedError: " in error


def test_a_step_counts_when_it_is_complete(run):
  folder = run[0] / "checkpoints"
  (folder / "4").mkdir(parents=True)
  assert layout.step_folders(folder) == {}
  (folder / "4" / layout.COMMITTED).write_text("")
  assert list(layout.step_folders(folder)) == [4]
  retention.remove(folder / "4")
  assert layout.step_folders(folder) == {} and not (folder / "4").exists()
  # What a killed process left would stand in the way of the next save.
  for name in ("4", "8", "9.damaged"):
    (folder / name / "params").mkdir(parents=True)
    (folder / name / "params/a").write_text("x")
  (folder / "4" / layout.COMMITTED).write_text("")
  retention.clean(folder)
  assert (folder / "4").exists() and (folder / "9.damaged").exists()
  assert not (folder / "8").exists()
  # Orbax renames on other stores.
  other = epath.Path(str(folder).replace("gs://", "s3://"))
  (other / "4").mkdir(parents=True)
  assert list(layout.step_folders(other)) == [4]


def test_rows(run):
  path, errors = run
  notes = []
  for start in (0, 1):
    with metric_writer.MetricLog(str(path), start, note=notes.append) as log:
      log.write(start + 1, {"train/loss": 1.0})
  rows = metric_writer.read_metrics(str(path))
  assert [row["step"] for row in rows] == [1, 2]
  errors["GFile"] = UNAVAILABLE
  with pytest.raises(
    atomic_files.WriteError, match="cannot be read .*HTTP 503"
  ):
    metric_writer.MetricLog(str(path), 1)
  errors.clear()
  assert metric_writer.read_metrics(str(path)) == rows
  (events,) = (path / "tensorboard").iterdir()
  assert not notes
  assert events.read_bytes().count(b"train/loss") == 2


def _until(holds):
  for _ in range(1000):
    if holds():
      return
    time.sleep(0.01)
  raise AssertionError("it never was")


def test_what_grows_is_uploaded_by_a_thread(run, monkeypatch):
  path, errors = run
  notes, file = [], path / "records"
  records = atomic_files.open_records(file, b"0\n", notes.append)
  records.append(b"1\n")
  assert file.read_bytes() == b"0\n"  # nobody waits for the bucket
  records.flush()  # before a checkpoint
  _until(lambda: file.read_bytes() == b"0\n1\n")
  errors["GFile"] = UNAVAILABLE
  records.append(b"2\n")
  records.flush()
  _until(lambda: notes)
  assert "cannot be written (UnavailableError: HTTP 503)" in notes[0]
  monkeypatch.setattr(atomic_files, "MAX_WAITING", 3)
  records.append(b"3\n")
  with pytest.raises(
    atomic_files.WriteError, match="3 records wait, .* HTTP 503"
  ):
    records.append(b"4\n")
  errors.clear()
  assert records.close() is None
  assert file.read_bytes() == b"0\n1\n2\n3\n4\n"
  assert notes[1:] == [f"file        {file}: 3 records written again"]


def test_nothing_is_uploaded_into_another_run(run, monkeypatch):
  path, _ = run
  monkeypatch.setattr(atomic_files, "UPLOAD_SECONDS", 0.01)
  asked = []

  def guard():
    asked.append(1)
    if len(asked) > 1:
      raise run_lock.LostError("another run took this folder")

  records = atomic_files.open_records(path / "records", b"", print, guard)
  records.append(b"1\n")
  _until(lambda: (path / "records").read_bytes() == b"1\n")
  (path / "records").write_bytes(b"another's\n")
  records.append(b"2\n")
  _until(lambda: len(asked) > 1)
  records.append(b"3\n")
  assert records.close() is None
  assert (path / "records").read_bytes() == b"another's\n"


def test_a_lock_outlives_an_error_of_the_bucket(run, monkeypatch):
  path, errors = run
  monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
  notes = []
  with run_lock.RunLock(str(path), notes.append) as lock:
    errors["GFile"] = UNAVAILABLE
    _until(lambda: notes)
    lock.check()
    time.sleep(0.1)
    assert len(notes) == 1 and "cannot be written" in notes[0]
    errors.clear()
    lock.check()
  record = json.loads((path / "process.json").read_text())
  assert record["how"] == "finished"


def test_rows_do_not_ask_the_bucket_for_the_owner(run, monkeypatch):
  path, errors = run
  monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
  with run_lock.RunLock(str(path), print) as lock:
    lock.check()
    errors["GFile"] = AssertionError("a request")
    lock.on_log(1, {})
    errors.clear()
    (path / "process.json").write_text('{"id": "another"}')
    with pytest.raises(
      run_lock.LostError, match="another run took this folder"
    ):
      _until(lambda: lock.on_log(1, {}) is None)
  asked = []
  check = lambda: asked.append(threading.current_thread())
  with metric_writer.MetricLog(str(path), check_owner=check) as log:
    log.write(1, {"train/loss": 1.0})
    log.flush()
    _until(lambda: asked)
    assert threading.main_thread() not in asked


def test_arrays(run):
  path = run[0] / "a.npz"
  packed = io.BytesIO()
  np.savez(packed, a=np.arange(3, dtype=np.float32))
  path.write_bytes(packed.getvalue())
  assert np.asarray(npz_file.open_npz(path)["a"]).tolist() == [0, 1, 2]
  (other := run[0] / "b.npz").write_bytes(b"PK" + bytes(100))
  with pytest.raises(ValueError, match="b.npz"):
    npz_file.open_npz(other)


def test_a_bucket_that_does_not_answer_is_no_damage(run):
  path, errors = run
  step = path / "checkpoints/4"
  step.mkdir(parents=True)
  (step / layout.COMMITTED).write_text("")
  errors["isdir"] = UNAVAILABLE
  start, (error,) = retention.start(path / "checkpoints")
  assert start == 0 and "cannot be read (UnavailableError" in error
  assert layout.damage_of(tf.errors.DataLossError(None, None, "x"))
  for kind in ("DeadlineExceeded", "PermissionDenied", "Aborted"):
    error = getattr(tf.errors, f"{kind}Error")(None, None, "x")
    assert layout.damage_of(error) is None


def test_a_npz_is_written(run):
  letters = vit_jax.load(vit_jax.LETTERS, verbose=False)
  path = str(run[0] / "letters.npz")
  convert.convert(letters, path, "npz")
  again = convert.WRITERS["npz"].read(letters, path)
  difference, _ = convert.largest_difference(letters, again)
  assert difference == 0
