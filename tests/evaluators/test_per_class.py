"""Counts of each class by hand, and calibration in closed form."""

import json

import handmade
import in_memory
import numpy as np
import pytest

from vit_jax.evaluators.per_class import PerClassConfig
from vit_jax.metrics import calibration_error, reliability


def test_calibration_in_closed_form():
  """One bin each: 0.5 right of 4 at 0.6, all of 2 at 0.9, none of 2 at 1."""
  confidence = np.array([0.6] * 4 + [0.9] * 2 + [1.0] * 2)
  right = np.array([1, 0, 1, 0, 1, 1, 0, 0], bool)
  want = (4 * 0.1 + 2 * 0.1 + 2 * 1.0) / 8
  assert calibration_error(confidence, right) == pytest.approx(want, rel=1e-12)
  # In one bin signs may cancel.
  one = calibration_error(confidence, right, num_bins=1)
  assert one == pytest.approx(abs(confidence.mean() - 0.5), rel=1e-12)


def test_a_bound_belongs_to_the_bin_below():
  bins = reliability(
    np.array([0.0, 0.2, 0.2001, 0.4, 1.0]), np.ones(5, bool), 5
  )
  assert bins["count"].tolist() == [2, 2, 0, 0, 1]
  assert np.isnan(bins["right"][2]) and bins["right"][0] == 1.0
  assert bins["confidence"][1] == pytest.approx(0.30005, rel=1e-12)


# Six images of three classes; logits of a softmax whose shares are in the rows.
SHARES = np.array(
  [
    [0.7, 0.2, 0.1],  # 0, right
    [0.2, 0.7, 0.1],  # 0 for 1
    [0.1, 0.8, 0.1],  # 0 for 1
    [0.1, 0.8, 0.1],  # 1, right
    [0.5, 0.3, 0.2],  # 2 for 0
    [0.2, 0.2, 0.6],  # no label
  ]
)
LABELS = [0, 0, 0, 1, 2, -1]


OPTIONS = PerClassConfig(name="c", split="test")


def _run(workdir=None, names=None, head_names=None, order=(0, 1, 2)):
  source = handmade.records(LABELS, 3, names=names)
  evaluator = in_memory.evaluator(
    OPTIONS, source, len(order), head_names, workdir=workdir
  )
  logits = np.full((6, len(order)), -30, np.float32)
  logits[:, list(order)[:3]] = np.log(SHARES)
  return evaluator.run({"logits": logits})


def test_metrics_by_hand():
  scores = _run()
  assert scores["c/count"] == 5 and scores["c/top1"] == pytest.approx(2 / 5)
  assert scores["c/balanced_accuracy"] == pytest.approx((1 / 3 + 1 + 0) / 3)
  assert scores["c/worst_class"] == 0.0 and scores["c/smallest_class"] == 1
  # Bins: 0.5 wrong; 0.7 right and wrong; 0.8 right and wrong.
  want = (0.5 + 2 * 0.2 + 2 * 0.3) / 5
  assert scores["c/ece"] == pytest.approx(want, rel=1e-6)
  loss = -np.log([0.7, 0.2, 0.1, 0.8, 0.2]).mean()
  assert scores["c/loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (4, 0, 2, 1, 3)])
def test_the_file(tmp_path, order):
  """Classes are columns of the head, by any order of these."""
  names = ("cat", "dog", "cow")
  head_names = [f"other {i}" for i in range(len(order))]
  for column, name in zip(order, names, strict=False):
    head_names[column] = name
  workdir = tmp_path / "run"
  _run(str(workdir), names, tuple(head_names), order)
  written = json.loads((workdir / "c_classes.json").read_text())
  assert written["dataset"] == "handmade" and written["split"] == "test"
  assert written["count"] == 5
  counts = {c["name"]: [*c.values()][2:] for c in written["classes"]}
  assert counts == {"cat": [3, 1, 2], "dog": [1, 1, 3], "cow": [1, 0, 0]}
  assert [c["class"] for c in written["classes"]] == sorted(order[:3])
  cat, dog, cow = order[:3]
  assert written["confusions"] == [[cat, dog, 2], [cow, cat, 1]]
  bins = written["bins"]
  assert len(bins) == 15 and sum(b["count"] for b in bins) == 5
  assert bins[0] == {"count": 0, "confidence": None, "right": None}
  assert bins[7]["count"] == 1 and bins[7]["right"] == 0.0  # 7/15 to 8/15


def test_the_size_of_the_smallest_class_is_a_score_if_it_is_small():
  """A class without images counts; from ten images on there is no score."""

  def fewest(labels):
    source = handmade.records(labels, 2)
    logits = np.zeros([len(labels), 2], np.float32)
    scores = in_memory.evaluator(OPTIONS, source, 2).run({"logits": logits})
    return scores.get("c/smallest_class")

  assert fewest([0] * 12) == 0 and fewest([0] * 12 + [1] * 9) == 9
  assert fewest([0] * 12 + [1] * 10) is None


def test_logits_that_are_nan_write_no_file(tmp_path):
  """NumPy takes them for class 0, whose images would all be right."""
  logits = np.log(SHARES).astype(np.float32)
  logits[1] = np.nan
  source, folder = handmade.records(LABELS, 3), str(tmp_path)
  evaluator = in_memory.evaluator(OPTIONS, source, 3, workdir=folder)
  scores = evaluator.run({"logits": logits})
  assert scores["c/top1"] == pytest.approx(2 / 5)
  assert np.isnan([scores["c/worst_class"], scores["c/ece"]]).all()
  assert not [*tmp_path.iterdir()]
  logits[5], logits[1] = np.nan, 0.0  # an image without a label
  scores = evaluator.run({"logits": logits})
  assert scores["c/worst_class"] == 0.0 and [*tmp_path.iterdir()]
