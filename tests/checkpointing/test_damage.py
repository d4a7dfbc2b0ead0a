"""Damaged checkpoints, saves that fail, readers beside a run."""

import contextlib
import errno
import io
import json
import os
import pwd
import resource
import shutil
import sys
import threading
import time

import jax
import numpy as np
import pytest
import tiny
from disk import full
from etils import epath

from vit_jax import digests
from vit_jax.checkpointing import (
  checkpointer,
  layout,
  retention,
  saving,
)
from vit_jax.config import CheckpointConfig, ConfigError

META = {"class_names": ["a"]}


@pytest.fixture(scope="module")
def shapes():
  return tiny.Parts(
    tiny.config(model__depth=1, optim__name="sgd"), jax.devices()[:1]
  ).shapes


def _state(shapes, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jax.device_put(
      np.asarray(100 * rng.normal(size=x.shape), x.dtype), x.sharding
    ),
    shapes,
  )


def _bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
  """Steps 1 and 2."""
  folder = tmp_path_factory.mktemp("run")
  saver = checkpointer.Checkpointer(str(folder), CheckpointConfig())
  for step in (1, 2):
    saver.save_now(step, _state(shapes, step), {**META, "step": step})
  saver.close()
  return folder


@pytest.fixture
def copy(run, tmp_path):
  return shutil.copytree(run, tmp_path / "run")


def _resume(folder, shapes):
  start, errors = retention.start(epath.Path(folder) / "checkpoints")
  if errors:
    raise ConfigError(errors)
  loader = checkpointer.Checkpointer(str(folder), CheckpointConfig())
  try:
    return loader.restore_newest(start, shapes)[:2]
  finally:
    loader.close()


def _largest(folder):
  files = [p for p in folder.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _flip(path):
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 2] ^= 1
  path.write_bytes(raw)


def _state_no_digests(step):
  (step / "digests.json").unlink()
  path = step / "metadata/metadata"
  metadata = json.loads(path.read_text())
  del metadata["digests"]
  path.write_text(json.dumps(metadata))


