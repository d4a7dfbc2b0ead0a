"""Damaged checkpoints, saves that fail, readers beside a run.

The trials "checkpoints" and "saves" of `make faults` do so at random.
"""

import json
import os
import shutil
import threading
import time

import jax
import pytest
from disk import full
from etils import epath
from faults.saved import METADATA, bits, made_up, saved
from faults.saves import FAILURES

from vit_jax import digests
from vit_jax.checkpointing import checkpointer, layout, retention, saving
from vit_jax.config import CheckpointConfig, ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Steps 1 and 2."""
  return saved(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copy(run, tmp_path):
  return shutil.copytree(run.folder, tmp_path / "run")


def _saver(folder, **options):
  return checkpointer.Checkpointer(str(folder), CheckpointConfig(**options))


def _resume(folder, shapes):
  """Returns the step from which a run of these shapes goes on, and its bits."""
  start, errors = retention.start(epath.Path(folder) / "checkpoints")
  if errors:
    raise ConfigError(errors)
  loader = _saver(folder)
  try:
    step, state, _ = loader.restore_newest(start, shapes)
  finally:
    loader.close()
  return step, bits(state)


def _largest(folder):
  files = [p for p in folder.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _flip(path):
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 2] ^= 1
  path.write_bytes(raw)


def _flip_arrays(step, item="params"):
  _flip(_largest(step / item / "ocdbt.process_0/d"))


def _state_no_digests(step):
  (step / "digests.json").unlink()
  path = step / "metadata/metadata"
  metadata = json.loads(path.read_text())
  del metadata["digests"]
  path.write_text(json.dumps(metadata))


DAMAGES = {
  "data": _flip_arrays,
  "optimizer": lambda step: _flip_arrays(step, "train"),
  "index": lambda step: _flip(_largest(step / "params/d")),
  "metadata": lambda step: (step / "metadata/metadata").write_text("{}"),
  "digests": lambda step: _flip(step / "digests.json"),
  "no digests": lambda step: (step / "digests.json").unlink(),
  "no digests stated": _state_no_digests,
  "short": lambda step: os.truncate(_largest(step), 100),
  "half": lambda step: shutil.rmtree(step / "train"),
  "empty": lambda step: [shutil.rmtree(step), step.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(run, copy, damage, capfd):
  step = copy / "checkpoints/2"
  damage(step)
  assert checkpointer.verify(epath.Path(step))
  assert _resume(copy, run.state) == (1, run.states[1])
  assert (copy / "checkpoints/2.damaged").is_dir() and not step.exists()
  err = capfd.readouterr().err
  assert f"damaged     {step}: " in err and "Traceback" not in err
  assert "is now 2.damaged" in err
  # The same step may be written again.
  saver = _saver(copy)
  saver.save_now(2, made_up(run.state, 2), METADATA)
  saver.close()
  assert saver.steps() == [1, 2]


def test_readers_pass_over_it_too(run, copy, capfd):
  _flip_arrays(copy / "checkpoints/2")
  params, metadata = checkpointer.load_params(str(copy))
  assert metadata == {**METADATA, "step": 1}
  assert bits(params) == bits(made_up(run.state, 1).eval_params)
  assert checkpointer.load_tree(str(copy))[1] == metadata
  assert "has the digest" in capfd.readouterr().err
  for read, inside in (
    (checkpointer.load_params, "checkpoints/2"),
    (checkpointer.load_tree, "checkpoints/2/params"),
  ):
    with pytest.raises(checkpointer.DamagedError):
      read(str(copy / inside))
  assert (copy / "checkpoints/2").is_dir()  # readers change nothing


LOSSES = {
  "names": lambda step: (step / "params/_METADATA").unlink(),
  "arrays": lambda step: _flip_arrays(step, "train"),
  "gone": shutil.rmtree,
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_without_a_whole_checkpoint_it_stops(run, copy, lose):
  for step in (1, 2):
    lose(copy / f"checkpoints/{step}")
  left = sorted(p.name for p in (copy / "checkpoints").iterdir())
  with pytest.raises(ConfigError, match="--workdir"):
    _resume(copy, run.state)
  assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == left


def test_a_run_killed_before_its_first_checkpoint_starts_anew(run, tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
  (tmp_path / "checkpoints/7.orbax-checkpoint-tmp").mkdir(parents=True)
  start, errors = retention.start(epath.Path(tmp_path / "checkpoints"))
  assert start == 0 and not errors


@pytest.mark.parametrize(
  "failure",
  [
    pytest.param(make, id=name, marks=[pytest.mark.slow] if number else [])
    for number, (name, make) in enumerate(FAILURES.items())
  ],
)
@pytest.mark.usefixtures("collected")
def test_a_failed_save_is_reported_and_tried_again(
  run, tmp_path, failure, capsys, monkeypatch
):
  states = {n: made_up(run.state, n) for n in (4, 8, 10, 13, 16, 20)}
  saver = _saver(tmp_path)

  def save(step):
    saver.save(step, states[step], METADATA)
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

  # At the end of a run it is an error, and nothing is removed.
  monkeypatch.setattr(saving, "WAITS", (0.0,))
  last = _saver(tmp_path)
  last.restore_newest(16, run.state)
  with failure(), pytest.raises(checkpointer.SaveError, match="step 20 .* 16"):
    last.save_now(20, states[20], METADATA)
  last.save_now(20, states[20], METADATA)
  last.close()
  assert last.steps() == [13, 16, 20]
  assert _resume(tmp_path, run.state) == (20, bits(states[20]))
  assert last.steps() == [16, 20]


def test_a_check_that_fails_once_is_tried_again(run, tmp_path, monkeypatch):
  monkeypatch.setattr(saving, "WAITS", (0.0,))
  check, calls = layout.damage, []

  def fails_once(folder):
    calls.append(folder)
    return full() if len(calls) == 1 else check(folder)

  monkeypatch.setattr(layout, "damage", fails_once)
  saver = _saver(tmp_path)
  saver.save_now(4, made_up(run.state, 4), METADATA)
  saver.close()
  assert saver.steps() == [4]


def test_a_removal_that_fails_is_noted(run, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(retention, "expired", full)
  saver = _saver(tmp_path)
  for step in (4, 6):  # the second waits for the removal after the first
    saver.save(step, made_up(run.state, step), METADATA)
  assert saver.newest() == 6
  saver.close()
  assert "old checkpoints stay (" in capsys.readouterr().err


def test_a_disk_without_room_is_reported_before_the_run(
  run, tmp_path, monkeypatch
):
  monkeypatch.setattr(retention, "free_bytes", lambda _: 1000)
  with pytest.raises(ConfigError, match="GB of a checkpoint"):
    _saver(tmp_path).restore_newest(0, run.state)


def test_retention_counts_only_what_is_whole(run, tmp_path):
  saver = _saver(tmp_path, keep_last=2)
  for step in (1, 2, 3):
    if step == 3:
      (tmp_path / "checkpoints/2/params/_METADATA").unlink()
    saver.save_now(step, made_up(run.state, step), METADATA)
  saver.close()
  # 2 is damaged: 1 and 3 are the two newest that are whole.
  assert saver.steps() == [1, 3]
  assert (tmp_path / "checkpoints/2").is_dir()


def test_folders_of_other_names_are_no_checkpoints(copy):
  folder = copy / "checkpoints"
  (folder / "2").rename(folder / "2.deleted")  # a removal that was killed
  others = "3.orbax-checkpoint-tmp", "notes", "0x5", "٣"
  for name in others:
    (folder / name).mkdir()
  assert checkpointer.find(str(copy)).name == "1"
  retention.clean(epath.Path(folder))
  left = {p.name for p in folder.iterdir()}
  assert left == {"1", *others} - {"3.orbax-checkpoint-tmp"}


def test_a_device_that_cannot_be_opened_is_no_damage(copy, monkeypatch):
  def fails():
    raise RuntimeError("Unable to initialize backend 'tpu': in use")

  monkeypatch.setattr(jax, "devices", fails)
  with pytest.raises(RuntimeError, match="in use"):
    checkpointer.load_tree(str(copy))
  assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == ["1", "2"]


def test_the_sums_of_all_processes_are_the_main_threads(
  run, tmp_path, monkeypatch
):
  """Collectives of two threads of one process would meet others of another
  process, which then aborts."""
  of_state, where = digests.of_state, []

  def seen(tree):
    where.append(threading.current_thread())
    return of_state(tree)

  monkeypatch.setattr(digests, "of_state", seen)
  saver = _saver(tmp_path)
  saver.save_now(1, made_up(run.state, 1), METADATA)
  saver.close()
  assert where == [threading.main_thread()] * 2
