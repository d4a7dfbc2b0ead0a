"""A search goes on: what changed meanwhile, and what is there already."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import tiny
from PIL import Image

from vit_jax import train
from vit_jax.batch import DataError
from vit_jax.checkpointing import checkpointer
from vit_jax.config import ConfigError, cli, to_dict
from vit_jax.tools.sweep import points
from vit_jax.tools.sweep import sweep as sweep_lib
from vit_jax.tools.sweep.sweep import Task

GRID = {"optim.lr": ["0.1", "0.3"]}
SCORE = {"kind": "classification", "ops": "decode|resize(16)"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  root = tmp_path_factory.mktemp("images")
  for split in ("train", "val", "test"):
    for label in ("a", "b"):
      folder = root / split / label
      folder.mkdir(parents=True)
      for i in range(8):
        name = f"{split}{label}{i}"
        seed = int.from_bytes(name.encode(), "big")
        pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
  return root


def _trains(names):
  """Stands for training: the score is the rate, `names` gets each run's."""

  def trained(config, workdir):
    folder = pathlib.Path(workdir)
    names.append(folder.name)
    folder.mkdir(parents=True)
    row = {"step": 6, "time": 0.0}
    row |= {f"{e.name}/top1": config.optim.lr for e in config.evals}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.json").write_text(json.dumps(to_dict(config)))

  return trained


@pytest.fixture
def runs(monkeypatch):
  """The names of the runs that were trained."""
  names = []
  monkeypatch.setattr(train, "train_and_evaluate", _trains(names))
  return names


@pytest.fixture(scope="module")
def finished(images, tmp_path_factory):
  folder = tmp_path_factory.mktemp("finished") / "search"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, "train_and_evaluate", _trains([]))
    _sweep(_task(images), folder)
  return folder


@pytest.fixture
def search(finished, tmp_path):
  """A copy of a search that is over."""
  return shutil.copytree(finished, tmp_path / "search")


def _task(images, grid=GRID, test="test") -> Task:
  config = tiny.config(
    data__dataset=f"folder:{images}",
    data__batch_size=8,
    model__depth=1,
    evals={"test": {**SCORE, "split": test}, "val": {**SCORE, "split": "val"}},
  )
  return Task(config, grid)


def _sweep(task, folder, **options):
  return sweep_lib.sweep({"": task}, str(folder), **options)["tasks"][""]


def _as_killed(folder):
  """Leaves what a search has that was killed during its second point."""
  shutil.rmtree(folder / "optim.lr=0.3")
  shutil.rmtree(folder / "final")


@pytest.fixture
def changes(images):
  """Adds an image to a split until the test is over."""
  added = []

  def change(split):
    added.append(images / split / "a/8.png")
    shutil.copy(images / "test/a/0.png", added[-1])

  yield change
  for file in added:
    file.unlink()


@pytest.mark.slow
def test_points_are_not_compared_on_different_data(
  images, search, runs, changes
):
  for split in ("train", "val"):
    changes(split)
  _as_killed(search)
  with pytest.raises(ConfigError) as e:
    _sweep(_task(images), search)
  for split in ("train", "val"):
    text = f"[{split}] with other records than when the search in"
    assert text in str(e.value)
  assert not runs


@pytest.mark.slow
def test_a_search_that_is_over_stays_as_it_is(images, search, runs, changes):
  changes("train")
  before = json.loads((search / "sweep.json").read_text())["tasks"][""]
  assert _sweep(_task(images), search) == before and not runs


@pytest.mark.slow
def test_the_test_may_change_until_it_is_scored(images, search, runs):
  _as_killed(search)
  result = _sweep(_task(images, test="test[:4]"), search)
  assert result["splits"]["test"]["records"] == 4
  assert json.loads((search / "splits.json").read_text()) == result["splits"]
  assert runs == ["optim.lr=0.3", "final"]


def test_long_values_have_folders_of_their_own(images, tmp_path, runs):
  ops = "decode|resize(16)" + "|pad(4)|random_crop(16)" * 12
  _sweep(_task(images, {"data.ops": [ops, f"{ops}|flip_lr"]}), tmp_path / "a")
  first, second, last = runs
  assert first != second and last == "final"
  assert (
    first[:191]
    == second[:191]
    == f"data.ops={ops}"[:191].translate(str.maketrans("|()", "___"))
  )
  assert len(first) == len(second) == 200


