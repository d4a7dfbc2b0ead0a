"""Several classes of an image: from the records to training and to a score."""

import io
import json
import re
import tarfile

import handmade
import in_memory
import numpy as np
import pytest
import tiny
from PIL import Image

from vit_jax import class_names, run_checks
from vit_jax.batch import DataError
from vit_jax.config import ClassificationConfig, ConfigError
from vit_jax.data import pipeline, sources, tfds_source
from vit_jax.data.builders import embedded
from vit_jax.evaluators.multilabel import MultilabelConfig
from vit_jax.train import train_and_evaluate
from vit_jax.writers.metric_writer import read_metrics

tfds = pytest.importorskip("tensorflow_datasets")

# The rule of ImageNet ReaL: one of the image's classes is enough.

REAL = ClassificationConfig(name="real", split="test")
# Logits of six images: the order of the classes, best first, is in the comment.
LOGITS = np.array(
  [
    [9, 5, 1, 0, 2, 3, 4],  # 0 1 6 5 4 2 3
    [9, 5, 1, 0, 2, 3, 4],  # 0 1 6 5 4 2 3
    [0, 1, 2, 3, 4, 5, 6],  # 6 5 4 3 2 1 0
    [0, 1, 2, 3, 4, 5, 6],  # 6 5 4 3 2 1 0
    [7, 0, 0, 0, 0, 0, 0],  # 0 1 2 3 4 5 6: equal ones in order
    [1, 2, 3, 4, 5, 6, 7],  # 6 5 4 3 2 1 0
  ],
  np.float32,
)
SETS = [{0}, {1, 6}, {1, 0}, {}, {0, 5, 6}, {6, 1}]
K_HOT = np.array([[k in s for k in range(7)] for s in SETS])


def test_the_rule_of_real_by_hand():
  """Right: 0, 4, 5 of five; in the first five also 1; the empty one is out.

  A wider head may have the classes in another order: columns go by name, and
  the two of no class are never a label.
  """
  names, there = tuple("abcdefg"), K_HOT.any(1)
  for order in (range(7), (3, 8, 0, 5, 1, 7, 2)):  # class -> column
    order = np.array(order)
    width = int(order.max()) + 1
    head_names = np.full(width, "?")
    head_names[order] = names
    logits = np.full((6, width), -1.0, np.float32)
    logits[:, order] = LOGITS
    source = handmade.records(K_HOT, names=names)
    evaluator = in_memory.evaluator(REAL, source, width, tuple(head_names))
    # A softmax has no loss against several classes.
    want = {"real/top1": 3 / 5, "real/top5": 4 / 5, "real/count": 5.0}
    assert evaluator.run({"logits": logits}) == want
    rows = evaluator.predictions({"logits": logits}, 10, 10)
    assert rows["num_images"] == 5 and rows["num_wrong"] == 2
    assert rows["prediction"].tolist() == order[[0, 0, 6, 0, 6]].tolist()
    label = np.zeros((5, width))
    label[:, order] = K_HOT[there]
    np.testing.assert_array_equal(rows["label"], label)
  # A sigmoid's loss is the mean over images with a class.
  sigmoid = in_memory.evaluator(REAL, source, 7, objective__loss="sigmoid")
  x, t = LOGITS[there].astype(np.float64), K_HOT[there]
  loss = np.log1p(np.exp(x)) - t * x  # -log sigmoid(x), -log sigmoid(-x)
  want["real/loss"] = pytest.approx(loss.sum(1).mean(), rel=1e-6)
  assert sigmoid.run({"logits": LOGITS}) == want


def test_mean_average_precision():
  """The positives of both classes are first and third; the third has none."""
  labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]], bool)
  logits = np.array([[4, 1, 9], [2, 2, 9], [3, 3, 9], [1, 4, 9]], np.float32)

  def scores(labels, **changes):
    options = MultilabelConfig(name="m", split="test")
    source = handmade.records(labels, 3)
    return in_memory.evaluator(options, source, 3, **changes).run(
      {"logits": logits}
    )

  want = {
    "m/map": pytest.approx((1 + 2 / 3) / 2, rel=1e-15),
    "m/classes": 2.0,
    "m/count": 4.0,
  }
  assert scores(labels) == want
  # The loss is that of the run, over all images.
  x = logits.astype(np.float64)
  of_class = np.log1p(np.exp(x)) - labels * x
  for loss, value in (
    ("sigmoid", of_class.sum(1).mean()),
    ("bce", of_class.mean()),
  ):
    own = {"m/loss": pytest.approx(value, rel=1e-6)}
    assert scores(labels, objective__loss=loss) == want | own
  # One class of each image will do. Class 0: logits 4, 2, 1, the first is
  # right. Class 1: logits 1, 2, 4, the last two are right.
  one = scores([0, 1, -1, 1])
  assert one["m/map"] == 1.0 and one["m/count"] == 3
  with pytest.raises(DataError, match="evals.m: "):
    scores(0 * labels)


# Records.


