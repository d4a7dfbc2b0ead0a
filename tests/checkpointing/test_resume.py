"""A run that is stopped, changed, damaged, or loses its folder or its disk."""

import json
import pathlib
import re
import shutil
import time

import disk
import numpy as np
import pytest
import tiny

from vit_jax import train
from vit_jax.callbacks import accounting, run_lock
from vit_jax.checkpointing import checkpointer, resume_rules
from vit_jax.config import ConfigError
from vit_jax.writers import atomic_files
from vit_jax.writers.metric_writer import read_metrics

pytestmark = pytest.mark.faults


class Stopped(Exception):
  """Stands for a machine that is taken away."""


class _Data:
  """Training data in memory; `at` maps a step to what happens before it."""

  num_examples, num_classes, class_names = 160, tiny.NUM_CLASSES, None

  def __init__(self, at=None):
    self._at = at or {}

  def batches(self, start_step, process_index, process_count):
    step = start_step
    while True:
      step += 1
      self._at.get(step, lambda: None)()
      batch = tiny.batch(step, tiny.config())
      yield batch | {"index": np.arange(16, dtype=np.int64)}


class _Sized(_Data):
  """Batches of the size of a config; `first` are those it began with."""

  def __init__(self, config, first):
    super().__init__()
    self._config, self._first = config, first

  def batches(self, start_step, process_index, process_count):
    self._first.append(start_step)
    while True:
      batch = tiny.batch(start_step, self._config)
      rows = len(batch["mask"])
      yield batch | {"index": np.arange(rows, dtype=np.int64)}


def _config(**options):
  return tiny.config(
    total_steps=8, log_steps=2, checkpoint__every_steps=2, **options
  )


def _stop(seconds=0.0):
  time.sleep(seconds)
  raise Stopped


def _fill(monkeypatch):
  """From now on nothing can be written to the files of a run."""
  monkeypatch.setattr(atomic_files, "append", disk.full)
  monkeypatch.setattr(atomic_files, "replace_text", disk.full)


@pytest.mark.nightly
def test_batches_of_another_size_go_on_behind_the_images_seen(tmp_path):
  folder, first = str(tmp_path), []

  def trained(batch_size, total_steps):
    config = tiny.config(
      total_steps=total_steps,
      log_steps=2,
      data__batch_size=batch_size,
      optim__schedule="constant",  # compiled once for a batch size
    )
    train.train_and_evaluate(
      config,
      folder,
      _Sized(config, first),
      allow_change=("data.batch_size", "total_steps"),
    )
    rows = {r["step"]: r for r in read_metrics(folder)}
    seen, epoch = "train/images_seen", "train/epoch"
    return [
      (rows[n][seen], rows[n][epoch]) for n in range(2, total_steps + 1, 2)
    ]

  trained(16, 4)
  # 64 images are 8 batches of 8; there are 160 records.
  rows = trained(8, 8)
  assert first == [0, 8]
  assert rows == [(32, 0.2), (64, 0.4), (80, 0.5), (96, 0.6)]
  # Once more, from a checkpoint behind the change.
  assert trained(8, 10)[-1] == (112, 0.7)
  assert first == [0, 8, 12]
  # 112 is no multiple of 24: images from 96 on come again, none is left out.
  trained(24, 12)
  trained(8, 14)
  assert first == [0, 8, 12, 4, 18]


