"""A run's files in a bucket, gs://, of a store in this process.

tests/object_store.py answers TensorStore, which reads and writes a run's files.
The trials "bucket" of `make faults` do whole runs.
"""

import collections
import functools
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import object_store
import optax
import pytest
import tensorflow as tf
from clock import Clock

from vit_jax import bucket, paths, run_checks
from vit_jax.callbacks import run_lock, run_record
from vit_jax.checkpointing import checkpointer, layout, retention
from vit_jax.config import CheckpointConfig, ConfigError
from vit_jax.step import TrainState
from vit_jax.weights import npz_file
from vit_jax.writers import atomic_files, metric_writer


@pytest.fixture(scope="module")
def server():
  store = object_store.Store()
  with pytest.MonkeyPatch.context() as patch:
    server = object_store.Server(store)
    address = "http://{}:{}".format(*server.server_address)
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    patch.setitem(bucket.RETRIES, "max_retries", 1)
    patch.setitem(bucket.RETRIES, "initial_delay", "1ms")
    yield store
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(server):
  """The store, with a new bucket of its own."""
  server.buckets = {"bkt": {}}
  server.faults = object_store.Faults()
  server.log.clear()
  bucket._written.clear()
  return server


@pytest.fixture
def run(store):
  return paths.run_path("gs://bkt/run")


def _counts(store):
  counts = collections.Counter(request["kind"] for request in store.log)
  store.log.clear()
  return dict(counts)


def test_paths(store, run):
  assert paths.is_remote(run) and paths.absolute(run) == run
  assert paths.absolute(paths.run_path("run")).is_absolute()
  assert retention.free_bytes(run / "checkpoints") is None
  assert not run.exists() and not run.is_dir()
  with pytest.raises(FileNotFoundError):
    (run / "a").read_bytes()
  with pytest.raises(FileNotFoundError):
    list(run.iterdir())
  for name in ("a", "b/c.txt", "b/d/e.txt"):
    (run / name).write_text(f"{name} é")
  (run.parent / "run2" / "f").write_bytes(b"")
  assert (run / "b/d/e.txt").read_text() == "b/d/e.txt é"
  assert run.names() == ["a", "b/c.txt", "b/d/e.txt"]
  assert (run / "b").is_dir() and (run / "b/c.txt").exists()
  assert not (run / "b/c").exists()
  assert sorted(path.name for path in run.iterdir()) == ["a", "b"]
  assert [str(path) for path in run.glob("*/*.txt")] == ["gs://bkt/run/b/c.txt"]
  with (run / "a").open("a") as file:
    file.write("+")
  (run / "b").rmtree()
  (run / "z").unlink()
  assert run.names() == ["a"] and (run / "a").read_text() == "a é+"
  # TensorFlow marks a folder by an empty object.
  store.buckets["bkt"]["run/g/"] = store.buckets["bkt"]["run2/f"]
  assert run.names() == ["a"]
  with (run / "a.npz").open("wb") as file:
    np.savez(file, a=np.arange(3, dtype=np.float32))
  assert np.asarray(npz_file.open_npz(run / "a.npz")["a"]).tolist() == [0, 1, 2]


def test_a_new_run_and_a_bucket_that_cannot_be_used(store, run):
  folder = run / "checkpoints"
  check = lambda workdir: run_checks.workdir_errors(workdir, is_training=True)
  assert not check(str(run))
  assert retention.start(folder) == (0, [])
  retention.note_newest(folder, 3)
  start, (error,) = retention.start(folder)
  assert start == 0 and "step 3 is gone" in error
  store.faults.refuse_writes = True
  (error,) = check(str(run))
  assert "where no files can be written" in error and "403" not in error
  store.faults = object_store.Faults()
  store.log.clear()
  (error,) = check("gs://nobucket/run")
  assert "gs://nobucket/run" in error and "bucket does not exist" in error
  assert len(store.log) < 10  # at once


def test_a_step_counts_when_it_is_complete(run):
  folder = run / "checkpoints"
  (folder / "4/a").write_text("x")
  assert layout.step_folders(folder) == {}
  (folder / "4" / layout.COMMITTED).write_text("")
  assert list(layout.step_folders(folder)) == [4]
  retention.remove(folder / "4")
  assert layout.step_folders(folder) == {} and not (folder / "4").exists()
  # What a killed process left would stand in the way of the next save.
  for name in ("4", "8", "9.damaged"):
    (folder / name / "params/a").write_text("x")
  (folder / "4" / layout.COMMITTED).write_text("")
  retention.clean(folder)
  assert (folder / "4").exists() and (folder / "9.damaged").exists()
  assert not (folder / "8").exists()


def _state(step):
  params = {"kernel": jnp.full((8, 4), float(step)), "bias": jnp.zeros(4)}
  opt_state = optax.adam(1e-3).init(params)
  return TrainState(step=jnp.int32(step), params=params, opt_state=opt_state)


