"""Tables of searches: means, comparisons, splits that differ."""

import re

import pytest

from vit_jax.data.vtab import TASKS
from vit_jax.tools.sweep import table as table_lib

# Table 9 of arXiv:2010.11929, ViT-H/14 on JFT, in percent.
H14 = (
  95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9,
  83.3, 96.7, 91.4, 76.6,
  91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2,
)  # fmt: skip


def _point(value, top1, error=None):
  scores = {"val/top1": top1, "val/loss": 1 - top1}
  name = f"optim.lr={value}"
  return {
    "name": name,
    "values": {"optim.lr": value},
    "scores": scores,
    "step": 500,
    "error": error,
  }


def _result(top1, group=""):
  scores = {"test/top1": top1, "test/count": 1880.0}
  return {
    "group": group,
    "grid": {"optim.lr": ["0.01", "0.03"]},
    "points": [_point("0.01", 0.5), _point("0.03", 0.75)],
    "best": "optim.lr=0.03",
    "final": {"scores": scores, "step": 500, "error": None},
    "splits": {},
  }


def _vtab(scores=H14, left_out=()):
  tasks = {
    name: _result(score / 100, task.group)
    for (name, task), score in zip(TASKS.items(), scores, strict=True)
  }
  reasons = {
    name: {"group": tasks.pop(name)["group"], "reason": "not on disk"}
    for name in left_out
  }
  return {"tasks": tasks, "left_out": reasons}


def test_means_of_the_paper():
  means = table_lib.means(_vtab())
  rounded = {k: (round(100 * m, 1), n, of) for k, (m, n, of) in means.items()}
  assert rounded == {
    "natural": (86.7, 7, 7),
    "specialized": (87.0, 4, 4),
    "structured": (65.0, 8, 8),
    "all": (77.6, 19, 19),
  }
  # Not the mean of the three means, which is 79.6.
  assert means["all"][0] == pytest.approx(sum(H14) / 1900)
  # Of the tasks that have a score.
  results = _vtab(left_out=("eurosat", "resisc45", "dtd"))
  results["tasks"]["dmlab"]["final"]["error"] = "loss is nan"
  means = table_lib.means(results)
  assert means["specialized"] == (pytest.approx((0.833 + 0.766) / 2), 2, 4)
  assert means["structured"][1:] == (7, 8) and means["all"][1:] == (15, 19)
  assert "| mean of 15 of 19 " in table_lib.overview(results)


def _cells(text):
  """Returns the cells of the rows of a table."""
  rows = [line for line in text.splitlines() if line.startswith("|")]
  parts = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
  return [[cell.strip() for cell in cells] for cells in parts]


def test_rows_of_tasks_and_points():
  rows = {row[0]: row for row in _cells(table_lib.overview(_vtab()))}
  cells = ["dtd", "natural", "optim.lr=0.03", "75.00", "75.20", "1,880"]
  assert rows["dtd"] == cells
  # Operations stay in their cell.
  ops = "decode|resize(8)"
  point = {**_point("0.01", 0.5), "name": "p", "values": {"data.ops": ops}}
  result = {**_result(0.8), "fake_data": True}
  result |= {"grid": {"data.ops": [ops]}, "points": [point], "best": "p"}
  overview = table_lib.overview({"tasks": {"": result}, "left_out": {}})
  for text in (table_lib.task_text("", result), overview):
    assert any(r"decode\|resize(8)" in cell for cell in _cells(text)[2])
    assert len({*map(len, _cells(text))}) == 1
    assert "fake_data" in text


def test_against_another_search():
  def last_of(*results):
    """Task, or mean and group -> the last cell."""
    rows = _cells(table_lib.overview(*results))
    return {" ".join(row[:2]).strip(): row[-1] for row in rows}

  against = last_of(_vtab(), _vtab([s - 1 for s in H14], left_out=("svhn",)))
  assert against["dtd natural"] == "74.20" and against["svhn natural"] == ""
  # Means of other tasks are not set beside each other.
  means = {k: v for k, v in against.items() if k.startswith("mean of")}
  assert means.pop("mean of 8 structured") in ("64.02", "64.03")  # 64.025
  assert means.pop("mean of 4 specialized") == "86.00"
  assert {*means.values()} == {""}
  # Nor are those of other data without a word.
  results, other = _vtab(), _vtab()
  a, b = {"records": 800, "identity": "a"}, {"records": 800, "identity": "b"}
  results["tasks"]["dtd"]["splits"] = {"train": a, "val": a}
  other["tasks"]["dtd"]["splits"] = {"train": b, "val": a}
  text = table_lib.overview(results, other)
  assert "- dtd: `train` has other records" in text and "`val` has" not in text


def test_the_verdict():
  result = _result(0.8)
  text = table_lib.verdict(result)
  assert "optim.lr=0.03" in text and "80.00 % of 1,880 images" in text
  result["final"] = {"scores": {}, "step": 3, "error": "loss is nan at step 3"}
  assert "diverged: loss is nan at step 3" in table_lib.verdict(result)
  assert table_lib.final_top1(result) is None
  result["final"] = None
  assert "not finished" in table_lib.verdict(result)
  diverged = [_point("1", 0.1, "loss is nan")]
  nothing = {**result, "best": None, "points": diverged}
  assert table_lib.verdict(nothing) == "All points diverged."
  row = _cells(table_lib.task_text("", nothing))[2]
  assert row[:5] == ["1", "", "", "500", "diverged"]