@pytest.mark.parametrize(
  "text, message",
  [
    (
      "optim.lr=0.1\nconfig.optim.lr=0.2,0.3",
      "--grid: got 'optim.lr' twice, expected --grid=optim.lr=0.1,0.2,0.3.",
    ),
    (None, "optim.schedule: got 'cosine', expected a tuple"),
  ],
)
def test_grids_that_are_refused(tmp_path, text, message):
  file = tmp_path / "c.py"
  file.write_text(
    "def get_config(): pass\n"
    "def get_grid(): return {'optim.schedule': 'cosine'}\n"
  )
  with pytest.raises(ConfigError, match=re.escape(message)):
    points.grid_of(text, str(file))


def test_other_points_after_the_test_are_refused(images, search, runs):
  """The best of fewer points is another, whose test would be a second one."""
  with pytest.raises(ConfigError, match="optim.lr was 0.3, is now 0.1: the ru"):
    _sweep(_task(images, {"optim.lr": ["0.1"]}), search)
  with pytest.raises(ConfigError, match="evals.test.split was 'test', is now"):
    _sweep(_task(images, test="test[:4]"), search)
  assert not runs


def test_a_damaged_search_is_not_compared_with(images, tmp_path, runs):
  (tmp_path / "sweep.json").write_text("")
  with pytest.raises(ConfigError, match="got no JSON"):
    _sweep(_task(images), tmp_path / "search", against=str(tmp_path))
  assert not runs and not (tmp_path / "search").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_training(
  images, tmp_path, runs
):
  (tmp_path / "file").touch()
  with pytest.raises(ConfigError, match="--workdir: got .*no files can be"):
    _sweep(_task(images), tmp_path / "file" / "search")
  assert not runs


def test_errors_of_a_run_end_the_command_in_words(
  images, tmp_path, monkeypatch
):
  """Those of a run that diverged do not; see test_sweep.py."""

  def trained(config, workdir):
    raise DataError("a message")

  monkeypatch.setattr(train, "train_and_evaluate", trained)
  (tmp_path / "c.py").write_text(
    "from vit_jax.config import defaults\n"
    "def get_config():\n"
    "  c = defaults()\n"
    f"  c.data.dataset = 'folder:{images}'\n"
    "  c.data.ops = 'decode|resize(16)'\n"
    "  c.data.batch_size, c.total_steps, c.optim.warmup_steps = 8, 6, 0\n"
    "  c.model.variant, c.model.depth = 'Ti/8', 1\n"
    f"  s = {SCORE}\n"
    "  c.evals = {k: {**s, 'split': k} for k in ('test', 'val')}\n"
    "  return c\n"
  )
  flags = {"grid": "", "workdir": "", "against": "", "available": ""}
  argv = [f"--config={tmp_path}/c.py", "--grid=optim.lr=0.1"]
  argv += [f"--workdir={tmp_path}/search"]
  flags |= dict.fromkeys(("coordinator", "num_processes", "process_id"), "")
  with pytest.raises(SystemExit, match="a message"):
    sweep_lib.main(cli.parse_tasks("sweep", flags, argv, several=("grid",)))


def test_a_length_in_epochs_takes_the_place_of_that_in_steps(images):
  every = points.points(_task(images, {"total_epochs": ["2", "3"]}))
  assert [p.config.total_steps for p in every] == [None, None]
  assert [p.config.total_epochs for p in every] == [2.0, 3.0]
  both = {"total_epochs": ["2"], "total_steps": ["5"]}
  message = "--grid: config.total_epochs: got both total_epochs and"
  with pytest.raises(ConfigError, match=message):
    points.points(_task(images, both))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "/checkpoints"])
def test_all_points_begin_from_the_same_step(images, tmp_path, runs, ending):
  """The run that init names trains on while the search is interrupted."""

  def save(step):
    path = tmp_path / "run" / "checkpoints" / str(step)
    checkpointer.write_params(str(path), params, {"grid": [2, 2]})

  shapes = tiny.Parts(tiny.config(model__depth=1)).shapes.params
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  save(3)
  task, folder = _task(images), tmp_path / "search"
  init = f"{tmp_path}/run{ending}"
  task = task._replace(config=dataclasses.replace(task.config, init=init))
  first = _sweep(task, folder)
  _as_killed(folder)
  save(6)
  assert _sweep(task, folder) == first
  inits = {
    json.loads(f.read_text())["init"] for f in folder.glob("*/config.json")
  }
  assert inits == {f"{tmp_path}/run/checkpoints/3"}
  _sweep(task, tmp_path / "new")
  config = json.loads((tmp_path / "new" / "final" / "config.json").read_text())
  assert config["init"] == f"{tmp_path}/run/checkpoints/6"
