"""Where the time of a run went, and what was changed on its way."""

import dataclasses
import pathlib
import re

import pytest

from vit_jax.callbacks.accounting import BUCKETS
from vit_jax.tools.reporting import curves, tables
from vit_jax.tools.reporting.runs import Run

SECONDS = dict(step=60.0, input=0.4, evaluation=9.6, save=5.0, start=10.0)
SECONDS |= dict(compile=5.0, repeated=0.0, restart=10.0)


def _run(name, seconds, metadata=None):
  rows = [{"step": 1, "train/seconds/step": 1.0}]
  values = {f"train/seconds/{k}": v for k, v in seconds.items()}
  rows += [{"step": 2, **values}, {"step": 2, "val/top1": 0.5}]
  return Run(name, pathlib.Path(name), {}, metadata or {}, rows)


def test_a_bar_is_whole_and_its_numbers_are_named():
  assert SECONDS.keys() == set(BUCKETS) == curves.TIME_NAMES.keys()
  text = curves.time_section([_run("a", SECONDS)])
  widths = [float(x) for x in re.findall(r"width: ([\d.]+)%", text)]
  assert sum(widths) == 100.0 - 0.4 + 0.4 and len(widths) == 7
  assert "steps <b>1m00s</b> 60.0%" in text
  assert "waiting for images <b>0.4s</b> 0.4%" in text
  assert "steps done again" not in text  # there were none
  assert 'aria-label="60 % of 1m40s in steps"' in text and "<h3>" not in text


def test_runs_without_an_account_are_named():
  none, half = _run("b", {}), {**SECONDS}
  half.pop("save")
  assert curves.time_section([none]) == ""
  text = curves.time_section([_run("a", SECONDS), none, _run("c", half)])
  assert "Left out: times of b, c: no rows of training." in text
  assert "<h3>a</h3>" in text
  nothing = dict.fromkeys(SECONDS, 0.0)
  assert "0 % of 0.0s" in curves.time_section([_run("a", nothing)])


def test_the_last_account_counts():
  """That of its end, in metadata.json, or a line after its last checkpoint."""
  run = _run("a", SECONDS)
  run.rows[-1]["train/device_hours"] = 2.0
  for step, hours in ((70.0, 2.5), (50.0, 1.5)):
    account = {"began": 1.0, "seconds": SECONDS | {"step": step}}
    account["device_hours"] = hours
    run = dataclasses.replace(run, metadata={"accounting": account})
    assert run.wall_seconds() == 40.0 + max(step, SECONDS["step"])
    assert tables.costs(run)["device-hours"] == max(hours, 2.0)
  run = dataclasses.replace(run, metadata={"accounting": {"began": "damaged"}})
  assert run.seconds == SECONDS and run.device_hours == 2.0


def test_changes_are_one_fact():
  change = {"step": 1008, "key": "optim.lr", "from": 0.1, "to": None, "by": "x"}
  facts = tables.run_facts(_run("a", {}, {"changes": [change] * 7}))
  text = facts["changed on the way"]
  assert text.startswith("step 1,008: optim.lr 0.1 to None; step 1,008: ")
  assert text.endswith("; and 2 more")
  assert "changed on the way" not in tables.run_facts(
    _run("a", {}, {"changes": []})
  )


@pytest.mark.parametrize(
  "evals, chance",
  [
    ({"val": {}}, 0.1),
    ({"val": {}, "few": {"kind": "fewshot"}}, 0.1),
    ({"val": {}, "few": {"kind": "fewshot", "dataset": "cifar100"}}, None),
    ({"val": {}, "some": {"kind": "subset"}}, None),
    ({"val": {"dataset": "cifar100"}}, None),
  ],
)
def test_chance_is_that_of_all_curves(evals, chance):
  """The files of a run state the classes only of the training data."""
  evals = {k: {"kind": "classification", **v} for k, v in evals.items()}
  metric = {"fewshot": "10shot"}
  names = [f"{k}/{metric.get(v['kind'], 'top1')}" for k, v in evals.items()]
  config = {"data": {"dataset": "cifar10"}, "evals": evals}
  rows = [{"step": 1, **dict.fromkeys(names, 0.5)}]
  run = Run("a", pathlib.Path("a"), config, {"num_classes": 10}, rows)
  (plot,) = curves._accuracies([run])
  assert plot.draw.keywords == {"chance": chance}


def test_the_length_of_a_run_of_epochs_is_in_its_metadata():
  run = _run("a", {}, {"total_steps": 1500})
  assert tables.run_facts(run)["steps"] == "2 of 1,500"
