"""Several classes of an image: from the records to training and to a score."""

import re

import handmade
import in_memory
import numpy as np
import pytest
import sklearn.metrics
import tiny

from vit_jax import run_checks
from vit_jax.batch import DataError
from vit_jax.config import ConfigError, defaults, freeze, to_dict
from vit_jax.data import pipeline, sources
from vit_jax.data.builders import embedded
from vit_jax.evaluators.multilabel import MultilabelConfig
from vit_jax.metrics import average_precision
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

tfds = pytest.importorskip("tensorflow_datasets")


def test_average_precision_in_closed_form():
  """The mean over the positives of the precision at their ranks."""
  positive = np.array([1, 0, 1, 0, 0, 1], bool)
  scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
  want = (1 / 1 + 2 / 3 + 3 / 6) / 3
  assert average_precision(scores, positive) == pytest.approx(want, rel=1e-15)
  assert average_precision(-scores, ~positive) == pytest.approx(
    (1 / 2 + 2 / 3 + 3 / 5) / 3, rel=1e-15
  )
  # All scores equal: one threshold, at the share of positives.
  for order in (positive, positive[::-1]):
    assert average_precision(np.zeros(6), order) == 0.5
  assert average_precision(scores, np.ones(6, bool)) == 1.0
  assert np.isnan(average_precision(scores, np.zeros(6, bool)))
  last = np.where(positive, np.nan, scores)
  assert average_precision(last, positive) == 0.5


def test_average_precision_is_scikit_learns():
  """With equal scores and without."""
  rng = np.random.default_rng(0)
  for num, values in ((2, 3), (300, 3), (300, 10**6)):
    scores = rng.integers(0, values, num) / 7
    positive = rng.random(num) < 0.3
    positive[0] = True
    want = sklearn.metrics.average_precision_score(positive, scores)
    # Both add at most 300 terms in float64.
    got = average_precision(scores, positive)
    assert got == pytest.approx(want, rel=1e-13)


LABELS = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]], bool)
LOGITS = np.array([[4, 1, 9], [2, 2, 9], [3, 3, 9], [1, 4, 9]], np.float32)


def _scores(source, **config):
  options = MultilabelConfig(name="m", split="test")
  evaluator = in_memory.evaluator(options, source, 3, **config)
  return evaluator.run({"logits": LOGITS})


def test_the_mean_is_over_classes_that_occur():
  """The positives of both classes are first and third; the third has none."""
  scores = _scores(handmade.records(LABELS))
  one = (1 + 2 / 3) / 2
  assert scores == {
    "m/map": pytest.approx(one, rel=1e-15),
    "m/classes": 2.0,
    "m/count": 4.0,
  }
  with pytest.raises(DataError, match="evals.m: "):
    _scores(handmade.records(0 * LABELS))


def test_its_loss_is_that_of_the_run_over_all_images():
  source = handmade.records(LABELS)
  x = LOGITS.astype(np.float64)
  by_class = np.log1p(np.exp(x)) - LABELS * x
  for loss, want in (
    ("sigmoid", by_class.sum(1).mean()),
    ("bce", by_class.mean()),
  ):
    scores = _scores(source, objective__loss=loss)
    assert scores["m/loss"] == pytest.approx(want, rel=1e-6)


def test_one_class_of_each_image_will_do():
  scores = _scores(handmade.records([0, 1, -1, 1], 3))
  # Class 0: first of three. Class 1: logits 1, 2, 4, the last two are right.
  assert scores["m/map"] == 1.0 and scores["m/count"] == 3


