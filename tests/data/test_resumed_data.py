"""A run that resumes notices that its images or labels are others."""

import os

import pytest
import tiny
from importable import write_folder

from vit_jax import experiment, run_summary
from vit_jax.config import to_dict
from vit_jax.data import download_and_prepare, sources
from vit_jax.step import TrainState
from vit_jax.writers import run_info


def errors(config, workdir, metadata, monkeypatch, allowed=()):
  """What a run says that resumes from step 1."""
  run = experiment.Experiment(config, str(workdir), allow_change=allowed)
  run.newest = 1, []
  resumed = property(lambda self: metadata)
  monkeypatch.setattr(experiment.Experiment, "saved", resumed)
  return run.resumed.errors(run.run_shape, run.data_info, run.head.class_names)


def test_other_images_are_refused_unless_they_are_allowed(
  tmp_path, monkeypatch
):
  """Two images that change their places; records are in test_records.py."""
  folder, workdir = tmp_path / "in", tmp_path / "run"
  config = tiny.config(data__dataset=write_folder(folder))
  workdir.mkdir()
  run_info.write_json(str(workdir), "config.json", to_dict(config))
  run = experiment.Experiment(config, str(workdir))
  metadata = run_summary.metadata(run, TrainState(0, {}, None))
  assert errors(config, workdir, metadata, monkeypatch) == []
  one, other = sorted((folder / "train").glob("*/*.png"))[::5][:2]
  one.rename(other.parent / "x.png")
  other.rename(one.parent / "y.png")
  for changed in (one.parent, other.parent):
    os.utime(changed, (1, 1))
  (error,) = errors(config, workdir, metadata, monkeypatch)
  assert error.startswith("config.data.dataset: ")
  assert "--allow_change=data.dataset" in error
  names = ("data.dataset",)
  assert errors(config, workdir, metadata, monkeypatch, names) == []
  del metadata["data_identity"]  # of a run that is older than this check
  assert errors(config, workdir, metadata, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["array_record", "tfrecord"])
def test_files_of_tfds_have_an_identity(tmp_path, form):
  source = write_folder(tmp_path / "in")

  def identity(place):
    out = str(tmp_path / place)
    download_and_prepare.import_source(source, "own", out, file_format=form)
    return sources.open_source("own", "train", out).identity()

  first = identity("a")
  assert identity("b") == first
  path = next((tmp_path / "in" / "train").glob("*/*.png"))
  path.write_bytes(path.read_bytes() + b"another")
  assert identity("c") != first
