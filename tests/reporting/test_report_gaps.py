"""A report of what is missing, damaged, older or interrupted."""

import json
import math
import pathlib

import pytest
from fake_runs import Page, write_rows

from vit_jax.commands.report import main
from vit_jax.config import (
  Config,
  FewshotConfig,
  to_dict,
)
from vit_jax.tools.reporting import charts, curves, report, runs


def test_what_is_damaged_is_named_and_does_not_stop_the_report(tmp_path):
  config = to_dict(Config(evals=(FewshotConfig(name="few"),)))
  config["evals"]["few"]["l2"] = "much"
  (tmp_path / "config.json").write_text(json.dumps(config))
  (tmp_path / "predictions.npz").write_bytes(b"PK cut off")
  (tmp_path / "checkpoints" / "3" / "params").mkdir(parents=True)
  text = "".join(Page(report.write_report(str(tmp_path)).read_text()).text)
  for message in (
    "config.evals.few.l2: got 'much'",
    f"Left out: predictions.npz of {tmp_path.name}: ",
    f"Left out: {tmp_path.name}: ",
  ):
    assert message in text


def test_what_is_missing_is_named(tmp_path, undrawn):
  for name, loss in (("a", math.nan), ("b<i>", 2.5)):
    row = {"step": 1, "time": 1.0, "train/loss": loss}
    write_rows(tmp_path / name, [row])
  text = report.write_report(str(tmp_path)).read_text()
  assert Page(text).open == []
  for part in (
    "config.json of a, b&lt;i&gt;",
    "metadata.json of a, b&lt;i&gt;",
    "loss of a;",
    "accuracy of a, b&lt;i&gt;",
    "predictions.npz of a, b&lt;i&gt;",
    "a: no checkpoint",
    "Versions were not recorded",
  ):
    assert part in text
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["runs"] == {
    "a": {"train/loss": None},
    "b<i>": {"train/loss": 2.5},
  }


def test_names_that_differ_have_files_each(tmp_path, undrawn):
  for name in ("a b", "a+b", "a_b"):
    write_rows(tmp_path / name, [{"step": 1, "time": 1.0, "train/loss": 2.5}])
    config = {"data": {"dataset": f"folder:/{name}"}}
    (tmp_path / name / "config.json").write_text(json.dumps(config))
  report.write_report(str(tmp_path))
  names = sorted(p.name for p in (tmp_path / "figures").iterdir())
  stem = "loss_folder__a_b"
  assert names == [f"{stem}.svg", f"{stem}_2.svg", f"{stem}_3.svg"]


def test_values_that_are_not_finite_are_named_and_drawn(tmp_path, monkeypatch):
  rows = [
    {"step": s, "train/lr": 0.1, "train/skipped": 0.0} for s in range(1, 9)
  ]
  for row in rows[:3]:
    row["train/loss"] = 1 / row["step"]
  rows += [{"step": 4, "val/top1": 0.5}, {"step": 8, "val/not_finite": 1.0}]
  write_rows(tmp_path, rows)
  drawn, render = [], charts.render
  monkeypatch.setattr(
    charts, "render", lambda d: drawn.append(d()) or render(d)
  )
  page = report.write_report(str(tmp_path)).read_text()
  assert "5 logged steps, first at step 4;" in "".join(Page(page).text)
  assert curves.CROSSES in page
  loss, lr, accuracy = (figure.axes[0] for figure in drawn)
  assert len({axes.get_xlim() for axes in (loss, lr, accuracy)}) == 1
  assert [len(axes.lines) for axes in (loss, lr, accuracy)] == [2, 1, 2]
  assert loss.lines[1].get_xdata().tolist() == [4, 5, 6, 7, 8]
  assert accuracy.lines[1].get_xdata().tolist() == [8]


def test_what_is_scored_once_stands_for_the_run():
  evals = {
    name: {"kind": "classification", "split": name} for name in ("test", "val")
  }
  rows = [{"step": s, "val/top1": s / 8} for s in (1, 2, 3)]
  rows.append({"step": 3, "test/top1": 0.5})
  path = pathlib.Path("runs/x")
  run = runs.Run("x", path, {"evals": evals}, {}, rows)
  assert run.top1() == "test/top1" and run.last(run.top1()) == 0.5


def test_what_is_no_run_is_refused(tmp_path):
  for folder, text in (
    (tmp_path / "nowhere", "nowhere"),
    (tmp_path, "a folder of runs"),
    ("gs://b/run", "gs://b/run"),
  ):
    with pytest.raises(ValueError, match=text):
      report.write_report(str(folder))
  with pytest.raises(SystemExit, match="a folder of runs"):
    main([str(tmp_path)])
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json"):
    report.write_report(str(tmp_path))
