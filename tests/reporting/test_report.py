"""A fake demo: its summary to the digit, its page without the network."""

import json
import math
import re

import numpy as np
import pytest
from fake_runs import (
  Page,
  of_model,
  write,
  write_checkpoint,
  write_predictions,
)

from vit_jax.commands.report import main
from vit_jax.config import (
  ClassificationConfig,
  Config,
  DataConfig,
  FewshotConfig,
  to_dict,
)
from vit_jax.tools.reporting import (
  model_figures,
  report,
  runs,
  saved_images,
)

SHOTS = ("1", "5", "10", "25")


def _train_rows():
  train = {"lr": 1e-3, "images_per_second": 50.0}
  return [
    {"step": s, "time": 100.0 + s, "train/loss": 3.0 / s}
    | {f"train/{k}": v for k, v in train.items()}
    for s in (1, 2)
  ]


def _shots(prefix, first):
  """Few-shot accuracies with the first L2 weight, and half of them with 4."""
  by_k = {k: first + i / 8 for i, k in enumerate(SHOTS)}
  return {f"{prefix}/{k}shot": v for k, v in by_k.items()} | {
    f"{prefix}/l2=4/{k}shot": v / 2 for k, v in by_k.items()
  }


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
  base = tmp_path_factory.mktemp("runs") / "demo"
  evals = (
    ClassificationConfig(name="val"),
    FewshotConfig(name="digits", dataset="digits", l2=(16.0, 4.0)),
  )
  random = _shots("digits/random_init", 0.0)
  raw = _shots("digits/raw_pixels", 0.125)
  rows = [
    {"step": 0, "time": 99.0, **random, **raw},
    *_train_rows(),
    {"step": 1, "time": 101.5, "val/top1": 0.25, **_shots("digits", 0.25)},
    {"step": 2, "time": 103.0, "val/top1": 0.75, **_shots("digits", 0.5)},
  ]
  pretrain = write(
    base / "pretrain",
    rows,
    Config(data=DataConfig(dataset="glyphs/size=32"), evals=evals),
    of_model((2, 2), ("Σ", "$")),
  )
  with (pretrain / "metrics.jsonl").open("a") as file:
    file.write('{"step": 9, "cut o')
  finetune = write(
    base / "finetune",
    [*_train_rows(), {"step": 2, "time": 104.0, "test/top1": 0.875}],
    Config(
      data=DataConfig(dataset="digits"),
      evals=(ClassificationConfig(name="test", split="test"),),
      init="runs/demo/pretrain",
    ),
    of_model((3, 3), ("0", "1")),
  )
  write_predictions(pretrain, "glyphs/size=32", 8)
  write_predictions(finetune, "digits", 12)
  main([str(base)])
  return base


@pytest.fixture
def page(demo):
  return Page((demo / "report.html").read_text())


def test_summary(demo):
  summary = json.loads((demo / "summary.json").read_text())
  assert list(summary["runs"]) == ["finetune", "pretrain"]
  last = {"val/top1": 0.75, **_shots("digits", 0.5), "train/loss": 1.5}
  assert last.items() <= summary["runs"]["pretrain"].items()
  assert summary["runs"]["finetune"]["test/top1"] == 0.875
  assert summary["wall_seconds"] == 4.0 + 3.0
  assert summary["versions"] == {"jax": "0.10.2", "vit_jax": "0.1"}


def test_the_page_is_self_contained(demo, page):
  text = (demo / "report.html").read_text()
  assert page.open == [] and page.images
  assert all(i["src"].startswith("data:image/png;") for i in page.images)
  assert all(page.charts) and all(i["alt"] for i in page.images)
  assert all(link.startswith(("data:", "#")) for link in page.links)
  assert "http" not in text and "@import" not in text
  assert not re.search(r"url\((?!#)", text)  # those within a chart
  assert "finetune: no checkpoint; pretrain: no checkpoint" in text


def test_each_chart_is_a_file(demo, page):
  names = sorted(p.stem for p in (demo / "figures").iterdir())
  assert names == [
    *("accuracy_digits", "accuracy_glyphs"),
    *("fewshot_pretrain_digits_l2_16", "fewshot_pretrain_digits_l2_4"),
    *("learning_rate_digits", "learning_rate_glyphs"),
    *("loss_digits", "loss_glyphs", "throughput_digits", "throughput_glyphs"),
  ]
  assert len(page.charts) == len(names)


def test_tiles_say_data_set_and_metric(page):
  assert page.tiles == [
    ["87.5%", "test (digits test), top-1", "finetune"],
    ["75.0%", "val (glyphs validation), top-1", "pretrain"],
    ["75.0%", "digits (digits test), 10-shot, L2 16", "pretrain; L2 4: 37.5%"],
    ["7s", "wall time", ""],
  ]


def test_every_l2_weight_is_in_the_table(page):
  start = page.rows.index(["features", "L2", *SHOTS])
  assert page.rows[start + 1 : start + 7] == [
    [text, l2, *(f"{100 * (first + i / 8) * share:.1f}%" for i in range(4))]
    for l2, share in (("16", 1), ("4", 0.5))
    for text, first in (
      ("trained weights", 0.5),
      ("random weights", 0.0),
      ("raw pixels", 0.125),
    )
  ]


