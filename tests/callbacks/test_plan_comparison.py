"""What was planned beside what was measured: closed forms, and a tiny run."""

import doctest
import json

import numpy as np
import pytest
import tiny

from vit_jax import train
from vit_jax.callbacks import plan_comparison
from vit_jax.commands import report
from vit_jax.config import to_dict
from vit_jax.reporting import comparison, facts, runs

# 100 steps of 36 s on 8 cores, 4 chips of v3: 4 chip-hours.
PLAN = {
  "topology": "v3:2x2",
  "chips": 4,
  "price_seconds": 36.0,
  "images_per_second": 0.5,
  "mfu": 0.5,
  "peak_bytes": 2**30,
  "steps": 100,
  "price": 8.0,
  "price_per_chip_hour": 2.0,
  "price_unit": "USD",
}


def _row(step, **values):
  return {"step": step} | {f"train/{k}": v for k, v in values.items()}


GIB2 = 2.0**31
ROWS = [
  _row(1, device_hours=0.1),
  _row(20, images_per_second=0.1, mfu=0.1, peak_bytes=5e8, device_hours=1.0),
  _row(40, images_per_second=0.4, mfu=0.4, peak_bytes=GIB2, device_hours=5.0),
  _row(50, images_per_second=0.25, mfu=0.25, device_hours=8.0),
]


def test_examples():
  assert doctest.testmod(plan_comparison).failed == 0


def test_medians_and_last_sums():
  assert plan_comparison.measured(ROWS, 18) == {
    "images_per_second": 0.25,
    "step_seconds": 72.0,
    "mfu": 0.25,
    "peak_bytes": GIB2,
    "device_hours": 8.0,
    "steps": 50,
  }
  assert plan_comparison.measured([], 18) == {}


def test_promises_beside_measurements():
  """Half of the steps: 2 chip-hours were promised; 8 core-hours are 4."""
  kept = plan_comparison.compare(PLAN, plan_comparison.measured(ROWS, 18), 50)
  assert [(x.what, x.promised, x.measured, x.ratio) for x in kept] == [
    ("a step", 36.0, 72.0, 2.0),
    ("images/s", 0.5, 0.25, 0.5),
    ("a core", 2**30, 2**31, 2.0),
    ("MFU", 0.5, 0.25, 0.5),
    ("chip-hours for 50 steps", 2.0, 4.0, 2.0),
  ]
  too_big = dict.fromkeys(PLAN) | {"topology": "v5e:2x2", "chips": 4}
  for x in plan_comparison.compare(too_big, {}, None):
    assert (x.promised, x.measured, x.ratio) == (None, None, None)


def test_only_options_of_the_step_differ():
  config = tiny.config(optim__lr=0.1)
  planned = plan_comparison.contents(tiny.config(log_steps=7, seed=1), PLAN)[
    "config"
  ]
  assert plan_comparison.differences(planned, config) == [
    "config.optim.lr was 0.01, is now 0.1"
  ]
  assert plan_comparison.differences(planned, tiny.config()) == []


class _Noise:
  """Training data in memory."""

  num_examples, num_classes, class_names = 160, tiny.NUM_CLASSES, None

  def batches(self, start_step, process_index, process_count):
    step = start_step
    while True:
      batch = tiny.batch(step, tiny.config())
      yield batch | {"index": np.arange(16, dtype=np.int64)}
      step += 1


def _planned(tmp_path, **changes):
  planned = plan_comparison.contents(tiny.config(**changes), PLAN)
  (tmp_path / plan_comparison.FILE).write_text(json.dumps(planned))
  return planned


def test_the_start_says_what_was_planned(tmp_path):
  _planned(tmp_path, optim__lr=0.5, total_steps=100)
  lines = plan_comparison.lines(str(tmp_path), tiny.config(total_steps=100), 4)
  assert lines == [
    "plan        for v3:2x2: 36,000.0 ms a step, 0.5 images/s, 1.00 GiB a core,"
    " 50.0 % MFU, 4 chip-hours for 100 steps, 8 USD; estimates",
    "            not as planned: config.optim.lr was 0.5, is now 0.01",
    "            not as planned: it is for 4 chips, the run has 4 devices",
  ]
  same = tiny.config(optim__lr=0.5, total_steps=100)
  assert (
    len(plan_comparison.lines(str(tmp_path), same, 8)) == 1
  )  # halves of 4 chips


