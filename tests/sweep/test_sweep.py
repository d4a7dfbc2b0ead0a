"""Searches: chosen by what is held out, scored once, resumed, refused."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tiny
from etils import epath
from PIL import Image

from vit_jax import train
from vit_jax.config import ConfigError, cli, defaults, freeze, to_dict
from vit_jax.tools.sweep import points
from vit_jax.tools.sweep import sweep as sweep_lib
from vit_jax.tools.sweep.sweep import Task
from vit_jax.writers.metric_writer import read_metrics

OPS = "decode|resize(16)"
SCORE = {"kind": "classification", "ops": OPS, "batch_size": 16}
DARK, BRIGHT = 60, 200
# Split -> class -> brightness and number of its images. A model that learns
# nothing says "a" to all (its head is zero), and so is best on `val`, where "a"
# looks like the "b" of the training split; it is worst on `test`.
IMAGES = {
  "train": {"a": (DARK, 20), "b": (BRIGHT, 20)},
  "val": {"a": (BRIGHT, 10), "b": (BRIGHT, 2)},
  "test": {"a": (DARK, 4), "b": (BRIGHT, 12)},
}
# The last one is 0 in float32: nothing is learned.
GRID = {"optim.lr": ["0.03", "1e-50"]}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
  for split, classes in IMAGES.items():
    for label, (brightness, count) in classes.items():
      folder = root / split / label
      folder.mkdir(parents=True)
      for i in range(count):
        pixels = brightness + rng.integers(0, 40, (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
  return root


def _config(images, **changes):
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=6, log_steps=1)))
  c.model.depth = 1
  c.data.dataset = f"folder:{images}"
  c.data.batch_size = 8
  c.optim.clip_norm = None
  c.evals = {
    "test": {**SCORE, "split": "test", "every_steps": 2},
    "val": {**SCORE, "split": "val", "every_steps": 3},
  }
  tiny.apply(c, changes)
  return freeze(c)


@pytest.fixture(scope="module")
def searched(images, tmp_path_factory):
  folder = tmp_path_factory.mktemp("search")
  task = Task(_config(images), GRID)
  results = sweep_lib.sweep({"": task}, str(folder))
  return folder, results["tasks"][""]


@pytest.mark.slow
def test_is_chosen_by_what_is_held_out_not_by_the_test(searched):
  _, result = searched
  trained, untrained = result["points"]
  assert untrained["scores"]["val/top1"] == pytest.approx(10 / 12)
  assert trained["scores"]["val/top1"] == pytest.approx(2 / 12)
  assert result["best"] == untrained["name"] == "optim.lr=1e-50"
  # By the test, the trained one would have been: see the next test.
  assert result["final"]["scores"]["test/top1"] == pytest.approx(4 / 16)


@pytest.mark.nightly
def test_the_test_would_choose_another(images, tmp_path):
  train.train_and_evaluate(_config(images, optim__lr=0.03), str(tmp_path))
  last = read_metrics(str(tmp_path))[-2:]
  scores = {k: v for row in last for k, v in row.items()}
  assert scores["test/top1"] == 1 and scores["val/top1"] < 0.2


@pytest.mark.slow
def test_what_the_runs_are(searched):
  """Points know no test; the best is trained on all data and scored once."""
  folder, result = searched
  read = lambda path: json.loads((folder / path).read_text())
  for point in result["points"]:
    name = point["name"]
    assert list(read(f"{name}/config.json")["evals"]) == ["val"]
    rows = read_metrics(str(folder / name))
    assert not any("test" in k for r in rows for k in r)
    assert not (folder / name / "checkpoints").exists()
  last = read("final/config.json")
  assert list(last["evals"]) == ["test"]
  assert last["data"]["split"] == "train+val" and last["optim"]["lr"] == 1e-50
  assert read("final/metadata.json")["num_examples"] == 40 + 12
  rows = read_metrics(str(folder / "final"))
  assert [r["step"] for r in rows if "test/top1" in r] == [6]
  assert (folder / "final" / "checkpoints" / "6").is_dir()
  splits = read("splits.json")
  assert splits == result["splits"]
  assert splits["train"]["records"] == 40 and splits["train"]["identity"]


@pytest.mark.slow
def test_the_same_command_does_nothing_twice(searched, images, capsys):
  folder, result = searched
  task = Task(_config(images, log_steps=2), GRID)  # what changes no result
  capsys.readouterr()
  again = sweep_lib.sweep({"": task}, str(folder))
  out = capsys.readouterr().out
  assert again["tasks"][""] == result
  assert "run  " not in out
  assert re.search(r"\| 1e-50 +\| 83.33 +\| 0.6931 +\| 6 +\| \*\*chosen", out)
  assert "Best by `val`: optim.lr=1e-50. Trained on all training data," in out
  assert "test top-1 25.00 % of 16 images" in out
  assert out.strip() in (folder / "sweep.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes, grid, message",
  [
    (
      {},
      {"optim.lr": [*GRID["optim.lr"], "0.01"]},
      "is scored on the test data already",
    ),
    ({"seed": 1}, GRID, "config.seed was 0, is now 1: the run"),
  ],
)
def test_another_search_in_the_folder_is_refused(
  searched, images, changes, grid, message
):
  folder, _ = searched
  with pytest.raises(ConfigError, match=message):
    sweep_lib.sweep({"": Task(_config(images, **changes), grid)}, str(folder))


@pytest.mark.slow
def test_goes_on_where_it_was_killed(images, tmp_path, monkeypatch):
  """The second point is stopped, the first not trained again; one diverges."""
  runs = []

  def trained(config, workdir):
    """Writes what a run does."""
    runs.append((config.optim.lr, config.data.split))
    if len(runs) == 2:
      raise KeyboardInterrupt
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True)
    row = {"step": 6, "time": 0.0, "train/loss": 1.0}
    for e in config.evals:
      row |= {f"{e.name}/top1": config.optim.lr, f"{e.name}/loss": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "checkpoints").mkdir()
    if config.optim.lr > 1:
      raise FloatingPointError("loss is nan at step 6")

  task = Task(_config(images), {"optim.lr": ["0.3", "0.1", "9"]})
  monkeypatch.setattr(train, "train_and_evaluate", trained)
  with pytest.raises(KeyboardInterrupt):
    sweep_lib.sweep({"": task}, str(tmp_path))
  (result,) = json.loads((tmp_path / "sweep.json").read_text())[
    "tasks"
  ].values()
  assert [p["name"] for p in result["points"]] == ["optim.lr=0.3"]
  assert result["best"] is None
  assert "is not finished" in (tmp_path / "sweep.md").read_text()
  (result,) = sweep_lib.sweep({"": task}, str(tmp_path))["tasks"].values()
  assert runs == [
    *((lr, "train") for lr in (0.3, 0.1, 0.1, 9.0)),
    (0.3, "train+val"),
  ]
  assert [p["scores"]["val/top1"] for p in result["points"]] == [0.3, 0.1, 9.0]
  assert result["points"][2]["error"] == "loss is nan at step 6"
  text = (tmp_path / "sweep.md").read_text()
  assert re.search(r"\| 9 +\| +\| +\| 6 +\| diverged +\|", text)
  assert "- optim.lr=9 diverged: loss is nan at step 6" in text
  # The error names its checkpoints, from which its steps can be repeated.
  with_weights = [p.parent.name for p in (tmp_path).glob("*/checkpoints")]
  assert sorted(with_weights) == ["final", "optim.lr=9"]
  assert result["final"]["scores"] == {"test/top1": 0.3, "test/loss": 1.0}


@pytest.mark.parametrize(
  "changes, grid, message",
  [
    (
      {"evals": {"test": {**SCORE, "split": "test"}}},
      GRID,
      "config.evals: got test, expected 'val', and",
    ),
    (
      {"evals": {"val": {**SCORE, "split": "val"}}},
      GRID,
      "config.evals: got val, expected 'val', and",
    ),
    (
      {"evals__val__split": "test[:3]"},
      GRID,
      "config.evals.test.split: got 'test', expected no records of"
      " config.evals.val.split='test[:3]': it has 3 of them",
    ),
    (
      {"evals__val__split": "train[30:]"},
      GRID,
      "config.evals.val.split: got 'train[30:]', expected no records of",
    ),
    (
      {"evals__test__split": "train[:5]"},
      GRID,
      "config.evals.test.split: got 'train[:5]', expected no records of",
    ),
    (
      {"data__split": "train@20"},
      GRID,
      "config.data.split: got 'train@20', expected a split without",
    ),
    (
      {"evals__val__kind": "multilabel"},
      GRID,
      "config.evals.val.kind: got 'multilabel', expected 'classification', be",
    ),
    (
      {"evals__val__kind": "regression"},
      GRID,
      "config.evals.val.kind: got 'regression', expected 'classification', be",
    ),
    (
      {},
      {"init": ["None", "nothere"]},
      "init=nothere: config.init: got 'nothere', which does not exist",
    ),
    (
      {"evals__val__split": "val@5"},
      GRID,
      "config.evals.val.split: got 'val@5', expected a split without",
    ),
    ({}, {}, "--grid: got none"),
    ({}, {"evals.val.split": ["test"]}, "got 'evals.val.split', expected ano"),
    ({}, {"optim.rl": ["1"]}, "config.optim.rl: no such option. Did you mean"),
    ({}, {"optim.lr": ["1", "1"]}, "two points for the folder 'optim.lr=1'"),
    ({}, {"optim.lr": ["-1"]}, "optim.lr=-1: config.optim.lr: got -1.0"),
  ],
)
def test_searches_that_are_refused(images, tmp_path, changes, grid, message):
  with pytest.raises(ConfigError) as e:
    sweep_lib.sweep({"": Task(_config(images, **changes), grid)}, str(tmp_path))
  assert message in str(e.value)
  assert not list(tmp_path.iterdir())


def test_an_empty_value_is_left_out(images):
  grid = points.grid_of("optim.lr=0.1, 0.3,", "")
  assert grid == {"optim.lr": ["0.1", "0.3"]}
  for text in ("optim.lr", "optim.lr=", "optim.lr= ,"):
    task = Task(_config(images), points.grid_of(text, ""))
    (error,) = points.check(task, epath.Path("none"))
    assert "'optim.lr' without a value" in error


def test_ties_are_decided_by_the_loss_then_by_the_order():
  rows = [
    {
      "name": name,
      "error": error,
      "scores": {"val/top1": top1, "val/loss": loss},
    }
    for name, top1, loss, error in [
      ("a", 0.5, 1.0, None),
      ("b", 0.8, 0.9, None),
      ("c", 0.8, 0.7, None),
      ("d", 0.8, 0.7, None),
      ("e", 0.9, 0.1, "diverged"),
    ]
  ]
  assert points.best_point(rows) == "c"
  # Of one whose scores are not finite, none was written.
  without = {"name": "z", "error": None, "scores": {}}
  assert points.best_point([without, *rows]) == "c"
  assert points.best_point(rows[-1:]) is None


@pytest.mark.slow
def test_several_grids_multiply(images):
  text = "optim.lr=0.1,0.3\nconfig.total_steps=5, 6"
  grid = points.grid_of(text, "")
  every = points.points(Task(_config(images), grid))
  assert [p.name for p in every] == [
    "optim.lr=0.1,total_steps=5",
    "optim.lr=0.1,total_steps=6",
    "optim.lr=0.3,total_steps=5",
    "optim.lr=0.3,total_steps=6",
  ]
  assert every[2].config.optim.lr == 0.3 and every[2].config.total_steps == 5


def test_flags_of_the_command():
  parsed = cli.parse_tasks(
    "x",
    {"grid": "", "available": ""},
    [
      "--config=configs/finetune.py:model=R50x1,dataset=imagenet2012",
      "--grid=optim.lr=1,2",
      "--grid=total_steps=3",
      "--available",
    ],
    switches=("available",),
    several=("grid",),
  )
  ((group, source, args),) = parsed.values()
  assert not args.errors and not group
  assert args.flags["grid"] == "optim.lr=1,2\ntotal_steps=3"
  assert points.grid_of(None, source) == {
    "optim.lr": ["0.003", "0.01", "0.03", "0.06"]
  }
  assert points.grid_of(None, "configs/glyphs.py") == {}


VTAB = (
  "--config=configs/vtab.py:task={},model=B/16,res=32",
  *("--config.total_steps=2", "--config.optim.warmup_steps=0", "--fake_data"),
  *("--config.model.width=32", "--config.model.depth=1"),
  *("--config.model.mlp_dim=32", "--config.model.num_heads=4"),
  *("--config.data.batch_size=8", "--config.model.dtype=float32"),
)


@functools.cache
def _all_of_vtab():
  """Tasks of configs/vtab.py on fake data, with a tiny model and two steps."""
  options = [word.format("all") for word in VTAB]
  parsed = cli.parse_tasks("x", {"grid": ""}, options, several=("grid",))
  assert not any(args.errors for _, _, args in parsed.values())
  return {
    name: Task(args.config, points.grid_of(None, source), group)
    for name, (group, source, args) in parsed.items()
  }


def _vtab(*tasks):
  return {name: _all_of_vtab()[name] for name in tasks}


@pytest.mark.slow
def test_what_is_trained_on_is_not_held_out_in_vtab(tmp_path):
  (task,) = _vtab("clevr_count").values()
  data = dataclasses.replace(task.config.data, split="train800val200")
  config = dataclasses.replace(task.config, data=data)
  with pytest.raises(ConfigError) as e:
    sweep_lib.sweep({"": task._replace(config=config)}, str(tmp_path))
  assert (
    "config.evals.val.split: got 'val200', expected no records of"
    " config.data.split='train800val200': it has 200 of them."
  ) in str(e.value)


@pytest.mark.slow
def test_all_tasks_of_vtab_are_searched():
  tasks = _all_of_vtab()
  assert len(tasks) == 19
  for name, task in tasks.items():
    (point,) = points.points(task)
    last = points.final_config(task.config, point.config)
    assert point.config.data.dataset == f"vtab:{name}"
    assert point.config.data.split == "train800"
    assert [e.split for e in point.config.evals] == ["val200"]
    assert last.data.split == "train800+val200"
    assert [e.split for e in last.evals] == ["test"]


@pytest.mark.slow
def test_data_that_are_not_there_are_refused_or_left_out(tmp_path, capsys):
  tasks = {
    name: task._replace(
      config=dataclasses.replace(task.config, fake_data=False)
    )
    for name, task in _vtab("dtd", "eurosat").items()
  }
  with pytest.raises(ConfigError) as e:
    sweep_lib.sweep(tasks, str(tmp_path))
  assert "dtd: config.data.dataset: got data set 'dtd:3.*.*', which is not" in (
    str(e.value)
  )
  assert "eurosat: config.data.dataset: got" in str(e.value)
  with pytest.raises(ConfigError, match="eurosat: config.data.dataset: got"):
    sweep_lib.sweep(tasks, str(tmp_path), only_available=True)
  assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_some_tasks_are_left_out_and_two_searches_compared(tmp_path):
  tasks = _vtab("dtd", "kitti_distance")
  missing = _vtab("svhn")["svhn"]
  config = dataclasses.replace(missing.config, fake_data=False)
  tasks["svhn"] = missing._replace(config=config)
  first, second = str(tmp_path / "first"), str(tmp_path / "second")
  results = sweep_lib.sweep(tasks, first, only_available=True)
  assert list(results["left_out"]) == ["svhn"]
  text = (tmp_path / "first" / "sweep.md").read_text()
  assert "| mean of 2 of 3 " in text and "| mean of 1 of 2 " in text
  assert "- svhn is left out: config.data.dataset: got data set" in text
  assert (tmp_path / "first/kitti_distance/final/checkpoints/2").is_dir()
  sweep_lib.sweep({"dtd": tasks["dtd"]}, second, against=first)
  text = (tmp_path / "second" / "sweep.md").read_text()
  assert "against" in text and "other records" not in text


@pytest.mark.nightly
def test_vtab_by_its_command(tmp_path):
  tasks = [word.format("specialized") for word in VTAB]
  command = [sys.executable, "-m", "vit_jax", "sweep", *tasks]
  command += [f"--workdir={tmp_path}", "--grid=optim.lr=0.1,0.01"]
  env = {**os.environ, "XLA_FLAGS": ""}  # one device
  for _ in range(2):  # the second time all is there
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
  assert "run  " not in done.stdout
  rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
  assert sum(row[2].strip() == "specialized" for row in rows) == 5
  assert any(row[1].strip() == "mean of 4" for row in rows)
  table = json.loads((tmp_path / "sweep.json").read_text())
  for result in table["tasks"].values():
    assert (
      len(result["points"]) == 2 and "test/top1" in (result["final"]["scores"])
    )


@pytest.mark.parametrize(
  "changes, is_another",
  [
    ({"optim__microbatch": 1, "mesh__fsdp": 2}, False),
    ({"watchdog_seconds": 60.0, "model__remat": "full"}, False),
    ({"optim__lr": 0.5}, True),
    ({"total_steps": 7}, True),
    ({"on_nonfinite": "skip"}, True),
  ],
)
def test_a_finished_point_counts_while_it_would_score_the_same(
  tmp_path, changes, is_another
):
  # The rate of "constant" does not depend on the length.
  config = lambda **c: tiny.config(optim__schedule="constant", **c)
  written = json.dumps(to_dict(config()))
  (tmp_path / "config.json").write_text(written)
  errors = points.other_run_errors(config(**changes), epath.Path(tmp_path))
  assert len(errors) == (len(changes) if is_another else 0)
