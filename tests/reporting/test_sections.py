"""Sections of some runs: classes, a probe and trials, predicted numbers."""

import dataclasses
import json

import numpy as np
import pytest
from fake_runs import Drawn, Page, write

from vit_jax.config import Config
from vit_jax.evaluators.per_class import PerClassConfig
from vit_jax.finetune.results import ProbeOutcome, Trial, Trials
from vit_jax.tools.reporting import per_class, regression, report, runs

pytestmark = pytest.mark.usefixtures("undrawn")
CLASSES = {
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


def test_classes(tmp_path):
  config = Config(evals=(PerClassConfig(name="all", split="train"),))
  folder = write(tmp_path / "a", [{"step": 2, "all/ece": 0.25}], config)
  file = folder / "all_classes.json"
  file.write_text(json.dumps(CLASSES))
  (run,) = runs.find_runs(folder)
  section = lambda: per_class.evaluators_section([run]).replace("<wbr>", "")
  rows = Page(section()).rows
  assert ["<cat>", "25.0%", "4", "2"] in rows
  assert ["<cat> → dog", "2", "50.0%"] in rows
  assert ["75.0%", "50.0%", "6"] in rows
  assert len(rows) == 3 + 3 + 2  # with three heads; a class, a bin have none
  assert "3 of 6 images" in section() and "25.0%" in section()
  file.write_text("{")
  assert f"Left out: {file.name} of a: " in section()
  file.unlink()
  assert f"{file.name} of a: not there" in section()


TRIALS = Trials(
  steps=1200,
  trials=(
    Trial("pad and crop", 1200, 0.965, 0.09),
    Trial("no augmentation", 1200, 0.97, 0.147),
    Trial("pad and crop, learning rate 0.9", 1200),
  ),
  chosen="pad and crop",
)
PROBE = ProbeOutcome(0.935, 64.0, 0.92, 0.95, 0.25, balanced=0.357)


def fine_tuned(folder, probe, trials):
  """Writes a run with a probe and trials; returns its page and summary."""
  rows = [{"step": 0, "val/top1": 0.94}, {"step": 9, "val/top1": 0.92}]
  write(folder, rows)
  for file, record in (("linear_probe", probe), ("trials", trials)):
    text = json.dumps(dataclasses.asdict(record))
    (folder / f"{file}.json").write_text(text)
  page = Page(report.write_report(str(folder)).read_text())
  return page, json.loads((folder / "summary.json").read_text())


def test_a_probe_and_trials_of_a_fine_tuning(tmp_path):
  page, summary = fine_tuned(tmp_path / "mine", PROBE, TRIALS)
  assert any("93.5%" in "".join(tile) for tile in page.tiles)
  rows = {row[0]: row[1:] for row in page.rows}
  probe = rows["linear probe, held-out images"]
  assert probe == ["93.5%", "35.7%", "—", "—", "—"]
  assert rows["pad and crop"] == ["1,200", "0.0900", "96.5%"]
  assert rows["pad and crop, learning rate 0.9"] == ["1,200", "diverged", "—"]
  mean = "the mean of fine-tuned model (25%) and linear probe (75%)"
  text = " ".join(page.text)
  assert f"fine-tuned: 92.0%; saved: {mean}, 95.0%" in text
  assert "Chosen: pad and crop." in text
  want = {"top1": 0.935, "l2": 64.0, "fine_tuned": 0.92, "saved": 0.95}
  want |= {"weight": 0.25, "balanced": 0.357, "saved_model": mean}
  assert want.items() <= summary["linear_probes"]["mine"].items()
  # While it goes on, there is no outcome.
  trials = dataclasses.replace(TRIALS, chosen=None)
  page, summary = fine_tuned(tmp_path / "on", ProbeOutcome(0.9, 64.0), trials)
  text = " ".join(page.text)
  assert "fine-tuning goes on" in text and "The trials go on." in text
  assert summary["linear_probes"]["on"]["saved_model"] is None


def test_numbers_have_charts_of_their_values_and_their_errors(tmp_path):
  kind = {"kind": "regression"}
  dataset = "csv:/data/labels.csv?numbers=area,x"
  config = {
    "data": {"dataset": dataset, "split": "train[:80%]"},
    "objective": kind,
    "evals": {"test": {**kind, "split": "val"}},
  }
  scores = {"mae": 5.0, "r2": -0.25, "area/mae": 9.0, "x/mae": 1.0}
  rows = [
    {"step": step, **{f"test/{k}": v / step for k, v in scores.items()}}
    for step in (1, 2)
  ]
  folder = write(tmp_path / "discs", rows, config)
  number = np.array([[10.0, 1.0], [20.0, 2.0], [30.0, 3.0]])
  np.savez(
    folder / "predictions.npz",
    number=number,
    output=number + 1,
    worst_image=np.zeros((2, 8, 8, 3), np.uint8),
    worst_number=number[:2],
    worst_output=number[:2] + 1,
    names=np.array(["area", "x"]),
    num_images=3,
    dataset=dataset,
    split="val",
  )
  text = report.write_report(str(folder)).read_text()
  page = Page(text)
  assert page.open == []
  for name in ("area", "x"):
    assert f"predicted against true {name}: discs" in page.charts
    assert f"error {name}: discs" in page.charts
  assert "area 11, x 2" in "".join(page.text)
  assert "accuracy of discs" not in text and "predictions.npz" not in text
  drawn = Drawn()
  regression.section(runs.find_runs(folder), drawn)
  points = drawn.axes["numbers_discs_x"].lines[1].get_xydata().tolist()
  assert points == [[1, 2], [2, 3], [3, 4]]
  # R2 is no share.
  assert page.tiles[0][0] == "-0.125" and "labels.csv val" in text
