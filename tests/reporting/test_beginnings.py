"""Linear probe and trials of a fine-tuning in the report."""

import dataclasses
import json

import pytest
from fake_runs import Page, write_rows

from vit_jax.finetune.results import ProbeOutcome, Trial, Trials
from vit_jax.tools.reporting.report import summarise, write_report
from vit_jax.tools.reporting.runs import find_runs

pytestmark = pytest.mark.usefixtures("undrawn")
TRIALS = Trials(
  steps=1200,
  trials=(
    Trial("pad and crop", 1200, 0.965, 0.09),
    Trial("no augmentation", 1200, 0.97, 0.147),
    Trial("pad and crop, learning rate 0.9", 1200),
  ),
  chosen="pad and crop",
)


@pytest.fixture
def run(tmp_path):
  folder = tmp_path / "mine"
  rows = [{"step": 0, "val/top1": 0.94}, {"step": 9, "val/top1": 0.92}]
  write_rows(folder, rows)
  write(
    folder, ProbeOutcome(0.935, 64.0, 0.92, 0.95, 0.25), "linear_probe.json"
  )
  write(folder, TRIALS, "trials.json")
  return folder


def write(folder, record, file):
  (folder / file).write_text(json.dumps(dataclasses.asdict(record)))


def test_the_probe_is_a_tile_the_first_score_and_in_the_summary(run):
  page = Page(write_report(str(run)).read_text())
  assert any("93.5%" in "".join(tile) for tile in page.tiles)
  scores = page.rows[page.rows.index(next(r for r in page.rows if r)) + 1]
  assert scores[:2] == ["linear probe, held-out images", "93.5%"]
  text = " ".join(page.text)
  mean = "the mean of fine-tuned model (25%) and linear probe (75%)"
  assert f"fine-tuned: 92.0%; saved: {mean}, 95.0%" in text
  summary = json.loads((run / "summary.json").read_text())
  assert summary["linear_probes"] == {
    "mine": {
      "top1": 0.935,
      "l2": 64.0,
      "fine_tuned": 0.92,
      "saved": 0.95,
      "weight": 0.25,
      "balanced": None,
      "fine_tuned_balanced": None,
      "saved_balanced": None,
      "saved_model": mean,
    }
  }


def test_the_balanced_accuracy_of_the_probe_is_in_its_column(run):
  probe = ProbeOutcome(0.9, 64.0, 0.92, balanced=0.357, fine_tuned_balanced=0.4)
  write(run, probe, "linear_probe.json")
  page = Page(write_report(str(run)).read_text())
  (row,) = (r for r in page.rows if r[:1] == ["linear probe, held-out images"])
  assert row[1:] == ["90.0%", "35.7%", "—", "—", "—"]


def test_every_trial_has_a_row(run):
  page = Page(write_report(str(run)).read_text())
  rows = {row[0]: row[1:] for row in page.rows}
  assert rows["pad and crop"] == ["1,200", "0.0900", "96.5%"]
  assert rows["no augmentation"] == ["1,200", "0.1470", "97.0%"]
  assert rows["pad and crop, learning rate 0.9"] == ["1,200", "diverged", "—"]
  assert "Chosen: pad and crop." in " ".join(page.text)


def test_what_goes_on_has_no_outcome_yet(run):
  write(run, ProbeOutcome(0.935, 64.0), "linear_probe.json")
  write(run, dataclasses.replace(TRIALS, chosen=None), "trials.json")
  text = " ".join(Page(write_report(str(run)).read_text()).text)
  assert "fine-tuning goes on" in text and "The trials go on." in text
  (probe,) = summarise(find_runs(str(run)))["linear_probes"].values()
  assert probe["fine_tuned"] is None and probe["saved_model"] is None
