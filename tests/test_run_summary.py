"""The first lines of a run: average of the parameters, images of a class."""

import doctest

import jax
import jax.numpy as jnp
import pytest
import tiny
from PIL import Image

from vit_jax import experiment, run_summary
from vit_jax.families import model_config

DATA = tiny.Data()


def _text(config, **changes):
  parts = tiny.Parts(config)
  run = experiment.Experiment(config, "runs/x", data=DATA)
  for key, value in changes.items():
    setattr(run, key, value)
  return run_summary.text(run, parts.mesh, parts.shapes)


@pytest.mark.parametrize(
  "decay, total_steps, line",
  [
    (
      0.9999,
      500,
      "average     of the parameters of about the last 57 steps;"
      " config.optim.ema_decay=0.9999 is for runs of 89,990 steps or more, and"
      " rises to 0.9823 in this one",
    ),
    (
      0.999,
      10_000,
      "average     of the parameters of about the last 1,000 steps",
    ),
  ],
)
def test_average_is_printed(decay, total_steps, line):
  text = _text(tiny.config(optim__ema_decay=decay, total_steps=total_steps))
  assert line in text.splitlines()


def test_no_average_no_line():
  assert "average" not in _text(tiny.config())


def test_the_table_has_rates_where_they_differ():
  rows = lambda **options: {
    cells[1].strip(): cells[-2].strip()
    for line in _text(tiny.config(**options)).splitlines()
    if line.startswith("|") and (cells := line.split("|"))
  }
  assert rows()["Name"] == "Size"
  got = rows(
    optim__layer_decay=0.5,
    optim__lr_scale=("head/*=10",),
    optim__freeze=("embedding/*",),
  )
  assert got["Name"] == "Rate"
  assert got["embedding/kernel"] == "frozen"
  assert got["cls"] == "0.125 (layer 0)"
  block = "Transformer/encoderblock_*/"
  assert got[block + "LayerNorm_0/scale"] == "0.25 to 0.5 (layers 1 to 2)"
  assert got["head/kernel"] == "10 (layer 3)"
  scanned = rows(optim__layer_decay=0.5, model__scan=True)
  name = "Transformer/encoderblock/LayerNorm_0/scale"
  assert scanned[name] == "0.25 to 0.5 (layers 1 to 2)"


def test_images_of_each_class():
  assert doctest.testmod(run_summary).failed == 0
  lines = run_summary.classes_lines
  assert "\nclasses" not in _text(tiny.config())  # of a loader that was passed
  names = [f"n{i}" for i in range(11)]
  assert lines([20, 0, *range(1, 10)], names) == [
    "classes     20 images of 'n0' to 0 of 'n1'; 1 without any image"
  ]
  assert lines([20, *range(4, 14)], None) == [
    "classes     20 images of '0' to 4 of '1': the largest has 5.0 times the"
    " smallest"
  ]


def test_a_loader_is_named_in_the_metadata(tmp_path):
  """The options of the data, which it replaces, keep their defaults."""
  config = tiny.config()
  run = experiment.Experiment(config, str(tmp_path), data=DATA)
  metadata = run_summary.metadata(run, tiny.Parts(config).shapes)
  assert metadata["data_given"] == "Data"


def test_folders_have_absolute_paths_in_the_metadata(tmp_path, monkeypatch):
  """So that a run is evaluated from any directory."""
  monkeypatch.chdir(tmp_path)
  evals = {
    name: {"kind": "classification", "dataset": dataset, "split": "val"}
    for name, dataset in (("a", "folder:b/../x"), ("b", None))
  }
  config = tiny.config(data__dataset="folder:photos", evals=evals)
  run = experiment.Experiment(config, "run", data=DATA)
  options = run_summary.metadata(run, tiny.Parts(config).shapes)["config"]
  assert options["data"]["dataset"] == f"folder:{tmp_path}/photos"
  assert options["evals"]["a"]["dataset"] == f"folder:{tmp_path}/x"
  assert options["evals"]["b"]["dataset"] is None
  away = tiny.config(data__dataset="folder:gs://b/photos")
  run = experiment.Experiment(away, "run", data=DATA)
  options = run_summary.metadata(run, tiny.Parts(away).shapes)["config"]
  assert options["data"]["dataset"] == "folder:gs://b/photos"


def test_a_note_on_the_data_is_shown():
  text = _text(tiny.config(), data_note="in order")
  assert "note        in order" in text.splitlines()


def test_classes_that_an_evaluator_does_not_see(tmp_path):
  for name, count in (("cat", 20), ("dog", 1)):
    (tmp_path / name).mkdir()
    for i in range(count):
      Image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
  score = {"kind": "classification", "ops": "decode|resize(16)"}
  folder = {**score, "dataset": f"folder:{tmp_path}"}
  evals = {
    "val": {**folder, "split": "val"},
    "all": {**folder, "split": "train"},
  }
  text = _text(tiny.config(evals=evals))
  assert text.count("has no images of") == 1
  assert (
    "note        val has no images of 1 of 2 classes: dog. Its scores say"
    " nothing about them.\n" in text
  )


def test_a_fake_folder_has_no_line_on_its_classes(tmp_path):
  """The first command of docs/tasks/pretrain.md: --fake_data on a folder."""
  folder = f"folder:{tmp_path}/none"
  score = {"kind": "classification", "dataset": folder, "split": "val"}
  text = _text(tiny.config(fake_data=True, evals={"val": score}))
  assert "has no images of" not in text


def test_equal_blocks_share_a_row_of_the_table():
  blocks = "Transformer/encoderblock_*/"
  kernel = jax.ShapeDtypeStruct((2, 3), jnp.float32)
  block = {"kernel": kernel, "bias": jax.ShapeDtypeStruct((3,), jnp.float32)}
  params = {"Transformer": {f"encoderblock_{i}": block for i in range(12)}}
  params["cls"] = jax.ShapeDtypeStruct((1, 1, 3), jnp.float32)
  rows = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in run_summary.parameter_table(params, model_config()).splitlines()
    if line.startswith("|")
  ]
  assert rows == [
    ["Name", "Shape", "Dtype", "Blocks", "Size"],
    [blocks + "bias", "(3,)", "float32", "12", "36"],
    [blocks + "kernel", "(2, 3)", "float32", "12", "72"],
    ["cls", "(1, 1, 3)", "float32", "1", "3"],
  ]