@pytest.mark.slow
def test_reals_labels_go_by_file_name(tmp_path, monkeypatch):
  """real.json is in the order of sorted names, the archive in none."""
  json_file = tmp_path / "real.json"
  json_file.write_text(json.dumps([[3], [], [7, 999, 0], [5, 6], [1]]))
  manual = tmp_path / "tfds" / "downloads" / "manual"
  manual.mkdir(parents=True)
  with tarfile.open(manual / "ILSVRC2012_img_val.tar", "w") as tar:
    for i in (4, 1, 5, 3, 2):
      data = io.BytesIO()
      Image.new("RGB", (8, 8), (i * 20,) * 3).save(data, "jpeg")
      info = tarfile.TarInfo(f"ILSVRC2012_val_{i:08}.JPEG")
      info.size = data.tell()
      data.seek(0)
      tar.addfile(info, data)
  manager, info = tfds.download.DownloadManager, tfds.core.DatasetInfo
  given = lambda self, url: str(json_file)
  monkeypatch.setattr(manager, "download", given)
  monkeypatch.setattr(info, "initialize_from_bucket", lambda self: None)
  name, data_dir = "imagenet2012_real", str(tmp_path / "tfds")
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  builder = tfds.builder(name, data_dir=data_dir)
  builder.download_and_prepare(download_config=config)

  source = sources.open_source(name, "validation", data_dir)
  assert source.is_multilabel and source.num_classes == 1000
  assert source.class_names == class_names.imagenet1k()
  # More than fits into memory is read as a stream.
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  stream = sources.open_source(name, "validation", data_dir)
  assert type(stream) is not type(source)
  for found in (source, stream):
    classes = {}
    for record in found.records().as_numpy_iterator():
      image = np.asarray(Image.open(io.BytesIO(record["image"])))
      grey = int(image.mean().round())
      classes[grey] = np.flatnonzero(record["label"]).tolist()
    assert classes == {20: [3], 40: [], 60: [0, 7, 999], 80: [5, 6], 100: [1]}
    table = found.labels()
    assert table.shape == (5, 1000) and table.dtype == bool and table.sum() == 7


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
      image = np.full((8, 8, 3), 20 * i, np.uint8)
      labels = {"labels": [*classes], "labels_no_difficult": []}
      yield i, {"image": image, **labels}


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
  data_dir = str(tmp_path_factory.mktemp("objects"))
  Objects(data_dir=data_dir).download_and_prepare()
  return data_dir


@pytest.mark.slow
def test_vocs_labels_are_k_hot(objects):
  source = sources.open_source("objects", "train", objects)
  assert source.class_names == ("cat", "dog", "cow") and source.is_multilabel
  read = lambda **process: next(
    iter(
      pipeline.eval_batches(source, "decode|resize(8)", batch_size=8, **process)
    )
  )
  batch = read()
  assert batch["label"].dtype == np.float32 and batch["label"].shape == (8, 3)
  for image, label in zip(batch["image"][:6], batch["label"], strict=False):
    classes = Objects.SETS[int(round(image.mean() / 20))]
    assert {*np.flatnonzero(label)} == {*classes}
  assert not batch["label"][~batch["mask"]].any()
  np.testing.assert_array_equal(source.labels(), batch["label"][:6] > 0)
  # A process without records yields rows of the same form.
  empty = read(process_index=7, process_count=8)
  assert empty["label"].shape == (1, 3) and not empty["mask"].any()


EVAL = {"kind": "multilabel", "split": "train", "ops": "decode|resize(16)"}


def config(dataset, data_dir, **changes):
  own = dict(
    total_steps=3,
    model__depth=1,
    data__dataset=dataset,
    data__split="train",
    data__data_dir=data_dir,
    data__batch_size=8,
    objective__loss="sigmoid",
    evals={"m": {**EVAL, "every_steps": 1}},
  )
  return tiny.config(**own | changes)


@pytest.mark.nightly
def test_it_trains_and_scores(objects, tmp_path):
  train_and_evaluate(config("objects", objects), str(tmp_path))
  rows = [r for r in read_metrics(str(tmp_path)) if "m/map" in r]
  assert [r["step"] for r in rows] == [1, 2, 3]
  assert all(r["m/count"] == 6 and r["m/classes"] == 3 for r in rows)
  assert rows[0]["m/map"] != rows[-1]["m/map"]
  # A head of zeros gives three classes a half each.
  first = read_metrics(str(tmp_path))[0]["train/loss"]
  assert first == pytest.approx(3 * np.log(2), rel=1e-6)


def test_what_needs_one_class_is_refused():
  few = EVAL | {"kind": "fewshot", "train_split": "train", "shots": (1,)}
  for wrong, named in (
    (
      {"objective__loss": "softmax", "num_classes": 4},
      ["objective.loss: got 'softmax'", "num_classes: got 4"],
    ),
    (
      {"init_head": "linear_probe", "evals": {"val": EVAL}},
      ["init_head: .*several", "init_head: .*'val'"],
    ),
    (
      {"evals": {"few": few, "each": EVAL | {"kind": "per_class"}}},
      ["evals.few.dataset: .*several", "evals.each.dataset: .*several"],
    ),
  ):
    with pytest.raises(ConfigError) as e:
      run_checks.setup(config("voc/2007", None, fake_data=True, **wrong))
    for text in named:
      assert any(re.match(f"config.{text}", x) for x in e.value.errors), text