def test_saves(store, run):
  """A save: its requests, what is kept, damage, and what the end leaves."""
  saver = checkpointer.Checkpointer(str(run), CheckpointConfig(keep_last=2))
  for step in (1, 2, 3, 4):
    store.log.clear()
    saver.save(step, _state(step), {"a": step})
    assert saver.newest() == step
  saver.save_now(5, _state(5), {"a": 5})
  saver.close()
  asked = [(r["kind"], r["object"]) for r in store.log]
  assert saver.steps() == [3, 4, 5]  # the end of a run removes nothing
  assert not [name for _, name in asked if "/3/" in name]  # kept: not read
  assert not [name for _, name in asked if name.endswith((".new", ".probe"))]
  assert not {kind for kind, _ in asked} & {"rewrite", "stat", "bucket"}
  assert json.loads((run / "metadata.json").read_text())["a"] == 5
  store.log.clear()
  params, metadata = checkpointer.load_params(str(run))
  assert metadata["a"] == 5 and params["kernel"][0, 0] == 5
  assert not [r for r in store.log if "/4/" in r["object"]]  # one is enough

  for key in [k for k in store.buckets["bkt"] if "/5/params/ocdbt" in k]:
    del store.buckets["bkt"][key]
  again = checkpointer.Checkpointer(str(run), CheckpointConfig(keep_last=2))
  start, errors = retention.start(run / "checkpoints")
  assert (start, errors) == (4, [])
  (run / "checkpoints/6/params/left").write_text("by a run that was killed")
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  shapes = jax.tree.map(shape, _state(0))
  step, restored, _ = again.restore_newest(start, shapes)
  assert step == 4 and restored.params["kernel"][0, 0] == 4
  np.testing.assert_array_equal(restored.step, 4)
  assert again.steps() == [3, 4]
  again.save(6, _state(6), {"a": 6})
  assert again.newest() == 6
  assert not (run / "checkpoints/6/params/left").exists()
  again.close()
  assert (run / "checkpoints/5.damaged").exists()


def test_hosts_do_not_multiply_the_requests_of_process_0(store, run):
  """What 64 hosts leave in a step: names alone are listed, by the thousand."""
  folder, files = run / "checkpoints/4", store.buckets["bkt"]
  (folder / "metadata/metadata").write_text('{"a": 1}')
  one = files["run/checkpoints/4/metadata/metadata"]
  for host in range(64):
    for item in layout.ITEMS:
      inside = f"run/checkpoints/4/{item}/ocdbt.process_{host}"
      for name in ("manifest.ocdbt", *(f"d/{i:032x}" for i in range(9))):
        files[f"{inside}/{name}"] = one
  store.log.clear()
  layout.write_digests(folder, {"params": {}, "train": {}}, {"a": 1})
  assert _counts(store) == {"list": 2, "upload": 1}  # 1,281 names
  assert layout.damage(folder) is None
  assert _counts(store) == {"list": 2, "read": 2}
  del files[f"{inside}/d/" + "0" * 32]
  assert "is missing" in layout.damage(folder)


@pytest.mark.usefixtures("collected")
def test_a_refused_save_is_tried_again(store, run, capsys):
  saver = checkpointer.Checkpointer(str(run), CheckpointConfig())
  store.faults.refuse_writes = True
  saver.save(4, _state(4), {})
  assert saver.newest() is None
  assert "NOT SAVED   the checkpoint of step 4" in capsys.readouterr().err
  store.faults.refuse_writes = False
  assert saver.retry_due(5)
  saver.save(5, _state(5), {})
  assert saver.newest() == 5
  store.faults.refuse_writes = True
  saver.save(6, _state(6), {})
  assert saver.newest() == 5
  store.faults.refuse_writes = False
  saver.save_now(6, _state(6), {})  # the same step, as after SIGTERM
  assert saver.newest() == 6
  saver.close()
  assert not (run / "checkpoints/4").names()


def test_rows(store, run):
  notes = []
  for start in (0, 1):
    with metric_writer.MetricLog(str(run), start, note=notes.append) as log:
      log.write(start + 1, {"train/loss": 1.0})
  rows = metric_writer.read_metrics(str(run))
  assert [row["step"] for row in rows] == [1, 2]
  store.faults.share_503 = 1
  with pytest.raises(atomic_files.WriteError, match="cannot be read"):
    metric_writer.MetricLog(str(run), 1)
  store.faults.share_503 = 0
  assert metric_writer.read_metrics(str(run)) == rows
  (events,) = (run / "tensorboard").iterdir()
  assert not notes
  assert events.read_bytes().count(b"train/loss") == 2


