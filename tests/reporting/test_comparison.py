"""Runs beside each other: names, options that differ, charts, files."""

import json
import pathlib

import pytest
from fake_runs import Drawn, run, write

from vit_jax.config import (
  ClassificationConfig,
  Config,
  DataConfig,
  FewshotConfig,
  OptimConfig,
  to_dict,
)
from vit_jax.tools.reporting import comparison, curves, report, runs

pytestmark = pytest.mark.usefixtures("undrawn")
VAL = ClassificationConfig(name="val", dataset="digits", split="test")
FEW = FewshotConfig(name="few", dataset="digits", l2=(2.0, 4.0))


def _config(lr=0.1, batch_size=8, evals=(VAL,), data="digits"):
  return Config(
    total_steps=2,
    optim=OptimConfig(lr=lr),
    data=DataConfig(dataset=data, batch_size=batch_size),
    evals=evals,
  )


def _rows(score=0.5):
  return [
    {
      "step": step,
      "time": 100.0 * step,
      "train/loss": 1.0 / step,
      "train/lr": 0.1,
      "train/images_per_second": 10.0 * step,
      "train/images_seen": 8.0 * step,
      "val/top1": score * step / 2,
    }
    for step in (1, 2)
  ]


def test_only_what_differs():
  """An option that an earlier version did not write has the default of now."""
  earlier = to_dict(_config(lr=0.2, evals=(VAL, FEW)))
  del earlier["optim"]["clip_norm"], earlier["fewshot"]
  both = [run(config=_config()), run(config=earlier, name="b")]
  assert comparison.differences(both) == {
    "optim.lr": {"a": 0.1, "b": 0.2},
    "evals.few": {"a": None, "b": "fewshot on digits test"},
  }
  assert "—" in comparison.differences_section(both)


def test_runs_of_the_same_name(tmp_path):
  a = write(tmp_path / "x" / "run", _rows(), _config())
  b = write(tmp_path / "y" / "run", _rows(), _config(lr=0.2))
  path = report.write_report(str(a), str(b), str(tmp_path / "x"))
  assert path == tmp_path / "report" / "report.html"
  summary = json.loads((path.parent / "summary.json").read_text())
  assert list(summary["runs"]) == ["x/run", "y/run"]  # each once
  assert summary["differences"] == {"optim.lr": {"x/run": 0.1, "y/run": 0.2}}
  assert summary["states"]["y/run"]["kind"] == "finished"
  assert summary["costs"]["x/run"]["images seen"] == 16.0
  # The page lies beside the runs, and is none.
  assert [r.name for r in runs.find_runs(tmp_path / "x")] == ["run"]


def test_where_several_runs_are_reported(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for paths, folder in (
    (["runs/a"], pathlib.Path("runs/a")),
    (["runs/a", "runs/b/c"], tmp_path / "runs" / "report"),
    (["/x_of_this_test/a", "/y_of_this_test/b"], pathlib.Path("report")),
  ):
    assert report.default_folder(paths) == folder


def test_runs_of_a_folder_and_several_folders(tmp_path):
  """Only those on the same data share charts, unless they are compared."""
  paths = [
    write(tmp_path / name, _rows(), _config(data=name))
    for name in ("digits", "cifar10")
  ]
  out = report.write_report(*map(str, paths)).parent
  assert {p.name for p in (out / "figures").glob("*_Curves*")} == {
    f"{what}_Curves.svg"
    for what in ("loss", "learning_rate", "accuracy", "throughput")
  }
  one = report.write_report(str(tmp_path), out=str(tmp_path / "by_data")).parent
  names = {p.name for p in (one / "figures").glob("loss_*")}
  assert names == {"loss_digits.svg", "loss_cifar10.svg"}


def test_batches_of_other_sizes_are_drawn_over_images():
  both = [
    run(_rows(), _config(batch_size=size), name=str(size)) for size in (8, 16)
  ]
  drawn = Drawn()
  curves.section("x", both, drawn)
  assert {axes.get_xlabel() for axes in drawn.axes.values()} == {"images seen"}
  assert len({axes.get_xlim() for axes in drawn.axes.values()}) == 1
  lines = [line.get_xdata().tolist() for line in drawn.axes["loss_x"].lines]
  assert lines == [[8, 16], [16, 32]]
  curves.section("x", both[:1], drawn)
  assert drawn.axes["loss_x"].get_xlabel() == "step"


def test_few_shot_side_by_side(tmp_path):
  for name, score in (("a", 0.5), ("b", 0.75)):
    rows = [{"step": 2, "few/5shot": score / 2, "few/10shot": score}]
    write(tmp_path / name, _rows() + rows, _config(evals=(VAL, FEW)))
  text = report.write_report(str(tmp_path)).read_text()
  row = "<th>b</th><td>2</td><td><b>37.5%</b></td><td><b>75.0%</b></td>"
  assert row in text and "<th>a</th><td>2</td><td>25.0%</td>" in text
  assert (tmp_path / "figures" / "fewshot_digits_test.svg").exists()
