"""What a run cost, and means over data sets, on the page of the report."""

import json
import re

import pytest
from fake_runs import write_rows

from vit_jax.commands import report as report_command
from vit_jax.config import (
  ClassificationConfig,
  Config,
  FewshotConfig,
  to_dict,
)
from vit_jax.tools.reporting import runs, tables

pytestmark = pytest.mark.usefixtures("undrawn")
COST = {"images_seen": 1_281_167, "exaflops": 0.135, "device_hours": 2.5}


def _write(folder):
  folder.mkdir()
  few = [
    FewshotConfig(name=f"few_{d}", dataset=d, group="few", l2=(64.0,))
    for d in ("dtd", "cars196", "caltech101")
  ]
  config = Config(evals=(ClassificationConfig(), *few))
  (folder / "config.json").write_text(json.dumps(to_dict(config)))
  before = {"images_seen": 7e9, "exaflops": 4262.0, "device_hours": None}
  metadata = {"accounting": {**COST, "init": before}}
  (folder / "metadata.json").write_text(json.dumps(metadata))
  rows = [
    {
      "step": step,
      "time": 10.0 * step,
      "train/loss": 1.0,
      **{f"train/{k}": v * step / 2 for k, v in COST.items()},
      "val/top1": 0.5,
      "few_dtd/1shot": 0.25,
      "few_dtd/10shot": 0.5,
      "few_cars196/1shot": 0.0,
      "few_cars196/10shot": 0.25,
      "few/1shot": 0.125,
      "few/10shot": 0.375,
      "few/sets": 2.0,
    }
    for step in (1, 2)
  ]
  write_rows(folder, rows)


def test_means_stand_for_their_data_sets(tmp_path):
  _write(tmp_path / "run")
  (run,) = runs.find_runs(tmp_path / "run")
  assert run.groups == {"few": ["few_dtd", "few_cars196"]}  # as were scored
  assert run.fewshot_names() == ["few"]
  assert run.fewshot("few") == {"64": {"1": 0.125, "10": 0.375}}
  assert tables.headlines(run)[1:] == [
    (0.375, "few (mean of 2 data sets), 10-shot, L2 64", "")
  ]
  report_command.main([str(tmp_path / "run")])
  text = (tmp_path / "run" / "report.html").read_text()
  text = re.sub("<wbr>", "", text)
  assert text.count("Few-shot accuracy, L2 64") == 1
  sets = text[text.index("<th>data set</th>") :]
  assert "<th>few_dtd (dtd test)</th><td>25.0%</td><td>50.0%</td>" in sets
  assert (
    "<th>few_cars196 (cars196 test)</th><td>0.0%</td><td>25.0%</td>" in sets
  )


def test_costs_are_facts_of_a_run(tmp_path):
  _write(tmp_path / "run")
  (run,) = runs.find_runs(tmp_path / "run")
  costs = tables.cost_texts(run)
  assert costs["images seen"] == "1,281,167"
  assert costs["exaFLOPs"] == "0.135" and costs["device-hours"] == "2.5"
  before = tables.run_facts(run)["the run before"]
  for text in ("7,000,000,000", "4,262", "device-hours unknown"):
    assert text in before
