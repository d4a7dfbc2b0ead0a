"""The report on classes, and on evaluators with scores of their own."""

import json
import re

import pytest

from vit_jax.config import ClassificationConfig, Config, to_dict
from vit_jax.evaluators.knn import KnnConfig
from vit_jax.evaluators.per_class import PerClassConfig
from vit_jax.tools.reporting import per_class, runs, tables

CONTENT = {
  "dataset": "digits",
  "split": "test",
  "count": 6,
  "classes": [
    {"class": 3, "name": "<cat>", "count": 4, "right": 1, "predicted": 2},
    {"class": 7, "name": "dog", "count": 2, "right": 2, "predicted": 4},
    {"class": 9, "name": "cow", "count": 0, "right": 0, "predicted": 1},
  ],
  "confusions": [[3, 7, 2], [3, 9, 1]],
  "bins": [
    {"count": 0, "confidence": None, "right": None},
    {"count": 6, "confidence": 0.75, "right": 0.5},
  ],
}


@pytest.fixture
def run(tmp_path):
  evals = (
    ClassificationConfig(name="test", dataset="digits", split="test"),
    PerClassConfig(name="all", dataset="digits", split="train"),
    KnnConfig(name="near", dataset="glyphs", split="test"),
  )
  (tmp_path / "config.json").write_text(
    json.dumps(to_dict(Config(evals=evals)))
  )
  row = {
    "step": 2,
    "test/top1": 0.9,
    "test/count": 6.0,
    "all/top1": 0.5,
    "all/balanced_accuracy": 0.625,
    "all/ece": 0.25,
    "near/20nn": 0.875,
  }
  (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
  (tmp_path / "metadata.json").write_text("{}")
  (tmp_path / "all_classes.json").write_text(json.dumps(CONTENT))
  return runs.find_runs(str(tmp_path))[0]


def _texts(page):
  """The cells of the tables, row by row."""
  rows = re.findall("<tr>(.*?)</tr>", page.replace("<wbr>", ""))
  return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


def test_the_worst_and_the_confused(run):
  page = per_class.evaluators_section([run])
  rows = _texts(page)
  assert ["&lt;cat&gt;", "25.0%", "4", "2"] in rows
  assert ["&lt;cat&gt; → dog", "2", "50.0%"] in rows
  assert ["75.0%", "50.0%", "6"] in rows
  assert len(rows) == 3 + 3 + 2  # with three heads; a class, a bin have none
  assert "3 of 6 images are named wrongly, in 2 different ways" in page
  assert "mean of their accuracies 62.5%" in page and "error 25.0%" in page


def test_what_is_not_there_is_named(run):
  (run.path / "all_classes.json").write_text("{")
  page = per_class.evaluators_section([run]).replace("<wbr>", "")
  assert f"Left out: all_classes.json of {run.name}: " in page
  (run.path / "all_classes.json").unlink()
  assert ": not there" in per_class.evaluators_section([run])
  del run.evals["all"]
  assert per_class.evaluators_section([run]) == ""


def test_scores_of_other_evaluators(run):
  assert _texts(tables.other_scores([run]))[1:] == [
    ["all (digits train)", "per_class", "ece 0.25"],
    ["near (glyphs test)", "knn", "20nn 0.875"],
  ]
  del run.evals["near"], run.evals["all"]
  assert tables.other_scores([run]) == ""
