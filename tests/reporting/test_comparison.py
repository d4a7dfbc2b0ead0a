"""Runs beside each other: names, options that differ, charts, files."""

import doctest
import json
import pathlib
import re

import pytest
from fake_runs import write_rows

from vit_jax.commands.report import main
from vit_jax.config import (
  ClassificationConfig,
  Config,
  DataConfig,
  FewshotConfig,
  OptimConfig,
  to_dict,
)
from vit_jax.tools.reporting import comparison, curves, report, runs, tables
from vit_jax.tools.reporting.charts import ChartFiles

pytestmark = pytest.mark.usefixtures("undrawn")
VAL = ClassificationConfig(name="val", dataset="digits", split="test")
FEW = FewshotConfig(name="few", dataset="digits", l2=(2.0, 4.0))


def _write(path, lr=0.1, batch_size=8, evals=(VAL,), score=0.5, data="digits"):
  path.mkdir(parents=True)
  config = Config(
    total_steps=2,
    optim=OptimConfig(lr=lr),
    data=DataConfig(dataset=data, batch_size=batch_size),
    evals=evals,
  )
  (path / "config.json").write_text(json.dumps(to_dict(config)))
  rows = [
    {
      "step": step,
      "time": 100.0 * step,
      "train/loss": 1.0 / step,
      "train/lr": lr,
      "train/images_per_second": 10.0 * step,
      "train/images_seen": float(step * batch_size),
      "val/top1": score * step / 2,
    }
    for step in (1, 2)
  ]
  if FEW in evals:
    rows.append({"step": 2, "few/5shot": score / 2, "few/10shot": score})
  write_rows(path, rows)
  return path


class Drawn(ChartFiles):
  """Keeps the axes of charts by name, and writes none."""

  def __init__(self):
    super().__init__()
    self.axes = {}

  def add(self, name, draw, alt):
    self.axes[name] = draw().axes[0]
    return ""


def _text(path):
  return re.sub("<wbr>|<[^>]*>", " ", path.read_text()).replace("  ", " ")


def test_examples():
  assert doctest.testmod(runs).failed == 0


def test_only_what_differs(tmp_path):
  _write(tmp_path / "a", lr=0.1)
  _write(tmp_path / "b", lr=0.2, evals=(VAL, FEW))
  differing = comparison.differences(runs.find_runs(tmp_path))
  assert differing == {
    "optim.lr": {"a": 0.1, "b": 0.2},
    "evals.few": {"a": None, "b": "fewshot on digits test"},
  }


def test_options_of_earlier_versions_have_the_defaults_of_now(tmp_path):
  """A config without an option is no other config than one with its default."""
  _write(tmp_path / "a")
  _write(tmp_path / "b")
  config = json.loads((tmp_path / "b" / "config.json").read_text())
  del config["optim"]["clip_norm"], config["fewshot"]
  (tmp_path / "b" / "config.json").write_text(json.dumps(config))
  assert comparison.differences(runs.find_runs(tmp_path)) == {}


def test_runs_of_the_same_name(tmp_path):
  a, b = _write(tmp_path / "x" / "run"), _write(tmp_path / "y" / "run", 0.2)
  path = report.write_report(str(a), str(b), str(tmp_path / "x"))
  assert path == tmp_path / "report" / "report.html"
  summary = json.loads((path.parent / "summary.json").read_text())
  assert list(summary["runs"]) == ["x/run", "y/run"]  # each once
  assert summary["differences"] == {"optim.lr": {"x/run": 0.1, "y/run": 0.2}}
  assert summary["states"]["y/run"]["kind"] == "finished"
  assert summary["costs"]["x/run"]["images seen"] == 16.0
  assert "x/ run : finished: 2 steps" in _text(path)
  # The page lies beside the runs, and is none.
  assert [r.name for r in runs.find_runs(tmp_path / "x")] == ["run"]


def test_where_several_runs_are_reported(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert report.default_folder(["runs/a"]) == pathlib.Path("runs/a")
  both = report.default_folder(["runs/a", "runs/b/c"])
  assert both == tmp_path / "runs" / "report"
  apart = report.default_folder(["/x_of_this_test/a", "/y_of_this_test/b"])
  assert apart == pathlib.Path("report")


def test_their_curves_share_a_chart(tmp_path):
  paths = [_write(tmp_path / n, data=n) for n in ("digits", "cifar10")]
  out = report.write_report(*map(str, paths)).parent
  assert {p.name for p in (out / "figures").glob("*_Curves*")} == {
    f"{what}_Curves.svg"
    for what in ("loss", "learning_rate", "accuracy", "throughput")
  }
  one = report.write_report(str(tmp_path), out=str(tmp_path / "by_data")).parent
  names = {p.name for p in (one / "figures").glob("loss_*")}
  assert names == {"loss_digits.svg", "loss_cifar10.svg"}


def test_batches_of_other_sizes_are_drawn_over_images(tmp_path):
  _write(tmp_path / "a", batch_size=8)
  _write(tmp_path / "b", batch_size=16)
  both, drawn = runs.find_runs(tmp_path), Drawn()
  curves.section("x", both, drawn)
  assert {axes.get_xlabel() for axes in drawn.axes.values()} == {"images seen"}
  lines = [line.get_xdata().tolist() for line in drawn.axes["loss_x"].lines]
  assert lines == [[8, 16], [16, 32]]
  curves.section("x", both[:1], drawn)
  assert drawn.axes["loss_x"].get_xlabel() == "step"


def test_few_shot_side_by_side(tmp_path):
  for name, score in (("a", 0.5), ("b", 0.75)):
    _write(tmp_path / name, evals=(VAL, FEW), score=score)
  path = report.write_report(str(tmp_path))
  assert "Few-shot, side by side" in path.read_text()
  text = path.read_text()
  row = "<th>b</th><td>2</td><td><b>37.5%</b></td><td><b>75.0%</b></td>"
  assert row in text and "<th>a</th><td>2</td><td>25.0%</td>" in text
  assert (tmp_path / "figures" / "fewshot_digits_test.svg").exists()


def test_scores_without_a_tile_are_counted(tmp_path):
  for i in range(9):
    _write(tmp_path / f"a{i}")
  head = report.head("", runs.find_runs(tmp_path), None, {})
  assert head.count("val (digits test), top-1") == 8
  assert "8 of 9 scores; all are below." in head


def test_a_line_cut_off_is_named(tmp_path):
  with (_write(tmp_path / "a") / "metrics.jsonl").open("ab") as file:
    file.write(b'{"step": 3, "ti\xff')
  (run,) = runs.find_runs(tmp_path)
  page = comparison.states_section([run]).replace("<wbr>", "")
  assert "line 3 of the metrics of a" in page


@pytest.mark.parametrize(
  "count, text", [(2, "a0 a1 x 0 1"), (5, "x a0 0 a1 1 a2 2 a3 3 a4 4")]
)
def test_many_runs_have_rows(count, text, tmp_path):
  for i in range(count):
    _write(tmp_path / f"a{i}")
  facts = [{"x": str(i)} for i in range(count)]
  html = tables.side_by_side(runs.find_runs(tmp_path), facts)
  assert re.sub("<[^>]*>", " ", html).split() == text.split()


def test_an_output_that_cannot_be_written(tmp_path):
  path = _write(tmp_path / "a")
  (tmp_path / "file").touch()
  with pytest.raises(SystemExit, match="--out=DIR writes elsewhere"):
    main([str(path), "--out", str(tmp_path / "file" / "x")])