def test_the_first_images_and_the_worst_mistakes(page):
  text = "".join(page.text).partition("digits test: finetune")[2]
  first, _, worst = text.partition("Worst mistakes: ")
  assert "2 of 3 right" in first and "✗ 0 100%true: 1" in first
  assert worst.startswith("40 of the 500 images")
  assert "✗ 0 88%true: 1✗ 1 62%true: 0" in worst


def test_several_right_classes(tmp_path):
  arrays = {
    "image": np.zeros((2, 4, 4, 3), np.uint8),
    "label": np.array([[0, 1, 1], [1, 0, 0]], np.float32),
    "prediction": np.array([2, 2]),
    "probability": np.ones(2, np.float32),
  }
  mistakes = {f"mistake_{name}": a[1:] for name, a in arrays.items()}
  of = dict(num_images=2, num_wrong=1, dataset="x", split="test")
  np.savez(tmp_path / "predictions.npz", **arrays, **mistakes, **of)
  a_run = runs.Run("x", tmp_path, {}, {"class_names": ["a", "b"]}, [])
  examples = saved_images.predictions(a_run, 9)
  assert [(e.label, e.guess) for e in examples.first] == [
    ("2", "2"),
    ("a", "2"),
  ]
  assert [e.label for e in examples.mistakes] == ["a"]


@pytest.mark.slow
def test_of_a_run_only_the_first_layer_stays_in_memory(tmp_path, undrawn):
  """A report has several runs, of any size."""
  metadata = of_model((2, 2), ("a", "b"))
  folder = write(tmp_path / "run", [], Config(), metadata)
  write_checkpoint(folder)
  model = model_figures.inspect_run(*runs.find_runs(tmp_path))
  assert [*model.vit.params] == ["embedding"] and model.maps is None
  write_predictions(folder, "digits", 8)
  model = model_figures.inspect_run(*runs.find_runs(tmp_path))
  assert [*model.vit.params] == ["embedding"] and model.maps is not None
  report.write_report(str(tmp_path))
  assert {p.stem for p in (tmp_path / "figures").iterdir()} == {
    f"{kind}_run" for kind in ("filters", "positions", "distance")
  }


def test_a_page_is_replaced_as_a_whole(demo, tmp_path, undrawn):
  """So an end in the middle leaves the one of before: its bytes still are."""
  files = ("report.html", "summary.json")
  for name in files:
    (tmp_path / name).write_text("before")
    (tmp_path / f"linked_{name}").hardlink_to(tmp_path / name)
  report.write_report(str(demo / "finetune"), out=str(tmp_path))
  assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert [*summary["runs"]] == ["finetune"]
  for name in files:
    assert (tmp_path / f"linked_{name}").read_text() == "before"
  assert not list(tmp_path.glob("*.new"))


def test_what_is_missing_is_named(tmp_path, undrawn):
  for name, loss in (("a", math.nan), ("b<i>", 2.5)):
    write(tmp_path / name, [{"step": 1, "time": 1.0, "train/loss": loss}])
  text = report.write_report(str(tmp_path)).read_text()
  assert Page(text).open == []
  for part in (
    "config.json of a, b&lt;i&gt;",
    "metadata.json of a, b&lt;i&gt;",
    "loss of a;",
    "predictions.npz of a, b&lt;i&gt;",
    "a: no checkpoint",
  ):
    assert part in text
  summary = json.loads((tmp_path / "summary.json").read_text())
  losses = {"a": {"train/loss": None}, "b<i>": {"train/loss": 2.5}}
  assert summary["runs"] == losses


def test_what_is_damaged_is_named_and_does_not_stop_the_report(tmp_path):
  config = to_dict(Config(evals=(FewshotConfig(name="few"),)))
  config["evals"]["few"]["l2"] = "much"
  write(tmp_path, [], config)
  (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 3, "ti\xff')
  (tmp_path / "predictions.npz").write_bytes(b"PK cut off")
  (tmp_path / "checkpoints" / "3" / "params").mkdir(parents=True)
  text = "".join(Page(report.write_report(str(tmp_path)).read_text()).text)
  for named in (
    "config.evals.few.l2: got 'much'",
    f"Left out: predictions.npz of {tmp_path.name}: ",
    f"Left out: {tmp_path.name}: ",
    f"line 1 of the metrics of {tmp_path.name}",
  ):
    assert named in text


def test_names_that_differ_have_files_each(tmp_path, undrawn):
  for name in ("a b", "a+b", "a_b"):
    rows = [{"step": 1, "time": 1.0, "train/loss": 2.5}]
    write(tmp_path / name, rows, {"data": {"dataset": f"folder:/{name}"}})
  report.write_report(str(tmp_path))
  names = sorted(p.name for p in (tmp_path / "figures").iterdir())
  stem = "loss_folder__a_b"
  assert names == [f"{stem}.svg", f"{stem}_2.svg", f"{stem}_3.svg"]


def test_what_is_no_run_is_refused(tmp_path):
  for folder in (tmp_path / "nowhere", tmp_path, "gs://b/run"):
    with pytest.raises(ValueError, match=f"{folder}.*expected"):
      report.write_report(str(folder))
  with pytest.raises(SystemExit, match="a folder of runs"):
    main([str(tmp_path)])
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json"):
    report.write_report(str(tmp_path))


def test_an_output_that_cannot_be_written(tmp_path):
  path = write(tmp_path / "a")
  (tmp_path / "file").touch()
  with pytest.raises(SystemExit, match="--out"):
    main([str(path), "--out", str(tmp_path / "file" / "x")])