class Objects(tfds.core.GeneratorBasedBuilder):
  """Six images with the features of VOC, among them one without a class."""

  name = "objects"
  VERSION = tfds.core.Version("1.0.0")
  SETS = ((0, 2), (1,), (), (2, 2, 0), (0, 1, 2), (1, 0))

  def _info(self):
    names = tfds.features.ClassLabel(names=["cat", "dog", "cow"])
    features = {
      "image": tfds.features.Image(),
      "labels": tfds.features.Sequence(names),
      "labels_no_difficult": tfds.features.Sequence(names),
    }
    return embedded.EmbeddedInfo(
      builder=self, features=tfds.features.FeaturesDict(features)
    )

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    for i, classes in enumerate(self.SETS):
      yield (
        i,
        {
          "image": np.full((8, 8, 3), 20 * i, np.uint8),
          "labels": list(classes),
          "labels_no_difficult": [],
        },
      )


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
  data_dir = str(tmp_path_factory.mktemp("objects"))
  Objects(data_dir=data_dir).download_and_prepare()
  return data_dir


@pytest.mark.slow
def test_vocs_labels_are_k_hot(objects):
  source = sources.open_source("objects", "train", objects)
  assert source.class_names == ("cat", "dog", "cow") and source.is_multilabel
  (batch,) = pipeline.eval_batches(source, "decode|resize(8)", batch_size=8)
  assert batch["label"].dtype == np.float32 and batch["label"].shape == (8, 3)
  sets = {
    int(round(image.mean() / 20)): tuple(np.flatnonzero(label))
    for image, label, mask in zip(
      batch["image"], batch["label"], batch["mask"], strict=True
    )
    if mask
  }
  assert sets == {i: tuple(sorted({*s})) for i, s in enumerate(Objects.SETS)}
  assert not batch["label"][~batch["mask"]].any()
  np.testing.assert_array_equal(source.labels(), batch["label"][:6] > 0)
  # A process without records yields rows of the same form.
  (empty,) = pipeline.eval_batches(
    source, "decode|resize(8)", batch_size=8, process_index=7, process_count=8
  )
  assert empty["label"].shape == (1, 3) and not empty["mask"].any()


def _config(dataset, data_dir, **changes):
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=3, model__depth=1)))
  c.data.dataset, c.data.split, c.data.data_dir = dataset, "train", data_dir
  c.data.batch_size = 8
  c.objective.loss = "sigmoid"
  own = {"kind": "multilabel", "split": "train", "ops": c.data.ops}
  c.evals = {"m": {**own, "every_steps": 1}}
  tiny.apply(c, changes)
  return freeze(c)


@pytest.mark.nightly
def test_it_trains_and_scores(objects, tmp_path):
  workdir = str(tmp_path / "run")
  train_and_evaluate(_config("objects", objects), workdir)
  rows = [r for r in read_metrics(workdir) if "m/map" in r]
  assert [r["step"] for r in rows] == [1, 2, 3]
  assert all(r["m/count"] == 6 and r["m/classes"] == 3 for r in rows)
  assert rows[0]["m/map"] != rows[-1]["m/map"]
  # A head of zeros gives three classes a half each.
  first = read_metrics(workdir)[0]["train/loss"]
  assert first == pytest.approx(3 * np.log(2), rel=1e-6)


def test_what_needs_one_class_is_refused():
  val = {"kind": "multilabel", "split": "train", "ops": "decode|resize(16)"}
  few = val | {"kind": "fewshot", "train_split": "train", "shots": (1,)}
  for wrong, named in (
    (
      {"objective__loss": "softmax", "num_classes": 4},
      ["objective.loss: got 'softmax'", "num_classes: got 4"],
    ),
    (
      {"init_head": "linear_probe", "evals": {"val": val}},
      ["init_head: .*several", "init_head: .*'val'"],
    ),
    (
      {"evals": {"few": few, "each": val | {"kind": "per_class"}}},
      ["evals.few.dataset: .*several", "evals.each.dataset: .*several"],
    ),
  ):
    with pytest.raises(ConfigError) as e:
      run_checks.setup(_config("voc/2007", None, fake_data=True, **wrong))
    for text in named:
      assert any(re.match(f"config.{text}", x) for x in e.value.errors), text
