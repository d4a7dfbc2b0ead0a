"""The page: of a real run, and to the digit of a fake demo, offline."""

import json
import math
import re

import numpy as np
import pytest
from fake_runs import Page, write

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
from vit_jax.writers.metric_writer import read_metrics

SHOTS = ("1", "5", "10", "25")
LOSS = {"step": 1, "time": 1.0, "train/loss": 2.5}


def _shots(prefix, first):
  """Few-shot accuracies with the first L2 weight, and half of them with 4."""
  by_k = {k: first + i / 8 for i, k in enumerate(SHOTS)}
  return {f"{prefix}/{k}shot": v for k, v in by_k.items()} | {
    f"{prefix}/l2=4/{k}shot": v / 2 for k, v in by_k.items()
  }


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
  """A run whose last line was cut off, with its page."""
  random = _shots("digits/random_init", 0.0)
  raw = _shots("digits/raw_pixels", 0.125)
  train = {"train/lr": 1e-3, "train/images_per_second": 50.0}
  rows = [
    {"step": 0, "time": 99.0, **random, **raw},
    {"step": 1, "time": 101.0, "train/loss": 3.0, **train},
    {"step": 2, "time": 102.0, "train/loss": 1.5, **train},
    {"step": 2, "time": 103.0, "val/top1": 0.75, **_shots("digits", 0.5)},
  ]
  evals = (
    ClassificationConfig(name="val"),
    FewshotConfig(name="digits", dataset="digits", l2=(16.0, 4.0)),
  )
  config = Config(data=DataConfig(dataset="glyphs/size=32"), evals=evals)
  metadata = {
    "class_names": ["Σ", "$"],
    "versions": {"jax": "0.10.2"},
    "image_size": [8, 8],
    "grid": [2, 2],
  }
  folder = tmp_path_factory.mktemp("runs") / "demo"
  write(folder, rows, config, metadata)
  with (folder / "metrics.jsonl").open("a") as file:
    file.write('{"step": 9, "cut o')
  np.savez(
    folder / "predictions.npz",
    image=np.zeros((3, 8, 8, 3), np.uint8),
    label=np.array([0, 1, 1]),
    prediction=np.array([0, 1, 0]),
    probability=np.array([0.5, 0.75, 1.0], np.float32),
    mistake_image=np.zeros((2, 8, 8, 3), np.uint8),
    mistake_label=np.array([1, 0]),
    mistake_prediction=np.array([0, 1]),
    mistake_probability=np.array([0.875, 0.625], np.float32),
    num_images=np.array(500),
    num_wrong=np.array(40),
    dataset=np.array("glyphs/size=32"),
    split=np.array("test"),
  )
  main([str(folder)])
  return folder


def assert_self_contained(text):
  page = Page(text)
  assert page.open == [] and page.images
  assert all(i["src"].startswith("data:image/") for i in page.images)
  assert all(page.charts) and all(i["alt"] for i in page.images)
  assert all(link.startswith(("data:", "#")) for link in page.links)
  assert "http" not in text and "@import" not in text
  assert not re.search(r"url\((?!#)", text)  # those within a chart
  return page


def test_page_and_summary(demo):
  page = assert_self_contained((demo / "report.html").read_text())
  names = sorted(p.stem for p in (demo / "figures").iterdir())
  assert names == [
    *("accuracy_glyphs", "fewshot_demo_digits_l2_16"),
    *("fewshot_demo_digits_l2_4", "learning_rate_glyphs"),
    *("loss_glyphs", "throughput_glyphs"),
  ]
  assert len(page.charts) == len(names)
  assert page.tiles == [
    ["75.0%", "val (glyphs validation), top-1", ""],
    ["75.0%", "digits (digits test), 10-shot, L2 16", "L2 4: 37.5%"],
    ["4s", "wall time", ""],
  ]
  assert ["image size", "8 × 8 px"] in page.rows
  assert ["patches", "2 × 2"] in page.rows
  # Every L2 weight.
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
  text = "".join(page.text)
  assert "demo: no checkpoint" in text
  images = text.partition("glyphs test: demo")[2]
  first, _, worst = images.partition("Worst mistakes: ")
  assert "2 of 3 right" in first and "✗ Σ 100%true: $" in first
  assert worst.startswith("40 of the 500 images")
  assert "✗ Σ 88%true: $✗ $ 62%true: Σ" in worst
  summary = json.loads((demo / "summary.json").read_text())
  last = {"val/top1": 0.75, **_shots("digits", 0.5), "train/loss": 1.5}
  assert last.items() <= summary["runs"]["demo"].items()
  assert summary["wall_seconds"] == 4.0
  assert summary["versions"] == {"jax": "0.10.2"}


