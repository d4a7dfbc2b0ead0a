"""The first lines of a run, and its metadata."""

import pytest
import tiny
from PIL import Image

from vit_jax import experiment, run_summary

DATA = tiny.Data()


def _text(config, **changes):
  parts = tiny.Parts(config)
  run = experiment.Experiment(config, "runs/x", data=DATA)
  for key, value in changes.items():
    setattr(run, key, value)
  return run_summary.text(run, parts.mesh, parts.shapes)


@pytest.mark.parametrize(
  "train, expected",
  [
    ("decode|random_resized_crop(16, 0.2, 1.0)|flip_lr", "decode|resize(16)"),
    ("decode(exif=False)|random_crop(8)", "decode(exif=False)|resize(8)"),
  ],
)
def test_nothing_is_scored_on_augmented_images(train, expected):
  config = tiny.config(data__ops=train, evals={})
  assert run_summary.eval_ops(config) == expected


def test_the_table_has_rates_where_they_differ():
  """Equal blocks share a row."""
  config = tiny.config(
    optim__layer_decay=0.5,
    optim__lr_scale=("head/*=10",),
    optim__freeze=("embedding/*",),
  )
  rows = [x.split("|") for x in _text(config).splitlines() if x[:1] == "|"]
  rates = {row[1].strip(): row[-2].strip() for row in rows}
  assert rates["embedding/kernel"] == "frozen"
  assert rates["cls"] == "0.125 (layer 0)"
  assert rates["head/kernel"] == "10 (layer 3)"
  block = "Transformer/encoderblock_*/LayerNorm_0/scale"
  assert rates[block] == "0.25 to 0.5 (layers 1 to 2)"


def test_folders_have_absolute_paths_in_the_metadata(tmp_path, monkeypatch):
  """So that a run is evaluated from any directory."""
  monkeypatch.chdir(tmp_path)

  def metadata(**changes):
    config = tiny.config(**changes)
    run = experiment.Experiment(config, "run", data=DATA)
    return run_summary.metadata(run, tiny.Parts(config).shapes)

  evals = {
    name: {"kind": "classification", "dataset": dataset, "split": "val"}
    for name, dataset in (("a", "folder:b/../x"), ("b", None))
  }
  written = metadata(data__dataset="folder:photos", evals=evals)
  # A loader is named; the options of the data keep their defaults.
  assert written["data_given"] == "Data"
  options = written["config"]
  assert options["data"]["dataset"] == f"folder:{tmp_path}/photos"
  assert options["evals"]["a"]["dataset"] == f"folder:{tmp_path}/x"
  assert options["evals"]["b"]["dataset"] is None
  options = metadata(data__dataset="folder:gs://b/photos")["config"]
  assert options["data"]["dataset"] == "folder:gs://b/photos"


def test_classes_that_are_rare_or_unseen(tmp_path):
  names = [f"n{i}" for i in range(11)]
  (line,) = run_summary.classes_lines([20, 0, *range(1, 10)], names)
  for words in ("20 images of 'n0'", "0 of 'n1'", "1 without"):
    assert words in line
  # By an evaluator.
  for name, count in (("cat", 20), ("dog", 1)):
    (tmp_path / name).mkdir()
    for i in range(count):
      Image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
  score = {"kind": "classification", "ops": "decode|resize(16)"}
  folder = {**score, "dataset": f"folder:{tmp_path}"}
  evals = {k: {**folder, "split": v} for k, v in (("v", "val"), ("a", "train"))}
  text = _text(tiny.config(evals=evals, optim__ema_decay=0.999))
  assert " v has no images of 1 of 2 classes: dog" in text
  assert "\naverage " in text and "\nclasses " not in text  # DATA is a loader
