"""A run that resumes notices that its images or labels are others."""

import os

import numpy as np
import pytest
import tiny
from importable import write_folder

from vit_jax import experiment, run_summary
from vit_jax.config import to_dict
from vit_jax.data import download_and_prepare
from vit_jax.step import TrainState
from vit_jax.writers import run_info

CONFIG = "config.json"


def begun(config, workdir):
  """The metadata of a run that began with the data as they are."""
  workdir.mkdir()
  run_info.write_json(str(workdir), CONFIG, to_dict(config))
  run = experiment.Experiment(config, str(workdir))
  return run_summary.metadata(run, TrainState(0, {}, None))


def errors(config, workdir, metadata, monkeypatch, allowed=()):
  """What a run says that resumes from step 1."""
  run = experiment.Experiment(config, str(workdir), allow_change=allowed)
  run.newest = 1, []
  resumed = property(lambda self: metadata)
  monkeypatch.setattr(experiment.Experiment, "saved", resumed)
  return run.resumed.errors(run.run_shape, run.data_info, run.head.class_names)


def of_records(tmp_path, monkeypatch):
  yield tiny.config(data__dataset=f"{__name__}:Records")
  monkeypatch.setattr(Records, "identity", lambda self: "others")


def of_folder(tmp_path, monkeypatch):
  yield tiny.config(data__dataset=write_folder(tmp_path / "in"))
  one, other = sorted((tmp_path / "in" / "train").glob("*/*.png"))[::5][:2]
  one.rename(other.parent / "x.png")
  other.rename(one.parent / "y.png")
  for folder in (one.parent, other.parent):
    os.utime(folder, (1, 1))


class Records:
  """Two images."""

  num_classes = 2

  def __init__(self, split):
    pass

  def __len__(self):
    return 2

  def identity(self):
    return "x"

  def __getitem__(self, index):
    return {"image": np.zeros((16, 16, 3), np.uint8), "label": index}


@pytest.mark.parametrize("changing", [of_records, of_folder])
def test_other_images_are_refused_unless_they_are_allowed(
  changing, tmp_path, monkeypatch
):
  workdir, change = tmp_path / "run", changing(tmp_path, monkeypatch)
  config = next(change)
  metadata = begun(config, workdir)
  assert errors(config, workdir, metadata, monkeypatch) == []
  next(change, None)
  (error,) = errors(config, workdir, metadata, monkeypatch)
  assert error.startswith("config.data.dataset: ")
  assert "--allow_change=data.dataset" in error
  names = ("data.dataset",)
  assert errors(config, workdir, metadata, monkeypatch, names) == []
  del metadata["data_identity"]  # of a run that is older than this check
  assert errors(config, workdir, metadata, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["array_record", "tfrecord"])
def test_files_of_tfds(tmp_path, monkeypatch, form):
  (tmp_path / "in").mkdir()
  source = write_folder(tmp_path / "in")

  def prepared(place):
    download_and_prepare.import_source(
      source, "own", str(tmp_path / place), file_format=form
    )
    return tiny.config(
      data__dataset="own", data__data_dir=str(tmp_path / place)
    )

  config, workdir = prepared("a"), tmp_path / "run"
  metadata = begun(config, workdir)
  elsewhere = prepared("b")
  assert errors(elsewhere, workdir, metadata, monkeypatch) == []
  path = next((tmp_path / "in" / "train").glob("*/*.png"))
  path.write_bytes(path.read_bytes() + b"another")
  (error,) = errors(prepared("c"), workdir, metadata, monkeypatch)
  assert error.startswith("config.data.dataset: ")
