"""A search goes on: what changed meanwhile, and what is there already."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tiny
from PIL import Image

from vit_jax import sweep as sweep_lib
from vit_jax import train
from vit_jax.config import ConfigError, to_dict
from vit_jax.runtime import search
from vit_jax.sweep import Task

GRID = {"optim.lr": ["0.1", "0.3"]}
SCORE = {"kind": "classification", "ops": "decode|resize(16)"}


@pytest.fixture
def images(tmp_path):
  root = tmp_path / "images"
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


@pytest.fixture
def runs(monkeypatch):
  """The names of the runs that were trained; the score is the rate."""
  found = []

  def trained(config, workdir):
    folder = pathlib.Path(workdir)
    found.append(folder.name)
    folder.mkdir(parents=True)
    row = {"step": 6, "time": 0.0}
    row |= {f"{e.name}/top1": config.optim.lr for e in config.evals}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.json").write_text(json.dumps(to_dict(config)))

  monkeypatch.setattr(train, "train_and_evaluate", trained)
  return found


def _task(images, grid=GRID, test="test") -> Task:
  config = tiny.config(
    data__dataset=f"folder:{images}",
    data__batch_size=8,
    evals={"test": {**SCORE, "split": test}, "val": {**SCORE, "split": "val"}},
  )
  return Task(config, grid)


def _sweep(task, folder, **options):
  return sweep_lib.sweep({"": task}, str(folder), **options)["tasks"][""]


def _as_killed(folder):
  """Leaves what a search has that was killed during its second point."""
  shutil.rmtree(folder / "optim.lr=0.3")
  shutil.rmtree(folder / "final")


@pytest.mark.parametrize("split", ["train", "val"])
def test_points_are_not_compared_on_different_data(
  images, tmp_path, runs, split
):
  folder = tmp_path / "search"
  before = _sweep(_task(images), folder)
  shutil.copy(images / "test/a/0.png", images / split / "a/0.png")
  assert _sweep(_task(images), folder) == before  # it is over
  _as_killed(folder)
  with pytest.raises(ConfigError) as e:
    _sweep(_task(images), folder)
  assert f"[{split}] with other records than when the search in" in str(e.value)
  assert len(runs) == 3


def test_the_test_may_change_until_it_is_scored(images, tmp_path, runs):
  folder = tmp_path / "search"
  _sweep(_task(images), folder)
  _as_killed(folder)
  result = _sweep(_task(images, test="test[:4]"), folder)
  assert result["splits"]["test"]["records"] == 4
  assert json.loads((folder / "splits.json").read_text()) == result["splits"]
  assert runs == ["optim.lr=0.1", *["optim.lr=0.3", "final"] * 2]


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
      "--grid: got 'optim.lr' twice, expected all of its values in one"
      " --grid=optim.lr=0.1,0.2,0.3.",
    ),
    (None, "got 'cosine' for 'optim.schedule' of get_grid, expected a tuple"),
  ],
)
def test_grids_that_are_refused(tmp_path, text, message):
  file = tmp_path / "c.py"
  file.write_text(
    "def get_config(): pass\n"
    "def get_grid(): return {'optim.schedule': 'cosine'}\n"
  )
  with pytest.raises(ConfigError, match=re.escape(message)):
    search.grid_of(text, str(file))


def test_an_option_without_values_is_refused(images, tmp_path):
  with pytest.raises(ConfigError, match="got 'optim.lr' without a value"):
    _sweep(_task(images, {"optim.lr": []}), tmp_path / "a")
