"""A run that is changed or damaged, or loses its folder or its disk."""

import json
import shutil
import time

import disk
import pytest
import tiny
from shared_runs import StopAfter, Stopped

from vit_jax import train
from vit_jax.callbacks import Callback, run_lock
from vit_jax.checkpointing import checkpointer, resume_rules
from vit_jax.config import ConfigError
from vit_jax.writers import atomic_files
from vit_jax.writers.metric_writer import read_metrics

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def two_devices():
  with tiny.devices(2):  # for which XLA compiles sooner than for eight
    yield


class _After(Callback):
  """Does something after a step, before anything of it is written."""

  def __init__(self, acts):
    self._acts = acts

  def on_step(self, step, batch, metrics):
    self._acts.get(step, lambda: None)()


def _config(**options):
  options = {"total_steps": 8, "checkpoint__every_steps": 2} | options
  return tiny.config(log_steps=2, **options)


@pytest.mark.nightly
def test_a_changed_run_is_refused_or_recorded(tmp_path, capfd):
  folder = str(tmp_path)

  def trained(config, *callbacks, allow_change=()):
    options = dict(callbacks=callbacks, allow_change=allow_change)
    train.train_and_evaluate(config, folder, tiny.Data(), **options)

  with pytest.raises(Stopped):
    trained(_config(), StopAfter(5))
  assert checkpointer.find(folder).name == "4"

  # Two changes make another run; they are named together, and nothing is lost.
  changed = _config(optim__lr=0.1, objective__label_smoothing=0.1)
  before = disk.contents(tmp_path)
  with pytest.raises(ConfigError) as e:
    trained(changed, allow_change=("optim.rl",))
  assert [f.split(" ")[0] for f in e.value.errors] == [
    *("--allow_change:", "config.objective.label_smoothing", "config.optim.lr")
  ]
  assert disk.contents(tmp_path) == before

  # One of them is taken, beside a harmless one.
  changed = _config(optim__lr=0.1, watchdog_seconds=500)
  with pytest.raises(Stopped):
    trained(changed, StopAfter(7), allow_change=("optim",))
  err = capfd.readouterr().err
  for key in ("optim.lr", "watchdog_seconds"):
    assert f"changed     config.{key} was" in err
  trail = resume_rules.read(folder)
  assert [(x["step"], x["key"], x["by"]) for x in trail] == [
    (4, "optim.lr", "--allow_change"),
    (4, "watchdog_seconds", "harmless"),
  ]
  assert checkpointer.load_metadata(folder)["changes"] == trail

  # The same command goes on, whatever became of the small files.
  with (tmp_path / "metrics.jsonl").open("ab") as f:
    f.write(b'[1]\n\0\xff\n{"train/loss": 1}\n{"step": 9')
  for name in ("config.json", "metadata.json", "process.json", "beat.json"):
    (tmp_path / name).write_bytes(b"\0" * 50)
  trained(changed)
  err = capfd.readouterr().err
  assert "cut off or damaged" in err
  assert "the checkpoint's config is used" in err
  assert "changed  " not in err and resume_rules.read(folder) == trail
  assert [r["step"] for r in read_metrics(folder)] == [1, 2, 4, 6, 8]
  assert "optim" in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.slow
def test_a_deleted_workdir_is_not_made_again(tmp_path):
  folder, config = tmp_path / "run", _config()

  def delete():
    while not (folder / "checkpoints" / "2").is_dir():
      time.sleep(0.01)
    while folder.exists():  # a save may be going on
      shutil.rmtree(folder, ignore_errors=True)

  with pytest.raises(run_lock.LostError, match="was deleted or moved"):
    train.train_and_evaluate(
      config, str(folder), tiny.Data(), callbacks=[_After({3: delete})]
    )
  assert not folder.exists()


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_an_error(
  tmp_path, monkeypatch
):
  folder, elsewhere, config = tmp_path / "run", tmp_path / "tmp", _config()
  elsewhere.mkdir()
  monkeypatch.setattr(
    atomic_files.tempfile, "gettempdir", lambda: str(elsewhere)
  )

  def fill():
    monkeypatch.setattr(atomic_files, "append", disk.full)
    monkeypatch.setattr(atomic_files, "replace_text", disk.full)

  with pytest.raises(atomic_files.WriteError, match="last 2 records"):
    train.train_and_evaluate(
      config, str(folder), tiny.Data(), callbacks=[_After({5: fill})]
    )
  assert checkpointer.find(str(folder)).name == "8"
  (other,) = elsewhere.iterdir()
  assert other.name.endswith("metrics.jsonl")
  rows = [json.loads(x) for x in other.read_text().splitlines()]
  assert [r["step"] for r in rows] == [6, 8]
  assert [r["step"] for r in read_metrics(str(folder))] == [1, 2, 4]
