"""Records of one's own, by import path and as objects of the program."""

import io

import numpy as np
import pytest
import tiny
from numbered import scored
from PIL import Image

from vit_jax import run_checks
from vit_jax.config import ConfigError
from vit_jax.data.sources import Sources, open_source, typical_side
from vit_jax.tools.planning import planner, programs

OPS = "decode|resize(16)"


class Shapes:
  """Bright and dark images; record 5 of "broken" raises."""

  num_classes = 2
  class_names = ("dark", "bright")
  sizes = {"train": 40, "test": 12, "broken": 12}

  def __init__(self, split, text="seed 0"):
    self.num, self.split = self.sizes[split], split
    self.seed = int(text.removeprefix("seed "))

  def __len__(self):
    return self.num

  def __getitem__(self, index):
    if self.split == "broken" and index == 5:
      raise OSError("a bad block")
    rng = np.random.default_rng([self.seed, self.num, index])
    image = rng.integers(0, 100, (18, 20, 3)) + 150 * (index % 2)
    return {"image": image.astype(np.uint8), "label": index % 2}

  def identity(self):
    return f"shapes {self.seed} {self.num}"


class Files(Shapes):
  """The same as files, with numbers to predict."""

  is_regression = True

  def __getitem__(self, index):
    record = super().__getitem__(index)
    file = io.BytesIO()
    Image.fromarray(record["image"]).save(file, "png")
    label = [index, index % 2]
    return {"image": file.getvalue(), "label": np.array(label, "float64")}

  def labels(self):
    return np.stack([np.arange(self.num), np.arange(self.num) % 2], 1)


HERE = f"{__name__}:Shapes"


def config(dataset=HERE, **changes):
  evals = {"test": dict(kind="classification", split="test", ops=OPS)}
  changes = {"evals": evals, "total_steps": 2, "model__depth": 1} | changes
  return tiny.config(
    data__dataset=dataset, data__ops=OPS, data__batch_size=8, **changes
  )


def test_records_as_they_are():
  source = open_source(HERE, "train")
  assert (source.num_examples, source.num_classes) == (40, 2)
  assert source.class_names == ("dark", "bright")
  np.testing.assert_array_equal(source.labels(), np.arange(40) % 2)
  batch = scored(source, "decode|resize(18)")
  assert batch["mask"].all() and batch["label"].dtype == np.int32
  assert typical_side(source) == 18
  # Slices, sums and subsets.
  part = open_source(HERE, "train[30:]+test[:50%]")
  assert part.num_examples == 16
  at = [r["image"].numpy() for r in part.records()]
  np.testing.assert_array_equal(at[3], Shapes("train")[33]["image"])
  np.testing.assert_array_equal(at[12], Shapes("test")[2]["image"])
  drawn = open_source(HERE, "train@10")
  assert drawn.num_examples == 10
  assert drawn.identity() != open_source(HERE, "train@10/seed=1").identity()
  # Objects of the program are those of the import path.
  given = Sources(given={"mine": Shapes}).open("mine", "train[:50%]")
  assert given.identity() == open_source(HERE, "train[:50%]").identity()
  with pytest.raises(ConfigError, match="'mine', split 'test'"):
    one = Sources(given={"mine": {"train": Shapes("train")}})
    run_checks.setup(config("mine"), sources=one)


def test_files_and_numbers_to_predict():
  source = open_source(f"{__name__}:Files", "test")
  assert source.is_regression and source.label_spec.shape == [2]
  batch = scored(source, "decode|resize(18)")
  np.testing.assert_array_equal(batch["label"], source.labels())
  assert batch["label"].dtype == source.labels().dtype == np.float32
  assert batch["mask"].all()


@pytest.mark.slow
def test_a_record_that_raises_does_not_count(caplog):
  source = open_source(HERE, "broken")
  batch = scored(source, "decode|resize(8)")
  np.testing.assert_array_equal(batch["index"][~batch["mask"]], [5])
  assert "OSError: a bad block" in caplog.text


@pytest.mark.parametrize(
  "record, words",
  [
    ({"image": np.zeros((8, 8, 3))}, "KeyError: 'label'"),
    ({"image": np.zeros((8, 8, 3)), "label": 0}, "image float64 [8, 8, 3]"),
    ({"image": np.zeros((8, 8), "uint8"), "label": 0.5}, "label float64 []"),
    ({"image": b"", "label": [0, 1, 0]}, "label int64 [3]"),
  ],
)
def test_a_first_record_of_another_form_is_refused(record, words, monkeypatch):
  monkeypatch.setattr(Shapes, "__getitem__", lambda self, index: record)
  with pytest.raises(ConfigError) as e:
    run_checks.setup(config(evals={}))
  assert words in str(e.value) and "config.data.dataset" in str(e.value)


def test_errors_of_names_and_splits(monkeypatch):
  def errors(dataset=HERE, split="train"):
    return Sources().errors(dataset, split, "D", "S")

  assert not errors()
  assert "no module 'my_lab'" in errors("my_lab.shards:Shards")[0]
  assert errors(split="val")[0].startswith("S: ")
  assert errors(split="train[90:]")[0].startswith("S: ")
  assert "ValueError: invalid literal" in errors(f"{HERE}(ten)")[0]
  monkeypatch.delattr(Shapes, "identity")
  assert "without identity" in errors()[0]


def test_a_plan_knows_the_classes_and_the_length():
  made = config(total_steps=None, total_epochs=2.0)
  shape = planner.run_shape_of(made)
  assert (shape.num_classes, shape.total_steps) == (2, 10)
  split = programs.split(HERE, "test[:50%]")
  assert (split.num_examples, split.num_classes) == (6, 2)
