"""Searches: chosen by what is held out, scored once, resumed, refused."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import shared_runs
import tiny

from vit_jax.checkpointing import checkpointer
from vit_jax.commands import sweep as command
from vit_jax.config import ConfigError, cli, defaults, freeze, to_dict
from vit_jax.finetune import one_run
from vit_jax.tools.sweep import points
from vit_jax.tools.sweep import sweep as sweep_lib
from vit_jax.tools.sweep.sweep import Task
from vit_jax.writers.metric_writer import read_metrics

OPS = "decode|resize(16)"
SCORE = {"kind": "classification", "ops": OPS, "batch_size": 16}
# Split -> class -> colour and number of its images. A model that learns nothing
# says "a" to all (its head is zero), and so is best on `val`, where "a" looks
# like the "b" of the training split; it is worst on `test`.
IMAGES = {
  "train": {"a": ("blue", 20), "b": ("white", 20)},
  "val": {"a": ("white", 10), "b": ("white", 2)},
  "test": {"a": ("blue", 4), "b": ("white", 12)},
}
# The last one is 0 in float32: nothing is learned.
GRID = {"optim.lr": ["0.03", "1e-50"]}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  root = tmp_path_factory.mktemp("images")
  for split, classes in IMAGES.items():
    for label, (colour, count) in classes.items():
      shared_runs.folder(root / split, {label: colour}, count)
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


def _task(images, grid=GRID, **changes) -> Task:
  return Task(_config(images, **changes), grid)


def _sweep(task, folder, **options):
  return sweep_lib.sweep({"": task}, str(folder), **options)["tasks"][""]


@pytest.mark.slow
def test_the_best_is_chosen_without_the_test_data(images, tmp_path, capsys):
  """Points are scored on `val`; the best is trained on all, and scored once."""
  result = _sweep(_task(images), tmp_path)
  trained, untrained = result["points"]
  assert untrained["scores"]["val/top1"] == pytest.approx(10 / 12)
  assert trained["scores"]["val/top1"] == pytest.approx(2 / 12)
  assert result["best"] == untrained["name"] == "optim.lr=1e-50"
  # It says "a" to all; the trained one tells blue from white.
  assert result["final"]["scores"]["test/top1"] == pytest.approx(4 / 16)

  read = lambda path: json.loads((tmp_path / path).read_text())
  for point in result["points"]:
    name = point["name"]
    assert list(read(f"{name}/config.json")["evals"]) == ["val"]
    rows = read_metrics(str(tmp_path / name))
    assert not any("test" in k for r in rows for k in r)
    assert not (tmp_path / name / "checkpoints").exists()
  last = read("final/config.json")
  assert list(last["evals"]) == ["test"]
  assert last["data"]["split"] == "train+val" and last["optim"]["lr"] == 1e-50
  assert read("final/metadata.json")["num_examples"] == 40 + 12
  rows = read_metrics(str(tmp_path / "final"))
  assert [r["step"] for r in rows if "test/top1" in r] == [6]
  assert (tmp_path / "final/checkpoints/6").is_dir()
  assert read("splits.json")["train"]["records"] == 40

  # The same command trains nothing, also with a change that changes no result.
  capsys.readouterr()
  assert _sweep(_task(images, log_steps=2), tmp_path) == result
  out = capsys.readouterr().out
  assert "run  " not in out and "test top-1 25.00 % of 16 images" in out
  assert out.strip() in (tmp_path / "sweep.md").read_text()


# With a stand-in for training: `val` is best at the highest rate.


def _trains(names, stops_at=None):
  """Returns `one_run.run`; the names of the runs are appended to `names`."""

  def trained(config, workdir):
    folder = pathlib.Path(workdir)
    names.append(folder.name)
    if len(names) == stops_at:
      raise KeyboardInterrupt
    folder.mkdir(parents=True)
    row = {"step": 6, "time": 0.0, "train/loss": 1.0}
    for e in config.evals:
      row |= {f"{e.name}/top1": config.optim.lr, f"{e.name}/loss": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "checkpoints").mkdir()
    if config.optim.lr > 1:
      raise FloatingPointError("loss is nan at step 6")

  return functools.partial(one_run.run, train=trained)


def test_goes_on_where_it_was_killed(images, tmp_path):
  """The second point is stopped, the first not trained again; one diverges."""
  names = []
  run = _trains(names, stops_at=2)
  task = _task(images, {"optim.lr": ["0.3", "0.1", "9"]})
  with pytest.raises(KeyboardInterrupt):
    _sweep(task, tmp_path, run=run)
  result = json.loads((tmp_path / "sweep.json").read_text())["tasks"][""]
  assert [p["name"] for p in result["points"]] == ["optim.lr=0.3"]
  assert result["best"] is None
  assert "is not finished" in (tmp_path / "sweep.md").read_text()
  result = _sweep(task, tmp_path, run=run)
  assert names == [f"optim.lr={x}" for x in (0.3, 0.1, 0.1, 9)] + ["final"]
  assert [p["scores"]["val/top1"] for p in result["points"]] == [0.3, 0.1, 9.0]
  assert result["points"][2]["error"] == "loss is nan at step 6"
  # The error names its checkpoints, from which its steps can be repeated.
  with_weights = [p.parent.name for p in tmp_path.glob("*/checkpoints")]
  assert sorted(with_weights) == ["final", "optim.lr=9"]
  assert result["final"]["scores"] == {"test/top1": 0.3, "test/loss": 1.0}


RATES = {"optim.lr": ["0.1", "0.3"]}


@pytest.fixture(scope="module")
def finished(images, tmp_path_factory):
  folder = tmp_path_factory.mktemp("finished") / "search"
  _sweep(_task(images, RATES), folder, run=_trains([]))
  return folder


@pytest.fixture
def search(finished, tmp_path):
  """A copy of a search that is over."""
  return shutil.copytree(finished, tmp_path / "search")


def _as_killed(folder):
  """Leaves what a search has that was killed during its second point."""
  shutil.rmtree(folder / "optim.lr=0.3")
  shutil.rmtree(folder / "final")


@pytest.mark.slow
def test_a_search_that_is_over_is_left_alone(images, search):
  """Another one is refused: its test would be a second one."""
  names = []
  run = _trains(names)
  before = json.loads((search / "sweep.json").read_text())["tasks"][""]
  assert _sweep(_task(images, RATES), search, run=run) == before
  harmless = {"optim__microbatch": 1, "model__remat": "full"}
  assert _sweep(_task(images, RATES, **harmless), search, run=run) == before
  more = {"optim.lr": [*RATES["optim.lr"], "0.01"]}
  for task, words in (
    (_task(images, {"optim.lr": ["0.1"]}), "optim.lr was 0.3, is now 0.1"),
    (_task(images, more), "scored on the test data already"),
    # A resumed run may change these, but they change what a point scores.
    (_task(images, RATES, total_steps=7), "total_steps was 6, is now 7"),
    (_task(images, RATES, on_nonfinite="skip"), "on_nonfinite was"),
    (
      _task(images, RATES, evals__test__split="test[:4]"),
      "evals.test.split was 'test', is now",
    ),
  ):
    with pytest.raises(ConfigError, match=words):
      _sweep(task, search, run=run)
  assert not names


@pytest.mark.slow
def test_points_are_not_compared_on_different_data(images, search):
  """The test may change until it is scored."""
  names = []
  run = _trains(names)
  _as_killed(search)
  added = [images / split / "a/99.png" for split in ("train", "val")]
  for file in added:
    shutil.copy(images / "test/a/0.png", file)
  try:
    with pytest.raises(ConfigError) as e:
      _sweep(_task(images, RATES), search, run=run)
  finally:
    for file in added:
      file.unlink()
  for split in ("train", "val"):
    assert f"[{split}] with other records" in str(e.value)
  assert not names
  other = _task(images, RATES, evals__test__split="test[:4]")
  result = _sweep(other, search, run=run)
  assert result["splits"]["test"]["records"] == 4
  assert names == ["optim.lr=0.3", "final"]


@pytest.mark.nightly
def test_all_points_begin_from_the_same_step(images, tmp_path):
  """The run that init names trains on while the search is interrupted."""

  def save(step):
    path = tmp_path / "run" / "checkpoints" / str(step)
    checkpointer.write_params(str(path), params, {"grid": [2, 2]})

  shapes = tiny.Parts(tiny.config(model__depth=1)).shapes.params
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  save(3)
  folder, run = tmp_path / "search", _trains([])
  task = _task(images, RATES, init=f"{tmp_path}/run")
  first = _sweep(task, folder, run=run)
  _as_killed(folder)
  save(6)
  assert _sweep(task, folder, run=run) == first
  for file in folder.glob("*/config.json"):
    init = json.loads(file.read_text())["init"]
    assert init == f"{tmp_path}/run/checkpoints/3"


# What is refused: changes of the config, the grid, words of the message.

REFUSED = [
  ({"evals": {"test": {**SCORE, "split": "test"}}}, GRID, "config.evals:"),
  ({"evals": {"val": {**SCORE, "split": "val"}}}, GRID, "config.evals:"),
  (
    {"evals__val__split": "test[:3]"},
    GRID,
    *("config.evals.test.split", "config.evals.val.split", "3 of them"),
  ),
  ({"evals__val__split": "train[30:]"}, GRID, "config.evals.val.split", "no"),
  ({"evals__test__split": "train[:5]"}, GRID, "config.evals.test.split", "no"),
  ({"data__split": "train@20"}, GRID, "config.data.split", "without"),
  ({"evals__val__kind": "multilabel"}, GRID, "config.evals.val.kind", "class"),
  ({}, {"init": ["None", "no"]}, "init=no:", "config.init", "not exist"),
  ({}, {}, "--grid", "none"),
  ({}, {"optim.lr": []}, "'optim.lr'", "without a value"),
  ({}, {"evals.val.split": ["test"]}, "'evals.val.split'", "another"),
  ({}, {"optim.rl": ["1"]}, "config.optim.rl", "no such option"),
  ({}, {"optim.lr": ["1", "1"]}, "'optim.lr=1'", "two points"),
  ({}, {"optim.lr": ["-1"]}, "optim.lr=-1", "config.optim.lr", "-1.0"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[2])
def test_searches_that_are_refused(images, tmp_path, row):
  changes, grid, *words = row
  with pytest.raises(ConfigError) as e:
    _sweep(_task(images, grid, **changes), tmp_path)
  text = str(e.value)
  assert [word for word in words if word not in text] == [], text
  assert not list(tmp_path.iterdir())


def test_a_damaged_search_is_not_compared_with(images, tmp_path):
  (tmp_path / "sweep.json").write_text("")
  with pytest.raises(ConfigError, match="--against: .* no JSON"):
    _sweep(_task(images), tmp_path / "search", against=str(tmp_path))
  assert not (tmp_path / "search").exists()


# Points.


def test_grids_of_the_command_and_of_a_config_file(images, tmp_path):
  """Several multiply; an epoch's takes the place of a length in steps."""
  config = "--config=configs/finetune.py:model=R50x1,dataset=imagenet2012"
  flags = ["--grid=optim.lr=0.1, 0.3,", "--grid=config.total_epochs=5, 6"]
  ((_, source, args),) = command.parse([config, *flags]).values()
  assert not args.errors
  every = points.points(
    _task(images, points.grid_of(args.flags["grid"], source))
  )
  assert [p.name for p in every] == [
    "optim.lr=0.1,total_epochs=5",
    "optim.lr=0.1,total_epochs=6",
    "optim.lr=0.3,total_epochs=5",
    "optim.lr=0.3,total_epochs=6",
  ]
  last = every[-1].config
  assert last.optim.lr == 0.3
  assert last.total_epochs == 6 and last.total_steps is None
  rates = {"optim.lr": ["0.003", "0.01", "0.03", "0.06"]}
  assert points.grid_of(None, source) == rates
  assert points.grid_of(None, "configs/glyphs.py") == {}
  with pytest.raises(ConfigError, match="--grid.*optim.lr=0.1,0.2,0.3"):
    points.grid_of("optim.lr=0.1\nconfig.optim.lr=0.2,0.3", "")
  file = tmp_path / "c.py"
  file.write_text("def get_grid(): return {'optim.schedule': 'cosine'}\n")
  with pytest.raises(ConfigError, match="optim.schedule.*'cosine'.*tuple"):
    points.grid_of(None, str(file))