def test_the_end_records_what_was_measured(tmp_path):
  planned = _planned(tmp_path)
  text = "".join(json.dumps(row | {"time": 1.0}) + "\n" for row in ROWS)
  (tmp_path / "metrics.jsonl").write_text(text)
  assert plan_comparison.kept(str(tmp_path), 18) == (
    "plan        of v3:2x2; measured: 72,000.0 ms a step (2 x the plan), 0.25"
    " images/s (0.5 x the plan), 2.00 GiB a core (2 x the plan), 25.0 % MFU"
    " (0.5 x the plan), 4 chip-hours for 50 steps (2 x the plan)"
  )
  written = json.loads((tmp_path / plan_comparison.FILE).read_text())
  assert written == planned | {"measured": plan_comparison.measured(ROWS, 18)}


def test_the_report_shows_both(tmp_path):
  _planned(tmp_path)
  config = tiny.config(data__batch_size=18)
  (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
  text = "".join(json.dumps(row | {"time": 1.0}) + "\n" for row in ROWS)
  (tmp_path / "metrics.jsonl").write_text(text)
  (run,) = runs.find_runs(tmp_path)
  assert "price, USD" not in facts.costs(run)  # nothing says it was on a TPU
  metadata = json.dumps({"devices": "8 x TPU v3"})
  (tmp_path / "metadata.json").write_text(metadata)
  (run,) = runs.find_runs(tmp_path)
  assert facts.costs(run)["price, USD"] == 8.0  # 4 chip-hours
  text = report.write_report(str(tmp_path)).read_text()
  assert "Promised and measured" in text
  cells = "<td>36,000.0 ms</td><td>72,000.0 ms</td><td>2</td>"
  assert f"<th>time of a step</th>{cells}" in text
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["promises"][run.name]["MFU"] == {
    "promised": 0.5,
    "measured": 0.25,
  }


@pytest.mark.slow
def test_a_run_records_both(tmp_path, capsys):
  _planned(tmp_path, total_steps=4, log_steps=2)
  config = tiny.config(total_steps=4, log_steps=2)
  train.train_and_evaluate(config, str(tmp_path), _Noise())
  said = capsys.readouterr().err
  assert "plan        for v3:2x2: 36,000.0 ms a step, 0.5 images/s" in said
  assert "plan        of v3:2x2; measured:" in said
  measured = json.loads((tmp_path / plan_comparison.FILE).read_text())[
    "measured"
  ]
  assert measured["step_seconds"] * measured["images_per_second"] == (
    pytest.approx(16)
  )
  (run,) = runs.find_runs(tmp_path)
  assert run.process["how"] == "finished" and run.total_steps == 4
  step = comparison.kept(run)[0]
  assert (step.promised, step.measured) == (36.0, measured["step_seconds"])


def test_without_a_plan_nothing_is_said(tmp_path):
  assert plan_comparison.lines(str(tmp_path), tiny.config(), 1) == []
  assert plan_comparison.kept(str(tmp_path), 16) is None


@pytest.mark.parametrize(
  "text",
  [
    *("{", "[]", "{}", '{"plan": {}}', "null"),
    '{"plan": {"topology": "v5e:2x2"}, "config": {"data": {}}}',
  ],
)
def test_a_file_that_is_no_plan(tmp_path, text):
  (tmp_path / plan_comparison.FILE).write_text(text)
  (line,) = plan_comparison.lines(str(tmp_path), tiny.config(), 1)
  assert line.startswith("plan        not read: ") and "Plan again" in line
  assert plan_comparison.kept(str(tmp_path), 16) is None
  (tmp_path / "metrics.jsonl").touch()
  with pytest.raises(ValueError, match="Plan again, or delete it"):
    runs.find_runs(tmp_path)


def test_trackers_are_beside_the_step():
  config = tiny.config(trackers=("wandb",))
  assert not plan_comparison.differences(to_dict(tiny.config()), config)
