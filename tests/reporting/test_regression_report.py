"""The report of a run that predicts numbers."""

import json

import numpy as np
import pytest
from fake_runs import Page, write_rows

from vit_jax.tools.reporting import report

DATASET = "csv:/data/labels.csv?numbers=area,x"


@pytest.fixture
def text(tmp_path, undrawn):
  folder = tmp_path / "discs"
  folder.mkdir()
  kind = {"kind": "regression"}
  config = {
    "data": {"dataset": DATASET, "split": "train[:80%]"},
    "objective": kind,
    "evals": {
      "test": {**kind, "split": "val"},
      "val": {**kind, "split": "train[80%:]"},
    },
  }
  (folder / "config.json").write_text(json.dumps(config))
  scores = {"mae": 5.0, "r2": -0.25, "area/mae": 9.0, "x/mae": 1.0}
  rows = [
    {"step": step, "time": 1.0 * step}
    | {f"{name}/{k}": v / step for k, v in scores.items()}
    for step in (1, 2)
    for name in ("val", "test")[: step + 1]
  ]
  write_rows(folder, rows)
  number = np.array([[10.0, 1.0], [20.0, 2.0], [30.0, 3.0]])
  np.savez(
    folder / "predictions.npz",
    number=number,
    output=number + 1,
    worst_image=np.zeros((2, 8, 8, 3), np.uint8),
    worst_number=number[:2],
    worst_output=number[:2] + 1,
    names=np.array(["area", "x"]),
    num_images=np.array(3),
    dataset=np.array(DATASET),
    split=np.array("val"),
  )
  return report.write_report(str(folder)).read_text()


def test_each_number_has_charts_of_its_values_and_its_error(text):
  page = Page(text)
  assert page.open == []
  for name in ("area", "x"):
    assert f"predicted against true {name}: discs" in text
    assert f'error {name}: discs"' in text
  assert "area 11, x 2" in "".join(page.text)
  assert "accuracy of discs" not in text and "predictions.npz" not in text
  # R2 is no share.
  assert "-0.125" in text and "-12.5" not in text and "labels.csv val" in text