def test_ties_are_decided_by_the_loss_then_by_the_order():
  def row(name, top1, loss, error=None):
    scores = {"val/top1": top1, "val/loss": loss}
    return {"name": name, "error": error, "scores": scores}

  diverged = row("e", 0.9, 0.1, "diverged")
  rows = [row("a", 0.5, 1.0), row("b", 0.8, 0.9), row("c", 0.8, 0.7)]
  rows += [row("d", 0.8, 0.7), diverged]
  assert points.best_point(rows) == "c"
  # Where a score is not finite, none was written.
  without = {"name": "z", "error": None, "scores": {}}
  assert points.best_point([without, *rows]) == "c"
  assert points.best_point([diverged]) is None


# Searches of several tasks.

VTAB = (
  "--config=configs/vtab.py:task=all,model=B/16,res=32",
  *("--config.total_steps=2", "--config.optim.warmup_steps=0", "--fake_data"),
  *("--config.model.width=32", "--config.model.depth=1"),
  *("--config.model.mlp_dim=32", "--config.model.num_heads=4"),
  *("--config.data.batch_size=8", "--config.model.dtype=float32"),
)


@pytest.fixture(scope="module")
def vtab():
  """Tasks of configs/vtab.py on fake data, with a tiny model and two steps."""
  parsed = cli.parse_tasks("x", {"grid": ""}, [*VTAB], several=("grid",))
  assert not any(args.errors for _, _, args in parsed.values())
  return {
    name: Task(args.config, points.grid_of(None, source), group)
    for name, (group, source, args) in parsed.items()
  }