def _until(holds):
  for _ in range(1000):
    if holds():
      return
    time.sleep(0.01)
  raise AssertionError("it never was")


def test_what_grows_is_uploaded_by_a_thread(store, run, monkeypatch):
  notes, file = [], run / "records"
  records = atomic_files.open_records(file, b"0\n", notes.append)
  records.append(b"1\n")
  assert file.read_bytes() == b"0\n"  # nobody waits for the bucket
  records.flush()  # before a checkpoint
  _until(lambda: file.read_bytes() == b"0\n1\n")
  store.faults.refuse_writes = True
  records.append(b"2\n")
  records.flush()
  _until(lambda: notes)
  assert "cannot be written (PERMISSION_DENIED" in notes[0]
  monkeypatch.setattr(atomic_files, "MAX_WAITING", 3)
  records.append(b"3\n")
  with pytest.raises(atomic_files.WriteError, match="3 records wait"):
    records.append(b"4\n")
  store.faults.refuse_writes = False
  assert records.close() is None
  assert file.read_bytes() == b"0\n1\n2\n3\n4\n"
  assert notes[1:] == [f"file        {file}: 3 records written again"]


def test_nothing_is_uploaded_into_another_run(run, monkeypatch):
  monkeypatch.setattr(atomic_files, "UPLOAD_SECONDS", 0.01)
  asked = []

  def guard():
    asked.append(1)
    if len(asked) > 1:
      raise run_lock.LostError("another run took this folder")

  records = atomic_files.open_records(run / "records", b"", print, guard)
  records.append(b"1\n")
  _until(lambda: (run / "records").read_bytes() == b"1\n")
  (run / "records").write_bytes(b"another's\n")
  records.append(b"2\n")
  _until(lambda: len(asked) > 1)
  records.append(b"3\n")
  assert records.close() is None
  assert (run / "records").read_bytes() == b"another's\n"


def test_a_lock_outlives_an_error_of_the_bucket(store, run, monkeypatch):
  monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
  notes = []
  with run_lock.RunLock(str(run), notes.append) as lock:
    store.faults.refuse_writes = True
    _until(lambda: notes)
    store.faults.share_503 = 1
    lock.check()
    store.log.clear()
    _until(lambda: len(store.log) > 9)  # many heartbeats, and still one note
    assert len(notes) == 1 and "cannot be written" in notes[0]
    store.faults = object_store.Faults()
    lock.check()
  record = json.loads((run / "process.json").read_text())
  assert record["how"] == "finished"


def test_a_live_run_keeps_its_folder(run, monkeypatch):
  """A third run watches a dead one, whose folder a second run takes meanwhile.

  The new record is longer, and TensorFlow would cut it for 5 seconds.
  """
  dead = run_record.new() | {"machine": "elsewhere", "host": "h0"}
  live = dead | {"id": "1", "host": "h1", "earlier": [[1.0, 2.0]] * 50}
  record, clock, notes = run / run_record.FILE, Clock(), []
  monkeypatch.setattr(run_lock, "time", clock.module())
  record.write_text(json.dumps(dead))
  for second, text in enumerate(('{"id": "1", "en', "", json.dumps(live)), 1):
    clock.acts[second] = functools.partial(record.write_text, text)
  with pytest.raises(ConfigError, match="another run trains: host h1"):
    run_lock.refuse_live(str(run), notes.append)
  # A record that stays unreadable, without a heartbeat, is that of no run.
  record.write_text('{"id": "1", "en')
  run_lock.refuse_live(str(run), notes.append)
  assert "takes over" in notes[-1]


def test_a_run_whose_folder_is_taken_notices_without_waiting_for_the_bucket(
  store, run, monkeypatch
):
  monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
  lost = pytest.raises(run_lock.LostError, match="another run took this folder")
  with run_lock.RunLock(str(run), print) as lock, lost:
    lock.on_log(1, {})
    (run / "process.json").write_text('{"id": "another"}')
    _until(lambda: lock.on_log(1, {}) is None)
  asked = []
  check = lambda: asked.append(threading.current_thread())
  with metric_writer.MetricLog(str(run), check_owner=check) as log:
    log.write(1, {"train/loss": 1.0})
    log.flush()
    _until(lambda: asked)
    assert threading.main_thread() not in asked


def test_a_bucket_that_does_not_answer_is_no_damage(store, run):
  (run / "checkpoints/4" / layout.COMMITTED).write_text("")
  store.faults.share_503 = 1
  start, (error,) = retention.start(run / "checkpoints")
  assert start == 0 and "cannot be read" in error
  assert layout.damage_of(tf.errors.DataLossError(None, None, "x"))
  for kind in ("DeadlineExceeded", "PermissionDenied", "Aborted"):
    error = getattr(tf.errors, f"{kind}Error")(None, None, "x")
    assert layout.damage_of(error) is None
