"""A made-up demo: its summary to the digit, its page without the network."""

import html.parser
import json
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import report, runs
from vit_jax.checkpoint import Checkpointer
from vit_jax.config import (
  CheckpointConfig,
  ClassificationConfig,
  Config,
  DataConfig,
  FewshotConfig,
  to_dict,
)

VERSIONS = {"jax": "0.10.2", "vit_jax": "0.1"}
SHOTS = ("1", "5", "10", "25")


def _write_run(path, dataset, evals, rows, grid, init=None, names=("Σ", "$")):
  path.mkdir(parents=True)
  config = Config(data=DataConfig(dataset=dataset), evals=evals, init=init)
  (path / "config.json").write_text(json.dumps(to_dict(config)))
  metadata = {
    "class_names": names,
    "num_classes": len(names),
    "grid": grid,
    "has_cls_row": True,
    "num_params": 1234,
    "devices": "1 x cpu",
    "versions": VERSIONS,
  }
  (path / "metadata.json").write_text(json.dumps(metadata))
  text = "".join(json.dumps(r) + "\n" for r in rows)
  (path / "metrics.jsonl").write_text(text + '{"step": 9, "cut o')
  np.savez(
    path / "predictions.npz",
    image=np.zeros((3, 8, 8, 3), np.uint8),
    label=np.array([0, 1, 1]),
    prediction=np.array([0, 1, 0]),
    probability=np.array([0.5, 0.75, 1.0], np.float32),
  )
  checkpointer = Checkpointer(str(path), CheckpointConfig())
  table = jnp.ones((1, grid[0] * grid[1] + 1, 4))
  params = {"Transformer": {"posembed_input": {"pos_embedding": table}}}
  state = types.SimpleNamespace(
    step=jnp.int32(2), params=params, opt_state=(), ema=None
  )
  checkpointer.save(2, state, {"grid": list(grid), "has_cls_row": True})
  checkpointer.close()


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
  return {f"{prefix}/{k}shot": first + i / 8 for i, k in enumerate(SHOTS)}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
  base = tmp_path_factory.mktemp("runs") / "demo"
  _write_run(
    base / "pretrain",
    "glyphs/size=32",
    (
      ClassificationConfig(name="val"),
      FewshotConfig(name="digits", dataset="digits"),
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
    _write_run(base / name, "digits", test, rows, (3, 3), init, tuple("01"))
  facts = {"wall_seconds": 12.5, "versions": VERSIONS}
  (base / "demo.json").write_text(json.dumps(facts))
  report.main([str(base)])
  return base


def _shots_of(first):
  return {k: first + i / 8 for i, k in enumerate(SHOTS)}


def test_summary_of_the_demo(demo):
  assert json.loads((demo / "summary.json").read_text()) == {
    "glyphs_val_accuracy": 0.75,
    "fewshot": _shots_of(0.5),
    "fewshot_random_init": _shots_of(0.0),
    "fewshot_raw_pixels": _shots_of(0.125),
    "digits_test_accuracy": 0.875,
    "digits_test_accuracy_from_scratch": 0.625,
    "wall_seconds": 12.5,
    "versions": VERSIONS,
  }


class _Page(html.parser.HTMLParser):
  """Collects tags; complains of one that is closed and was not open."""

  def __init__(self, text):
    super().__init__()
    self.images, self.links, self.open = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    if tag == "img":
      self.images.append(attrs)
    self.links += [v for k, v in attrs.items() if k in ("src", "href")]
    if tag not in ("img", "meta", "link"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def test_page_is_self_contained(demo):
  text = (demo / "report.html").read_text()
  page = _Page(text)
  assert page.open == []
  assert all(i["src"].startswith("data:image/png;base64,") for i in page.images)
  assert all(i["alt"] for i in page.images)
  assert all(link.startswith("data:") for link in page.links)
  assert "http" not in text and "@import" not in text and "url(" not in text
  assert "Left out" not in text


def test_pictures(demo):
  assert sorted(p.name for p in (demo / "figures").iterdir()) == [
    "accuracy_digits.png",
    "accuracy_glyphs.png",
    "fewshot_pretrain.png",
    "learning_rate_digits.png",
    "learning_rate_glyphs.png",
    "loss_digits.png",
    "loss_glyphs.png",
    "positions_finetune.png",
    "positions_pretrain.png",
    "positions_pretrain_for_finetune.png",
    "positions_scratch.png",
    "predictions_finetune.png",
    "predictions_pretrain.png",
    "predictions_scratch.png",
    "throughput_digits.png",
    "throughput_glyphs.png",
  ]


def test_a_single_run(demo, tmp_path):
  path = report.write_report(str(demo / "scratch"), str(tmp_path / "out"))
  assert path == tmp_path / "out" / "report.html"
  assert "few-shot accuracies, of which no run wrote any" in path.read_text()
  summary = json.loads((tmp_path / "out" / "summary.json").read_text())
  assert summary["runs"]["scratch"]["test/top1"] == 0.625
  assert summary["wall_seconds"] == 3.0


def test_what_is_missing_is_said(tmp_path):
  for name, line in (
    ("a", '{"step": 1, "time": 1.0, "train/loss": NaN}\n'),
    ("b<i>", '{"step": 1, "time": 1.0, "train/loss": 2.5}\n'),
  ):
    (tmp_path / name).mkdir()
    (tmp_path / name / "metrics.jsonl").write_text(line)
  text = report.write_report(str(tmp_path)).read_text()
  assert _Page(text).open == []
  for words in (
    "config.json of a, b&lt;i&gt;",
    "metadata.json of a, b&lt;i&gt;",
    "loss of a;",
    "accuracy of a, b&lt;i&gt;",
    "predictions.npz of a, b&lt;i&gt;",
    "a: no checkpoint",
    "Versions were not recorded",
  ):
    assert words in text
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["runs"] == {
    "a": {"train/loss": None},
    "b<i>": {"train/loss": 2.5},
  }


def test_a_demo_that_was_interrupted(demo, tmp_path):
  (tmp_path / "demo.json").write_text("{}")
  (tmp_path / "pretrain").symlink_to(demo / "pretrain")
  summary = runs.summarise(runs.find_runs(tmp_path), tmp_path)
  assert summary["glyphs_val_accuracy"] == 0.75
  assert summary["digits_test_accuracy"] is None


def test_time_since_the_start_of_the_demo(demo, tmp_path):
  for name in ("pretrain", "finetune", "scratch"):
    (tmp_path / name).symlink_to(demo / name)
  (tmp_path / "started").write_text("54\n")  # The last line is of 104.
  summary = runs.summarise(runs.find_runs(tmp_path), tmp_path)
  assert summary["wall_seconds"] == 50.0
  (tmp_path / "started").unlink()
  summary = runs.summarise(runs.find_runs(tmp_path), tmp_path)
  assert summary["wall_seconds"] == 4.0 + 3.0 + 3.0


def test_a_damaged_checkpoint_does_not_stop_the_report(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  (tmp_path / "checkpoints" / "3" / "params").mkdir(parents=True)
  text = report.write_report(str(tmp_path)).read_text()
  assert f"Left out: {tmp_path.name}: " in text


def test_what_is_scored_once_stands_for_the_run_but_is_no_curve():
  evals = {
    name: {"kind": "classification", "split": name} for name in ("test", "val")
  }
  rows = [{"step": s, "val/top1": s / 8} for s in (1, 2, 3)]
  rows.append({"step": 3, "test/top1": 0.5})
  path = pathlib.Path("runs/x")
  found = runs.Run("x", path, {"evals": evals}, {}, rows)
  assert found.top1() == "test/top1" and found.last(found.top1()) == 0.5
  assert found.curve() == "val/top1"
  assert runs.Run("z", path, {}, {}, []).curve() is None


def test_several_right_classes(tmp_path):
  np.savez(
    tmp_path / "predictions.npz",
    image=np.zeros((2, 4, 4, 3), np.uint8),
    label=np.array([[0, 1, 1], [1, 0, 0]], np.float32),
    prediction=np.array([2, 2]),
    probability=np.ones(2, np.float32),
  )
  run = runs.Run("x", tmp_path, {}, {"class_names": ["a", "b"]}, [])
  rows = runs.predictions(run, 9)
  assert rows["labels"] == ["2", "a"] and rows["guesses"] == ["2", "2"]


def test_errors(tmp_path):
  with pytest.raises(ValueError, match="nowhere.*no such directory"):
    report.write_report(str(tmp_path / "nowhere"))
  with pytest.raises(ValueError, match="without a run, expected metrics.jsonl"):
    report.write_report(str(tmp_path))
  with pytest.raises(SystemExit, match="without a run"):
    report.main([str(tmp_path)])
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json: expected JSON"):
    report.write_report(str(tmp_path))