DAMAGES = {
  "data": lambda step: _flip(_largest(step / "params/ocdbt.process_0/d")),
  "optimizer": lambda step: _flip(_largest(step / "train/ocdbt.process_0/d")),
  "index": lambda step: _flip(_largest(step / "params/d")),
  "names": lambda step: _flip(step / "params/_METADATA"),
  "metadata": lambda step: (step / "metadata/metadata").write_text("{}"),
  "no metadata": lambda step: (step / "metadata/metadata").unlink(),
  "digests": lambda step: _flip(step / "digests.json"),
  "no digests": lambda step: (step / "digests.json").unlink(),
  "no digests stated": _state_no_digests,
  "short": lambda step: os.truncate(_largest(step), 100),
  "half": lambda step: shutil.rmtree(step / "train"),
  "empty": lambda step: [shutil.rmtree(step), step.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(copy, shapes, damage, capfd):
  step = copy / "checkpoints/2"
  damage(step)
  assert checkpointer.verify(epath.Path(step))
  damages_params = "optimizer" not in str(checkpointer.verify(epath.Path(step)))
  if damages_params and not (step / "train/opt_state").exists():
    checkpointer.load_params(str(copy))
  start, state = _resume(copy, shapes)
  assert start == 1
  assert _bits(state) == _bits(_state(shapes, 1))
  assert (copy / "checkpoints/2.damaged").is_dir() and not step.exists()
  err = capfd.readouterr().err
  assert f"damaged     {step}: " in err and "Traceback" not in err
  assert "is now 2.damaged" in err


def test_a_damaged_step_is_written_again(copy, shapes):
  DAMAGES["data"](copy / "checkpoints/2")
  assert _resume(copy, shapes)[0] == 1
  saver = checkpointer.Checkpointer(str(copy), CheckpointConfig())
  saver.save_now(2, _state(shapes, 2), META)
  saver.close()
  assert saver.steps() == [1, 2]


def test_long_metadata_of_an_owner_without_a_name(
  shapes, tmp_path, monkeypatch
):
  """As in a container that runs under a number of its host's."""

  def unknown(number):
    raise KeyError(f"uid not found: {number}")

  monkeypatch.setattr(pwd, "getpwuid", unknown)
  metadata = {"flops": 3 * 10**24, "class_names": ["\\n", "é", "猫"]}
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  saver.save_now(1, _state(shapes, 1), metadata)
  saver.close()
  assert checkpointer.load_metadata(str(tmp_path)) == metadata
  assert checkpointer.verify(epath.Path(tmp_path / "checkpoints/1")) is None


def test_readers_pass_over_it_too(copy, shapes, capfd):
  _flip(_largest(copy / "checkpoints/2/params/ocdbt.process_0/d"))
  params, metadata = checkpointer.load_params(str(copy))
  assert metadata == {**META, "step": 1}
  assert _bits(params) == _bits(_state(shapes, 1).params)
  assert checkpointer.load_tree(str(copy))[1] == metadata
  assert "has the digest" in capfd.readouterr().err
  with pytest.raises(checkpointer.DamagedError, match="is damaged"):
    checkpointer.load_params(str(copy / "checkpoints/2"))
  with pytest.raises(checkpointer.DamagedError, match="has the digest"):
    checkpointer.load_tree(str(copy / "checkpoints/2/params"))
  assert (copy / "checkpoints/2").is_dir()  # readers change nothing


def test_the_digests_can_be_read_alone(run):
  newest = checkpointer.digests(str(run))
  assert newest.keys() == {"params", "train"}
  assert newest["params"]["head/bias"][:2] == ("float32", (tiny.NUM_CLASSES,))
  older = checkpointer.digests(str(run / "checkpoints/1"))
  assert older["params"]["head/bias"] != newest["params"]["head/bias"]


@pytest.mark.parametrize("what", ["damaged", "gone", "folder gone"])
def test_without_a_whole_checkpoint_it_stops(copy, shapes, what):
  for step in (1, 2):
    if what == "damaged":
      (copy / f"checkpoints/{step}/params/_METADATA").unlink()
    else:
      shutil.rmtree(copy / f"checkpoints/{step}")
  if what == "folder gone":
    shutil.rmtree(copy / "checkpoints")
  with pytest.raises(ConfigError, match="to start over .* --workdir, or del"):
    _resume(copy, shapes)
  if what == "damaged":
    assert (copy / "checkpoints/2").is_dir()


def test_arrays_damaged_in_all(copy, shapes):
  for step in (1, 2):
    _flip(_largest(copy / f"checkpoints/{step}/train/ocdbt.process_0/d"))
  with pytest.raises(ConfigError, match="none of its checkpoints is whole"):
    _resume(copy, shapes)
  assert checkpointer.Checkpointer(str(copy), CheckpointConfig()).steps() == [
    1,
    2,
  ]


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path, shapes):
  (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
  (tmp_path / "checkpoints/7.orbax-checkpoint-tmp").mkdir(parents=True)
  assert _resume(tmp_path, shapes) == (0, None)


@contextlib.contextmanager
def _no_file_beyond(size):
  """Every layer then gets an error, that which writes arrays, too."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _full_at_the_rename():
  real = os.rename

  def rename(path, *args):
    if "orbax-checkpoint-tmp" in str(path):
      full()
    return real(path, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, "rename", rename)
    yield


FAILURES = {
  "arrays": lambda: _no_file_beyond(5_000),
  "all files": lambda: _no_file_beyond(64),
  "full at the rename": _full_at_the_rename,
}


@pytest.mark.parametrize(
  "failure",
  [
    pytest.param(
      make, id=name, marks=() if name == "arrays" else pytest.mark.slow
    )
    for name, make in FAILURES.items()
  ],
)
def test_a_failed_save_is_reported_and_tried_again(
  tmp_path, shapes, failure, capsys, monkeypatch
):
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())

  def save(step):
    saver.save(step, _state(shapes, step), META)
    while not saver.is_idle():
      time.sleep(0.005)

  save(4)
  assert not saver.retry_due(5)
  with failure():
    save(8)
    assert not saver.retry_due(9)  # logged now, tried again after one step
    err = capsys.readouterr().err
    assert "NOT SAVED   the checkpoint of step 8 (" in err
    assert "after step 10; the newest is that of step 4" in err
    assert saver.retry_due(10)
    save(10)
    assert not saver.retry_due(11) and not saver.retry_due(12)
    assert "after step 13" in capsys.readouterr().err  # two steps
    assert saver.retry_due(13)
    assert saver.steps() == [4]
  save(13)
  assert not saver.retry_due(14)
  save(16)
  saver.close()
  names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
  assert names == ["13", "16"]  # nothing is left of those that failed
  assert json.loads((tmp_path / "checkpoints.json").read_text()) == {"step": 16}
  assert "Traceback" not in capsys.readouterr().err

  monkeypatch.setattr(saving, "WAITS", (0.0,))
  last = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  last.restore_newest(16, shapes)
  with (
    failure(),
    pytest.raises(
      checkpointer.SaveError, match="step 20 could not .* that of step 16"
    ),
  ):
    last.save_now(20, _state(shapes, 20), META)
  last.save_now(20, _state(shapes, 20), META)
  last.close()
  # The end of a run removes nothing; the next one does.
  assert last.steps() == [13, 16, 20]
  again = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  again.restore_newest(20, shapes)
  again.close()
  assert again.steps() == [16, 20]


class _Full(io.StringIO):
  """A log on a disk that is full."""

  write = full


def test_a_failure_is_no_error_where_it_cannot_be_reported(
  tmp_path, shapes, monkeypatch
):
  def refuse(*_):
    raise OSError(errno.EACCES, "Permission denied")

  monkeypatch.setattr(sys, "stderr", _Full())
  monkeypatch.setattr(saving, "WAITS", ())
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  with FAILURES["all files"]():
    saver.save(4, _state(shapes, 4), META)
    while not saver.is_idle():
      time.sleep(0.005)
    assert not saver.retry_due(5)  # NOT SAVED
    assert saver.retry_due(6)
  monkeypatch.setattr(retention, "expired", refuse)
  saver.save(6, _state(shapes, 6), META)  # note: old checkpoints stay
  assert saver.newest() == 6
  saver.close()


def test_a_check_that_fails_once_is_tried_again(tmp_path, shapes, monkeypatch):
  monkeypatch.setattr(saving, "WAITS", (0.0,))
  check, calls = layout.damage, []

  def error(folder):
    calls.append(folder)
    if len(calls) == 1:
      raise PermissionError(errno.EACCES, "Permission denied", str(folder))
    return check(folder)

  monkeypatch.setattr(layout, "damage", error)
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  saver.save_now(4, _state(shapes, 4), META)
  saver.close()
  assert saver.steps() == [4]
  assert _bits(_resume(tmp_path, shapes)[1]) == _bits(_state(shapes, 4))


def test_a_disk_without_room_is_reported_before_the_run(
  tmp_path, shapes, monkeypatch
):
  monkeypatch.setattr(retention, "free_bytes", lambda _: 1000)
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  with pytest.raises(ConfigError, match="expected the .* GB of a checkpoint"):
    saver.restore_newest(0, shapes)
  saver.close()


def test_retention_counts_only_what_is_whole(tmp_path, shapes):
  saver = checkpointer.Checkpointer(
    str(tmp_path), CheckpointConfig(keep_last=2)
  )
  for step in (1, 2, 3):
    if step == 3:
      (tmp_path / "checkpoints/2/params/_METADATA").unlink()
    saver.save_now(step, _state(shapes, step), META)
  saver.close()
  # 2 is damaged: 1 and 3 are the two newest that are whole.
  assert saver.steps() == [1, 3]
  assert (tmp_path / "checkpoints/2").is_dir()


def test_what_a_removal_left_is_no_checkpoint(copy):
  (copy / "checkpoints/2").rename(copy / "checkpoints/2.deleted")
  assert checkpointer.find(str(copy)).name == "1"
  retention.clean(epath.Path(copy / "checkpoints"))
  assert not (copy / "checkpoints/2.deleted").exists()


def test_a_device_that_cannot_be_opened_is_no_damage(copy, monkeypatch):
  def fails():
    raise RuntimeError("Unable to initialize backend 'tpu': in use")

  monkeypatch.setattr(jax, "devices", fails)
  with pytest.raises(RuntimeError, match="in use"):
    checkpointer.load_tree(str(copy))
  assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == ["1", "2"]


def test_the_sums_of_all_processes_are_the_main_threads(
  shapes, tmp_path, monkeypatch
):
  """Collectives of two threads of one process would meet others of another
  process, which then aborts."""
  of_state, where = digests.of_state, []

  def seen(tree):
    where.append(threading.current_thread())
    return of_state(tree)

  monkeypatch.setattr(digests, "of_state", seen)
  saver = checkpointer.Checkpointer(str(tmp_path), CheckpointConfig())
  saver.save_now(1, _state(shapes, 1), META)
  saver.close()
  assert where == [threading.main_thread()] * 2
  assert checkpointer.verify(epath.Path(tmp_path) / "checkpoints" / "1") is None