@pytest.mark.nightly
def test_a_changed_run_is_refused_or_recorded_and_its_time_adds_up(
  tmp_path, capfd
):
  folder, began = str(tmp_path), time.time()

  def second_run():
    before = disk.contents(tmp_path)
    with pytest.raises(ConfigError, match="in which another run trains: host"):
      train.train_and_evaluate(_config(), folder, _Data())
    small = lambda files: {p: x for p, x in files.items() if is_small(p)}
    is_small = lambda p: p.parent == tmp_path and p.name != "beat.json"
    assert small(disk.contents(tmp_path)) == small(before)

  with pytest.raises(Stopped):
    data = _Data({3: second_run, 6: lambda: _stop(0.3)})
    train.train_and_evaluate(_config(), folder, data)
  assert checkpointer.find(folder).name == "4"
  time.sleep(0.4)

  # Two changes make another run; they are named together, and nothing is lost.
  changed = _config(optim__lr=0.1, objective__label_smoothing=0.1)
  before = disk.contents(tmp_path)
  with pytest.raises(ConfigError) as e:
    train.train_and_evaluate(
      changed, folder, _Data(), allow_change=("optim.rl",)
    )
  assert [f.split(" ")[0] for f in e.value.errors] == [
    *("--allow_change:", "config.objective.label_smoothing", "config.optim.lr")
  ]
  assert "Did you mean 'optim.lr'?" in e.value.errors[0]
  assert disk.contents(tmp_path) == before

  # One of them is taken, beside a harmless one.
  changed = _config(optim__lr=0.1, watchdog_seconds=500)
  with pytest.raises(Stopped):
    train.train_and_evaluate(
      changed, folder, _Data({7: _stop}), allow_change=("optim",)
    )
  err = capfd.readouterr().err
  assert "changed     config.watchdog_seconds was" in err
  assert "changed     config.optim.lr was 0.01, is now 0.1 (other upd" in err
  trail = resume_rules.read(folder)
  assert [(x["step"], x["key"], x["by"]) for x in trail] == [
    (4, "optim.lr", "--allow_change"),
    (4, "watchdog_seconds", "harmless"),
  ]
  assert checkpointer.load_metadata(folder)["changes"] == trail

  # The same command goes on, whatever became of the small files.
  rows = read_metrics(folder)
  odd = b'[1]\n\0\xff\n{"train/loss": 1}\n{"step": 9'
  with (tmp_path / "metrics.jsonl").open("ab") as f:
    f.write(odd)
  for name in ("config.json", "metadata.json", "process.json", "beat.json"):
    (tmp_path / name).write_bytes(b"\0" * 50)
  train.train_and_evaluate(changed, folder, _Data())
  err = capfd.readouterr().err
  numbers = ", ".join(str(len(rows) + n) for n in range(1, 5))
  assert f"metrics.jsonl: lines {numbers}: cut off or damaged; left" in err
  assert "config.json: got no JSON (" in err
  assert "the checkpoint's config is used" in err
  assert "changed  " not in err and resume_rules.read(folder) == trail
  rows = read_metrics(folder)
  assert [r["step"] for r in rows] == [1, 2, 4, 6, 8]
  assert "optim" in json.loads((tmp_path / "config.json").read_text())

  # Each second since the first start is in one bucket.
  last = rows[-1]
  seconds = accounting.seconds_of_rows(rows)
  total = last["time"] - began
  assert total - 1.0 < sum(seconds.values()) < total + 0.01
  assert seconds["restart"] >= 0.4 and seconds["repeated"] >= 0.3
  assert all(seconds[k] > 0 for k in ("start", "compile", "step", "save"))
  assert last["train/goodput"] == pytest.approx(
    seconds["step"] / sum(seconds.values()), abs=1e-3
  )
  # Logged a moment later than the last row: after the last save.
  percent = int(re.search(r"goodput +(\d+) % of ", err)[1])
  assert percent == pytest.approx(100 * last["train/goodput"], abs=2)


@pytest.mark.slow
def test_a_deleted_workdir_is_not_made_again(tmp_path):
  folder = tmp_path / "run"

  def delete():
    while not (folder / "checkpoints" / "2").is_dir():
      time.sleep(0.01)
    while folder.exists():  # a save may be going on
      shutil.rmtree(folder, ignore_errors=True)

  config = _config()
  with pytest.raises(run_lock.LostError, match="was deleted or moved"):
    data = _Data({4: delete, 7: _stop})
    train.train_and_evaluate(config, str(folder), data)
  assert not folder.exists()


@pytest.mark.nightly
def test_a_full_disk_is_reported_and_waited_for(tmp_path, monkeypatch, capfd):
  """TensorBoard cannot be written at all, metrics not for a while."""
  folder, append, replace = (
    str(tmp_path),
    atomic_files.append,
    atomic_files.replace_text,
  )
  (tmp_path / "tensorboard").write_text("a file, where a folder should be")

  def make_room():
    monkeypatch.setattr(atomic_files, "append", append)
    monkeypatch.setattr(atomic_files, "replace_text", replace)

  data = _Data({3: lambda: _fill(monkeypatch), 8: make_room})
  train.train_and_evaluate(_config(), folder, data)
  assert [r["step"] for r in read_metrics(folder)] == [1, 2, 4, 6, 8]
  err = capfd.readouterr().err
  assert err.count("tensorboard cannot be written (File exists)") == 1
  assert err.count("metrics.jsonl cannot be written (No space left on") == 1
  assert "metrics.jsonl: 3 records written again" in err
  assert "metadata.json: cannot be written (No space left on device)" in err
  metadata = json.loads((tmp_path / "metadata.json").read_text())
  assert metadata["step"] == 8


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_an_error(
  tmp_path, monkeypatch
):
  folder, elsewhere = tmp_path / "run", tmp_path / "tmp"
  elsewhere.mkdir()
  monkeypatch.setattr(
    atomic_files.tempfile, "gettempdir", lambda: str(elsewhere)
  )

  with pytest.raises(
    atomic_files.WriteError, match="its last 2 records are in"
  ):
    data = _Data({5: lambda: _fill(monkeypatch)})
    train.train_and_evaluate(_config(), str(folder), data)
  assert checkpointer.find(str(folder)).name == "8"
  (other,) = elsewhere.iterdir()
  assert other.name.endswith("metrics.jsonl")
  rows = [json.loads(x) for x in other.read_text().splitlines()]
  assert [r["step"] for r in rows] == [6, 8]
  whole = pathlib.Path(folder / "metrics.jsonl")
  assert [r["step"] for r in read_metrics(str(whole.parent))] == [1, 2, 4]