@pytest.mark.slow
def test_the_page_of_a_real_run(run, tmp_path):
  copy = run.copy(tmp_path / "run")
  main([str(copy)])
  page = assert_self_contained((copy / "report.html").read_text())
  assert ["true: red"] * 2 == re.findall("true: red", "".join(page.text))
  summary = json.loads((copy / "summary.json").read_text())
  last = [r for r in read_metrics(str(copy)) if r["step"] == 20]
  scores = {k: v for r in last for k, v in r.items() if "/" in k}
  assert scores.items() <= summary["runs"]["run"].items()
  assert summary["states"]["run"]["kind"] == "finished"
  assert summary["costs"]["run"]["images seen"] == 320
  figures = {p.stem for p in (copy / "figures").iterdir()}
  assert {f"{kind}_run" for kind in ("filters", "positions", "distance")} < (
    figures
  )
  # Of a model only the first layer stays in memory: others may be large.
  (found,) = runs.find_runs(copy)
  model = model_figures.inspect_run(found)
  assert [*model.vit.params] == ["embedding"] and model.maps is not None


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
  saved = saved_images.predictions(a_run, 9)
  named = [(e.label, e.guess) for e in saved.first + saved.mistakes]
  assert named == [("2", "2"), ("a", "2"), ("a", "2")]


def test_a_page_is_replaced_as_a_whole(demo, tmp_path, undrawn):
  """So an end in the middle leaves the one of before: its bytes still are."""
  files = ("report.html", "summary.json")
  for name in files:
    (tmp_path / name).write_text("before")
    (tmp_path / f"linked_{name}").hardlink_to(tmp_path / name)
  report.write_report(str(demo), out=str(tmp_path))
  assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert [*summary["runs"]] == ["demo"]
  for name in files:
    assert (tmp_path / f"linked_{name}").read_text() == "before"
  assert not list(tmp_path.glob("*.new"))


def test_what_is_missing_or_damaged_is_named(tmp_path, undrawn):
  """It does not stop the report."""
  for name, loss in (("a", math.nan), ("b<i>", 2.5)):
    write(tmp_path / name, [LOSS | {"train/loss": loss}])
  config = to_dict(Config(evals=(FewshotConfig(name="few"),)))
  config["evals"]["few"]["l2"] = "much"
  damaged = write(tmp_path / "c", [], config)
  (damaged / "metrics.jsonl").write_bytes(b'{"step": 3, "ti\xff')
  (damaged / "predictions.npz").write_bytes(b"PK cut off")
  (damaged / "checkpoints" / "3" / "params").mkdir(parents=True)
  page = report.write_report(str(tmp_path)).read_text()
  text = "".join(Page(page).text)
  assert Page(page).open == []
  for part in (
    "config.json of a, b<i>",
    "metadata.json of a, b<i>",
    "loss of a;",
    "predictions.npz of a, b<i>",
    "a: no checkpoint",
    "config.evals.few.l2: got 'much'",
    "predictions.npz of c: ",
    "line 1 of the metrics of c",
  ):
    assert part in text
  summary = json.loads((tmp_path / "summary.json").read_text())
  losses = {"a": {"train/loss": None}, "b<i>": {"train/loss": 2.5}}
  assert losses.items() <= summary["runs"].items()


def test_names_that_differ_have_files_each(tmp_path, undrawn):
  for name in ("a b", "a+b", "a_b"):
    write(tmp_path / name, [LOSS], {"data": {"dataset": f"folder:/{name}"}})
  report.write_report(str(tmp_path))
  names = sorted(p.name for p in (tmp_path / "figures").iterdir())
  stem = "loss_folder__a_b"
  assert names == [f"{stem}.svg", f"{stem}_2.svg", f"{stem}_3.svg"]


def test_what_is_no_run_or_no_folder_is_refused(tmp_path):
  for folder in (tmp_path / "nowhere", tmp_path, "gs://b/run"):
    with pytest.raises(ValueError, match=f"{folder}.*expected"):
      report.write_report(str(folder))
  with pytest.raises(SystemExit, match="a folder of runs"):
    main([str(tmp_path)])
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json"):
    report.write_report(str(tmp_path))
  path = write(tmp_path / "a")
  (tmp_path / "file").touch()
  with pytest.raises(SystemExit, match="--out"):
    main([str(path), "--out", str(tmp_path / "file" / "x")])
