"""A fake demo: its summary to the digit, its page without the network."""

import json
import pathlib
import re

import numpy as np
import pytest
from fake_runs import VERSIONS, Page, write_checkpoint, write_run

from vit_jax.commands.report import main
from vit_jax.config import (
  ClassificationConfig,
  Config,
  FewshotConfig,
  to_dict,
)
from vit_jax.tools.reporting import (
  model_figures,
  report,
  runs,
  saved_images,
  tables,
)

SHOTS = ("1", "5", "10", "25")


def _train_rows():
  return [
    {
      "step": s,
      "time": 100.0 + s,
      "train/loss": 3.0 / s,
      "train/lr": 1e-3,
      "train/images_per_second": 50.0,
    }
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
  write_run(
    base / "pretrain",
    "glyphs/size=32",
    (
      ClassificationConfig(name="val"),
      FewshotConfig(name="digits", dataset="digits", l2=(16.0, 4.0)),
    ),
    [
      {
        "step": 0,
        "time": 99.0,
        **_shots("digits/random_init", 0.0),
        **_shots("digits/raw_pixels", 0.125),
      },
      *_train_rows(),
      {"step": 1, "time": 101.5, "val/top1": 0.25, **_shots("digits", 0.25)},
      {"step": 2, "time": 103.0, "val/top1": 0.75, **_shots("digits", 0.5)},
    ],
    (2, 2),
  )
  write_run(
    base / "finetune",
    "digits",
    (ClassificationConfig(name="test", split="test"),),
    [*_train_rows(), {"step": 2, "time": 104.0, "test/top1": 0.875}],
    (3, 3),
    "runs/demo/pretrain",
    ("0", "1"),
  )
  main([str(base)])
  return base


def test_summary(demo):
  summary = json.loads((demo / "summary.json").read_text())
  assert list(summary["runs"]) == ["finetune", "pretrain"]
  last = {"val/top1": 0.75, **_shots("digits", 0.5), "train/loss": 1.5}
  assert last.items() <= summary["runs"]["pretrain"].items()
  assert summary["runs"]["finetune"]["test/top1"] == 0.875
  assert summary["wall_seconds"] == 4.0 + 3.0
  assert summary["versions"] == VERSIONS


def test_page_is_self_contained(demo):
  text = (demo / "report.html").read_text()
  page = Page(text)
  assert page.open == []
  assert page.images
  assert all(i["src"].startswith("data:image/png;") for i in page.images)
  assert all(page.charts)  # each says what it shows
  assert all(i["alt"] for i in page.images)
  assert all(link.startswith(("data:", "#")) for link in page.links)
  assert "http" not in text and "@import" not in text
  assert not re.search(r"url\((?!#)", text)  # those within a chart
  before, _, inside = text.partition("Inside the models")
  assert "Left out" not in before
  assert "finetune: no checkpoint; pretrain: no checkpoint" in inside


def test_each_chart_is_a_file(demo):
  names = sorted(p.stem for p in (demo / "figures").iterdir())
  assert names == [
    *("accuracy_digits", "accuracy_glyphs"),
    *("fewshot_pretrain_digits_l2_16", "fewshot_pretrain_digits_l2_4"),
    *("learning_rate_digits", "learning_rate_glyphs"),
    *("loss_digits", "loss_glyphs", "throughput_digits", "throughput_glyphs"),
  ]
  page = Page((demo / "report.html").read_text())
  assert len(page.charts) == len(names)


@pytest.mark.slow
def test_of_a_run_only_the_first_layer_stays_in_memory(tmp_path, undrawn):
  """A report has several runs, of any size."""
  write_run(tmp_path / "run", "digits", (), [], (2, 2))
  write_checkpoint(tmp_path / "run")
  (run,) = runs.find_runs(tmp_path)
  model = model_figures.inspect_run(run)
  assert [*model.vit.params] == ["embedding"] and model.maps is not None
  path = report.write_report(str(tmp_path))
  assert "Left out" not in path.read_text().partition("Inside the models")[2]
  assert {p.stem for p in (tmp_path / "figures").iterdir()} == {
    f"{kind}_run" for kind in ("filters", "positions", "distance")
  }


def test_tiles_say_data_set_and_metric(demo):
  page = Page((demo / "report.html").read_text())
  assert page.tiles == [
    ["87.5%", "test (digits test), top-1", "finetune"],
    ["75.0%", "val (glyphs validation), top-1", "pretrain"],
    ["75.0%", "digits (digits test), 10-shot, L2 16", "pretrain; L2 4: 37.5%"],
    ["7s", "wall time", ""],
  ]


def test_every_l2_weight_is_in_the_table(demo):
  rows = Page((demo / "report.html").read_text()).rows
  start = rows.index(["features", "L2", *SHOTS])
  assert rows[start + 1 : start + 7] == [
    [text, l2, *(f"{100 * (first + i / 8) * share:.1f}%" for i in range(4))]
    for l2, share in (("16", 1), ("4", 0.5))
    for text, first in (
      ("trained weights", 0.5),
      ("random weights", 0.0),
      ("raw pixels", 0.125),
    )
  ]


def test_worst_mistakes_say_split_and_count(demo):
  text = "".join(Page((demo / "report.html").read_text()).text)
  assert "digits test: finetune" in text
  first, _, worst = text.partition("digits test: finetune")[2].partition(
    "Worst mistakes: "
  )
  assert "2 of 3 right" in first and "✗ 0 100%true: 1" in first
  assert worst.startswith("40 of the 500 images")
  assert "✗ 0 88%true: 1✗ 1 62%true: 0" in worst


def test_several_data_sets():
  evals = (
    ClassificationConfig(name="val"),
    ClassificationConfig(name="real", dataset="folder:/data/my_real/"),
    ClassificationConfig(name="again"),  # as val, with other operations
    FewshotConfig(name="pets", dataset="oxford_pets/a=1", l2=(2.0,)),
    FewshotConfig(name="cars", dataset="cars", l2=(2.0,)),
  )
  row = {"step": 1, "pets/25shot": 0.5, "cars/5shot": 0.125}
  for i, name in enumerate(("val", "real", "again")):
    row |= {f"{name}/top1": i / 4, f"{name}/loss": 1.5, f"{name}/count": 1e4}
  config = to_dict(Config(evals=evals))
  config["data"]["dataset"] = "imagenet/x"
  run = runs.Run("a", pathlib.Path("a"), config, {}, [row])
  assert tables.headlines(run) == [
    (0.0, "val (imagenet validation), top-1", ""),
    (0.25, "real (my_real validation), top-1", ""),
    (0.5, "again (imagenet validation), top-1", ""),
    (0.5, "pets (oxford_pets test), 25-shot, L2 2", ""),
    (0.125, "cars (cars test), 5-shot, L2 2", ""),
  ]
  head, *rows = Page(tables.scores([run])).rows
  assert head == ["", "top-1", "balanced", "top-5", "loss", "images"]
  assert [r[0] for r in rows] == [
    f"{name} ({data} validation)"
    for name, data in (("val", "imagenet"), ("real", "my_real"))
    + (("again", "imagenet"),)
  ]
  assert rows[1][1:] == ["25.0%", "—", "—", "1.5", "10,000"]


def test_few_shot_of_all_examples():
  """Which is no number of shots."""
  evals = tuple(
    FewshotConfig(name=n, dataset=n, l2=(2.0, 4.0), group="few")
    for n in ("pets", "cars")
  )
  row = {"step": 1, "few/sets": 2.0}
  for name, value in (("pets", 0.5), ("cars", 0.25), ("few", 0.375)):
    row |= {f"{name}/5shot": 0.125, f"{name}/all": value}
  row["pets/l2=4/all"] = 0.75
  config = to_dict(Config(evals=evals))
  run = runs.Run("a", pathlib.Path("a"), config, {}, [row])
  assert Page(tables.other_scores([run])).rows == [
    ["", "evaluator", "last scores"],
    ["pets (pets test)", "fewshot", "all 0.5, l2=4/all 0.75"],
    ["cars (cars test)", "fewshot", "all 0.25"],
    ["few (mean of 2 data sets)", "fewshot", "all 0.375"],
  ]


def test_a_page_is_replaced_as_a_whole(demo, tmp_path, undrawn):
  """So an end in the middle leaves the one of before: its bytes still are."""
  for name in ("report.html", "summary.json"):
    (tmp_path / name).write_text("before")
    (tmp_path / f"linked_{name}").hardlink_to(tmp_path / name)
  report.write_report(str(demo / "finetune"), out=str(tmp_path))
  text = (tmp_path / "report.html").read_text()
  assert text.startswith("<!doctype html>")
  assert "few-shot accuracies, of which no run wrote any" in text
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert [*summary["runs"]] == ["finetune"]
  for name in ("report.html", "summary.json"):
    assert (tmp_path / f"linked_{name}").read_text() == "before"
  assert not list(tmp_path.glob("*.new"))


def test_several_right_classes(tmp_path):
  arrays = {
    "image": np.zeros((2, 4, 4, 3), np.uint8),
    "label": np.array([[0, 1, 1], [1, 0, 0]], np.float32),
    "prediction": np.array([2, 2]),
    "probability": np.ones(2, np.float32),
  }
  mistakes = {f"mistake_{name}": a[1:] for name, a in arrays.items()}
  np.savez(
    tmp_path / "predictions.npz",
    **arrays,
    **mistakes,
    num_images=2,
    num_wrong=1,
    dataset="x",
    split="test",
  )
  run = runs.Run("x", tmp_path, {}, {"class_names": ["a", "b"]}, [])
  examples = saved_images.predictions(run, 9)
  assert [(e.label, e.guess) for e in examples.first] == [
    ("2", "2"),
    ("a", "2"),
  ]
  assert [e.label for e in examples.mistakes] == ["a"]
