"""Images of a folder without classes."""

import numpy as np
import pytest
from PIL import Image

from vit_jax import run_checks
from vit_jax.config import defaults, freeze
from vit_jax.data import pipeline
from vit_jax.data.sources import open_source
from vit_jax.experiment import Experiment
from vit_jax.paths import with_absolute_folder

OPS = "decode|resize(8)"


@pytest.fixture
def folder(tmp_path):
  for i, name in enumerate(("b.png", "deep/er/a.JPG", "c.png", "notes.txt")):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("txt"):
      path.write_text("no image")
    else:
      Image.new("RGB", (9, 9), (60 * i, 0, 0)).save(path)
  return f"images:{tmp_path}"


def test_all_images_below_the_folder_have_no_class(folder):
  source = open_source(folder, "train")
  assert (source.num_examples, source.num_classes) == (3, 0)
  assert "notes.txt" in source.note()
  (batch,) = pipeline.eval_batches(source, OPS, batch_size=3)
  np.testing.assert_array_equal(batch["label"], [-1, -1, -1])
  assert batch["mask"].all()
  assert [x[0, 0, 0] // 50 for x in batch["image"]] == [0, 2, 1]
  assert open_source(folder, "train[1:]").num_examples == 2


def test_other_splits_and_folders_without_images(folder, tmp_path):
  with pytest.raises(ValueError, match="val"):
    open_source(folder, "val")
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match="without images"):
    open_source(f"images:{tmp_path / 'empty'}", "train")


def test_fake_records_have_no_class_either():
  source = open_source("images:/nowhere", "train[:4]", fake=True)
  assert source.num_classes == 0 and (source.labels() == -1).all()


def test_the_path_becomes_absolute():
  assert with_absolute_folder("images:/a/../b/") == "images:/b"


@pytest.mark.parametrize(
  "objective, num_classes, word",
  [
    ({"kind": "classification"}, None, "config.objective.kind"),
    ({"kind": "mae"}, None, None),
    ({"kind": "distillation", "loss": "logits"}, None, "config.num_classes"),
    ({"kind": "distillation", "loss": "logits"}, 5, None),
    ({"kind": "distillation", "loss": "soft"}, 5, "config.objective.kind"),
  ],
)
def test_who_learns_from_images_without_classes(objective, num_classes, word):
  c = defaults()
  c.fake_data, c.num_classes, c.total_steps = True, num_classes, 2
  c.data.dataset, c.data.split, c.data.batch_size = "images:/x", "train", 8
  c.data.ops = "decode|resize(32)"
  c.objective = objective
  if "loss" in objective:
    c.objective = objective | {"teacher": "x"}
  errors = run_checks.length_and_head_errors(Experiment(freeze(c)))
  assert [e.split(":")[0] for e in errors] == [word] * (word is not None)