def _not_on_disk(task):
  return task._replace(config=dataclasses.replace(task.config, fake_data=False))


@pytest.mark.slow
def test_tasks_whose_data_are_not_there_are_refused(vtab, tmp_path):
  tasks = {name: _not_on_disk(vtab[name]) for name in ("dtd", "eurosat")}
  for only_available in (False, True):  # none would be left
    with pytest.raises(ConfigError) as e:
      sweep_lib.sweep(tasks, str(tmp_path), only_available=only_available)
    assert "eurosat: config.data.dataset: got" in str(e.value)
  assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_some_tasks_are_left_out_and_two_searches_compared(vtab, tmp_path):
  tasks = {name: vtab[name] for name in ("dtd", "kitti_distance")}
  tasks["svhn"] = _not_on_disk(vtab["svhn"])
  first, second = tmp_path / "first", tmp_path / "second"
  results = sweep_lib.sweep(tasks, str(first), only_available=True)
  assert list(results["left_out"]) == ["svhn"]
  text = (first / "sweep.md").read_text()
  assert "| mean of 2 of 3 " in text and "| mean of 1 of 2 " in text
  assert "- svhn is left out: config.data.dataset: got data set" in text
  folder = first / "kitti_distance/final"
  assert (folder / "checkpoints/2").is_dir()
  options = json.loads((folder / "config.json").read_text())
  assert options["data"]["split"] == "train800+val200"
  assert options["evals"]["test"]["split"] == "test"
  sweep_lib.sweep({"dtd": tasks["dtd"]}, str(second), against=str(first))
  text = (second / "sweep.md").read_text()
  assert "against" in text and "other records" not in text
