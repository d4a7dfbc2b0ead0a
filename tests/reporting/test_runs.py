"""Facts of a run as the report shows them."""

import json
import pathlib

import pytest

from vit_jax.tools.reporting import curves, runs, tables
from vit_jax.tools.reporting.charts import ChartFiles


@pytest.mark.parametrize(
  "config, text",
  [
    (
      {"objective": {"kind": "masked_patch", "target": "small"}},
      "masked patch",
    ),
    ({"objective": {"kind": "classification", "loss": "sigmoid"}}, "sigmoid"),
  ],
)
def test_the_objective_is_named(config, text, tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  (run,) = runs.find_runs(tmp_path)
  assert text in tables.run_facts(run)["objective"]


def test_a_folder_of_weights_is_no_run(tmp_path):
  """vit-jax convert writes such ones, timm and Hugging Face too."""
  for name in ("run", "weights"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
  (tmp_path / "weights" / "model.safetensors").write_text("")
  assert [run.name for run in runs.find_runs(tmp_path)] == ["run"]


def run(split, rows=(), **evals):
  config = {
    "data": {"dataset": "digits", "split": split},
    "evals": {k: {"kind": "classification", **v} for k, v in evals.items()},
  }
  return runs.Run("r", pathlib.Path("r"), config, {}, list(rows))


@pytest.mark.parametrize(
  "metadata, options, name, fact, score",
  [
    ({"data_given": None}, {}, "digits", "digits [train]", "digits train"),
    ({}, {"fake_data": True}, *["digits, fake", "digits [train], fake"],
     "digits train, fake"),
    ({"data_given": "Squares"}, {}, *["Squares, given"] * 2, "digits train"),
  ],
)  # fmt: skip
def test_data_are_what_was_trained_on(metadata, options, name, fact, score):
  """Not what config.data says of a run on a loader, or on made-up images."""
  a_run = run("train", [{"step": 1, "head/top1": 0.5}], head={"split": "train"})
  a_run.metadata.update(metadata)
  a_run.config.update(options)
  assert list(curves.by_dataset([a_run])) == [name]
  assert tables.run_facts(a_run)["data"] == fact
  ((_, text, _),) = tables.headlines(a_run)
  assert text == f"head ({score}), top-1"
  assert a_run.is_training_part("head") == ("given" not in name)


def test_scores_of_other_kinds_are_told_apart(undrawn):
  names = {
    "head": {"split": "test"},
    "probe": {"kind": "linear", "split": "test"},
    "some": {"kind": "subset", "dataset": "imagenet2012", "split": "test"},
  }
  row = {"step": 1} | {f"{n}/top1": 0.5 for n in names}
  a_run = run("train", [row], **names)
  assert [text for _, text, _ in tables.headlines(a_run)] == [
    "head (digits test), top-1",
    "probe (digits test), linear probe, top-1",
    "some (imagenet2012 test), among the classes of imagenet_a, top-1",
  ]
  chart_files = ChartFiles()
  curves.section("x", [a_run, a_run], chart_files)
  assert len(chart_files.files) == 3  # a chart of each
  assert "<b>50.0%</b>" not in tables.scores([a_run])  # the best of one


def test_scores_are_all_of_one_step():
  rows = [
    {"step": 1, "head/top1": 0.8, "head/loss": 0.9},
    {"step": 2, "head/top1": 0.1},  # whose loss is not finite
    {"step": 3, "train/loss": 1.0},
  ]
  a_run = run("train", rows, head={"split": "test"})
  assert a_run.scores("head") == {"top1": 0.1}
  assert a_run.scores("other") == {}
  assert "0.9" not in tables.scores([a_run])


@pytest.mark.parametrize(
  "split, of_eval, is_training_part, is_held_out",
  [
    ("train[:90%]", "train[90%:]", True, True),
    ("train[:90%]", "train[:200]", True, False),
    ("train", "train[90%:]", True, False),
    ("train@2000", "train[99%:]", True, False),
    ("train800", "val200", True, True),
    ("train", "test", False, False),
  ],
)
def test_what_is_held_out(split, of_eval, is_training_part, is_held_out):
  a_run = run(split, head={"split": of_eval})
  assert a_run.is_training_part("head") == is_training_part
  assert a_run.is_held_out("head") == is_held_out


def test_a_held_out_part_is_no_headline_beside_a_test():
  splits = {"val": {"split": "train[90%:]"}, "test": {"split": "test"}}
  row = {"step": 1, "val/top1": 0.5}
  both = run("train[:90%]", [row | {"test/top1": 0.25}], **splits)
  headlines = lambda r: [text for _, text, _ in tables.headlines(r)]
  assert headlines(both) == ["test (digits test), top-1"]
  assert "digits train[90%:]" in tables.scores([both]).replace("<wbr>", "")
  alone = run("train[:90%]", [row], **splits)
  assert headlines(alone) == ["val (digits train[90%:]), top-1"]
