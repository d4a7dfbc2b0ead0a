"""A fake demo: its summary to the digit, its page without the network."""

import json
import pathlib
import re

import demo_summary
import numpy as np
import pytest
from fake_runs import VERSIONS, Page, write_run

from vit_jax.commands.report import main
from vit_jax.config import (
  ClassificationConfig,
  Config,
  FewshotConfig,
  to_dict,
)
from vit_jax.tools.reporting import report, runs, saved_images, tables

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
  test = (ClassificationConfig(name="test", split="test"),)
  for name, top1, init in (
    ("finetune", 0.875, "runs/demo/pretrain"),
    ("scratch", 0.625, None),
  ):
    rows = _train_rows() + [{"step": 2, "time": 104.0, "test/top1": top1}]
    write_run(base / name, "digits", test, rows, (3, 3), init, tuple("01"))
  (base / "started").write_text("54\n")  # the last row is of 104
  main([str(base)])
  demo_summary.main(base)
  return base


def _shots_of(first, share=1.0):
  return {k: (first + i / 8) * share for i, k in enumerate(SHOTS)}


def _shots_by_l2(first):
  return {"16": _shots_of(first), "4": _shots_of(first, 0.5)}


def test_summary_of_the_demo(demo):
  summary = json.loads((demo / "summary.json").read_text())
  assert list(summary["runs"]) == ["finetune", "pretrain", "scratch"]
  numbers = {
    "glyphs_val_accuracy": 0.75,
    "fewshot": _shots_of(0.5),
    "fewshot_random_init": _shots_of(0.0),
    "fewshot_raw_pixels": _shots_of(0.125),
    "fewshot_by_l2": {
      "features": _shots_by_l2(0.5),
      "random_init": _shots_by_l2(0.0),
      "raw_pixels": _shots_by_l2(0.125),
    },
    "digits_test_accuracy": 0.875,
    "digits_test_accuracy_from_scratch": 0.625,
    "wall_seconds": 50.0,
    "versions": VERSIONS,
  }
  assert {name: summary[name] for name in numbers} == numbers


def test_the_demo_ends_with_its_four_accuracies(demo, capsys):
  demo_summary.main(demo)
  title, *rows, seconds = capsys.readouterr().out.splitlines()
  assert "digits" in title and "50 s" in seconds
  assert [row.split()[-1] for row in rows] == [
    *("75.0%", "37.5%"),  # ridge with 10 images a class: features, pixels
    *("87.5%", "62.5%"),  # fine-tuned, from scratch
  ]


def test_page_is_self_contained(demo):
  text = (demo / "report.html").read_text()
  page = Page(text)
  assert page.open == []
  kinds = {i["src"].partition(";base64,")[0] for i in page.images}
  assert kinds == {f"data:image/{kind}" for kind in ("jpeg", "png")}
  assert len(page.charts) == 19 and all(page.charts)  # each says what it shows
  assert all(i["alt"] for i in page.images)
  assert all(link.startswith(("data:", "#")) for link in page.links)
  assert "http" not in text and "@import" not in text
  assert not re.search(r"url\((?!#)", text)  # those within a chart
  # These checkpoints are of no model that could be looked into.
  assert "Left out" not in text.partition("Inside the models")[0]


def test_pictures(demo):
  assert sorted(p.name for p in (demo / "figures").iterdir()) == [
    "accuracy_digits.svg",
    "accuracy_glyphs.svg",
    *(f"distance_{run}.svg" for run in ("finetune", "pretrain", "scratch")),
    "fewshot_pretrain_digits_l2_16.svg",
    "fewshot_pretrain_digits_l2_4.svg",
    *(f"filters_{run}.svg" for run in ("finetune", "pretrain", "scratch")),
    "learning_rate_digits.svg",
    "learning_rate_glyphs.svg",
    "loss_digits.svg",
    "loss_glyphs.svg",
    "positions_finetune.svg",
    "positions_pretrain.svg",
    "positions_scratch.svg",
    "throughput_digits.svg",
    "throughput_glyphs.svg",
  ]


def test_tiles_say_data_set_and_metric(demo):
  page = Page((demo / "report.html").read_text())
  assert page.tiles == [
    ["87.5%", "test (digits test), top-1", "finetune"],
    ["75.0%", "val (glyphs validation), top-1", "pretrain"],
    ["75.0%", "digits (digits test), 10-shot, L2 16", "pretrain; L2 4: 37.5%"],
    ["62.5%", "test (digits test), top-1", "scratch"],
    ["10s", "wall time", ""],
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
    "Worst mistakes: 40 of the 500 images are named wrongly; the 2 of the"
    " highest probability."
  )
  assert "2 of 3 right" in first and "✗ 0 100%true: 1" in first
  assert worst.startswith("✗ 0 88%true: 1✗ 1 62%true: 0")


def test_several_data_sets(tmp_path):
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
  write_run(tmp_path / "a", "imagenet/x", evals, [row], (2, 2))
  page = Page(report.write_report(str(tmp_path)).read_text())
  assert page.tiles == [
    ["0.0%", "val (imagenet validation), top-1", ""],
    ["25.0%", "real (my_real validation), top-1", ""],
    ["50.0%", "again (imagenet validation), top-1", ""],
    ["50.0%", "pets (oxford_pets test), 25-shot, L2 2", ""],
    ["12.5%", "cars (cars test), 5-shot, L2 2", ""],
  ]
  start = page.rows.index(["", "top-1", "balanced", "top-5", "loss", "images"])
  scores = [r[0] for r in page.rows[start + 1 : start + 4]]
  assert scores == [t[1].removesuffix(", top-1") for t in page.tiles[:3]]
  assert page.rows[start + 2][1:] == ["25.0%", "—", "—", "1.5", "10,000"]


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


def test_a_page_is_replaced_as_a_whole(demo, tmp_path):
  """So an end in the middle leaves the one of before: its bytes still are."""
  for name in ("report.html", "summary.json"):
    (tmp_path / name).write_text("before")
    (tmp_path / f"linked_{name}").hardlink_to(tmp_path / name)
  report.write_report(str(demo / "scratch"), out=str(tmp_path))
  text = (tmp_path / "report.html").read_text()
  assert text.startswith("<!doctype html>")
  assert "few-shot accuracies, of which no run wrote any" in text
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["runs"]["scratch"]["test/top1"] == 0.625
  assert summary["wall_seconds"] == 3.0
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
