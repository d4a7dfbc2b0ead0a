"""A tiny run that was stopped and resumed, for all tests that read a run.

The fixture `run` of conftest.py trains it once.
"""

import contextlib
import dataclasses
import io
import pathlib
import shutil
from typing import Any

import numpy as np
import tiny
from PIL import Image

from vit_jax.callbacks import Callback
from vit_jax.checkpointing import checkpointer
from vit_jax.config import Config, defaults, freeze, to_dict

OPS = "decode|resize(16)"
COLOURS = {
  "blue": (0, 0, 200),
  "green": (0, 200, 0),
  "red": (200, 0, 0),
  "white": (200, 200, 200),
}
SCORE = {"kind": "classification", "split": "val", "ops": OPS}
FEW = {
  "kind": "fewshot",
  "ops": OPS,
  "train_split": "train",
  "shots": (1, 5),
  "every_steps": 8,
  "group": "few",
}
# The last one's data are not on disk.
EVALS = {
  "val": {**SCORE, "every_steps": 8},
  "a": {**FEW, "split": "val[:10]", "baselines": True},
  "b": {**FEW, "split": "val[10:]"},
  "pets": {**FEW, "dataset": "oxford_iiit_pet", "split": "test"},
}


def folder(root: pathlib.Path, colour_of: dict, num_images: int = 16) -> str:
  """Writes noisy images of a colour for each class; returns the data set."""
  rng = np.random.default_rng(num_images)
  for name, colour in colour_of.items():
    (root / name).mkdir(parents=True)
    for i in range(num_images):
      noise = rng.integers(0, 50, (8, 8, 3))
      image = Image.fromarray(np.uint8(noise + COLOURS[colour]))
      image.save(root / name / f"{i}.png")
  return f"folder:{root}"


def config(dataset: str, **changes) -> Config:
  """20 steps of a model that learns the four colours."""
  c = defaults()
  c.update(to_dict(tiny.config(model__depth=1, model__dropout=0.1)))
  c.data.dataset = dataset
  c.checkpoint.every_steps, c.log_steps = 8, 4
  c.fewshot, c.evals = "available", EVALS
  tiny.apply(c, changes)
  return freeze(c)


class Stopped(Exception):
  """Stands for a machine that is taken away."""


@dataclasses.dataclass(frozen=True)
class StopAfter(Callback):
  """Ends a run after a step, before anything of the step is written."""

  steps: int

  def on_step(self, step, batch, metrics):
    if step == self.steps:
      raise Stopped


class Steps:
  """A writer of somebody else."""

  def __init__(self):
    self.logged, self.is_closed = [], False

  def write_scalars(self, step, scalars):
    self.logged += [step] * ("train/loss" in scalars)

  def flush(self):
    pass

  def close(self):
    self.is_closed = True


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that was stopped after step 12 and resumed from checkpoint 8.

  workdir: Its folder.
  dataset: Its data: 16 images of each colour in `train`, five in `val`, of
    which one that is blue has the label red.
  account: The costs that are stored in checkpoint 8.
  state: What the resumed run returned.
  printed: What the resumed run wrote to the standard error.
  writer: The writer of the resumed run.
  """

  workdir: pathlib.Path
  dataset: str
  account: dict[str, Any]
  state: Any
  printed: str
  writer: Steps

  def config(self, **changes) -> Config:
    return config(self.dataset, **changes)

  def copy(self, folder: pathlib.Path) -> pathlib.Path:
    """Copies its files, for a test that changes them."""
    return shutil.copytree(self.workdir, folder)


def make_run(root: pathlib.Path) -> Run:
  """Trains the run in a folder."""
  from vit_jax import train  # it imports TensorFlow

  every = {name: name for name in COLOURS}
  folder(root / "data" / "train", every)
  folder(root / "data" / "val", every, 5)
  val = root / "data" / "val"
  (val / "blue" / "4.png").rename(val / "red" / "was_blue.png")
  dataset, workdir = f"folder:{root}/data", root / "run"
  with contextlib.suppress(Stopped):
    train.train_and_evaluate(
      config(dataset), str(workdir), callbacks=[StopAfter(12)]
    )
  assert checkpointer.find(str(workdir)).name == "8"
  account = checkpointer.load_metadata(str(workdir))["accounting"]
  printed, writer = io.StringIO(), Steps()
  with contextlib.redirect_stderr(printed):
    state = train.train_and_evaluate(
      config(dataset), str(workdir), writer=writer
    )
  return Run(workdir, dataset, account, state, printed.getvalue(), writer)
