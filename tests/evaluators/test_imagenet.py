"""ImageNet's other test sets: their rules, by hand and with TFDS."""

import io
import json
import tarfile

import handmade
import in_memory
import numpy as np
import pytest
from PIL import Image

from vit_jax import class_names
from vit_jax.batch import DataError
from vit_jax.config import ClassificationConfig
from vit_jax.data import sources, tfds_source
from vit_jax.evaluators.subset import SUBSETS, SubsetConfig

tfds = pytest.importorskip("tensorflow_datasets")
A, R = (np.array(v) for v in SUBSETS.values())


def _real(name="real", **options):
  return ClassificationConfig(name=name, split="test", **options)


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
  """Right: 0, 4, 5 of five; in the first five also 1; the empty one is out."""
  evaluator = in_memory.evaluator(_real(), handmade.records(K_HOT), 7)
  # A softmax has no loss against several classes.
  want = {"real/top1": 3 / 5, "real/top5": 4 / 5, "real/count": 5.0}
  assert evaluator.run({"logits": LOGITS}) == want


def test_real_under_another_order_of_a_wider_head():
  """Columns go by name; the two of no class are never a label."""
  names = tuple("abcdefg")
  order = np.array([3, 8, 0, 5, 1, 7, 2])  # class -> column
  head_names = np.array(list("???????zy"))
  head_names[order] = names
  wide = np.full((6, 9), -1.0, np.float32)
  wide[:, order] = LOGITS
  source = handmade.records(K_HOT, names=names)
  evaluator = in_memory.evaluator(_real(), source, 9, tuple(head_names))
  scores = evaluator.run({"logits": wide})
  assert scores["real/top1"] == 3 / 5 and scores["real/count"] == 5
  rows = evaluator.predictions({"logits": wide}, 10, 10)
  assert rows["num_images"] == 5 and rows["num_wrong"] == 2
  assert rows["prediction"].tolist() == order[[0, 0, 6, 0, 6]].tolist()
  want = np.zeros((5, 9))
  want[:, order] = K_HOT[[0, 1, 2, 4, 5]]
  np.testing.assert_array_equal(rows["label"], want)


def test_a_sigmoids_loss_is_the_mean_over_images_with_a_class():
  source, loss = handmade.records(K_HOT), dict(objective__loss="sigmoid")
  evaluator = in_memory.evaluator(_real(), source, 7, **loss)
  scores = evaluator.run({"logits": LOGITS})
  x = LOGITS[K_HOT.any(1)].astype(np.float64)
  t = K_HOT[K_HOT.any(1)]
  loss = np.log1p(np.exp(x)) - t * x  # -log sigmoid(x), -log sigmoid(-x)
  assert scores["real/loss"] == pytest.approx(loss.sum(1).mean(), rel=1e-6)


def test_images_without_a_label_do_not_count():
  """TFDS gives images of unlabelled splits the label -1."""
  source = handmade.records([0, -1, 6, 6, -1, 6], num_classes=7)
  scores = in_memory.evaluator(_real(), source, 7).run({"logits": LOGITS})
  assert scores["real/top1"] == 1.0 and scores["real/count"] == 4
  # None at all: it was not a number, which no file of JSON can hold.
  for labels in ([-1, -1], [[0, 0], [0, 0]]):
    evaluator = in_memory.evaluator(_real(), handmade.records(labels, 2), 2)
    with pytest.raises(DataError, match="evals.real: .* no image has a class"):
      evaluator.run({"logits": np.eye(2, dtype=np.float32)})


def _logits(*best):
  """Rows of 1,000 logits, whose largest are of these classes, best first."""
  logits = np.zeros((len(best), 1000), np.float32)
  for row, classes in zip(logits, best, strict=True):
    row[list(classes)] = np.arange(len(classes), 0, -1)
  return logits


@pytest.fixture
def clean():
  """Four images of a data set of all classes; 0 and 1 are not in A, 6 is."""
  return (
    handmade.records([6, 0, 11, 988], 1000),
    _logits((0, 1, 2, 3, 4, 6), (0,), (6, 11), (988,)),
  )


def test_a_prediction_among_200_classes(clean):
  """The first is right since 0 to 4 are left out; the second does not count."""
  assert 6 in A and not {0, 1, 2, 3, 4} & {*A}
  evaluator = in_memory.evaluator(SubsetConfig(name="a"), clean[0], 1000)
  scores = evaluator.run({"logits": clean[1]})
  assert scores["a/count"] == 3
  assert scores["a/top1"] == pytest.approx(2 / 3) and scores["a/top5"] == 1.0
  # The softmax is over the 200, too.
  scored = clean[1][[0, 2, 3]][:, A].astype(np.float64)
  at = [list(A).index(k) for k in (6, 11, 988)]
  loss = np.log(np.exp(scored).sum(1)) - scored[range(3), at]
  assert scores["a/loss"] == pytest.approx(loss.mean(), rel=1e-6)
  rows = evaluator.predictions({"logits": clean[1]}, 10, 10)
  assert rows["prediction"].tolist() == [6, 6, 988]
  assert rows["label"].tolist() == [6, 11, 988]
  assert rows["mistake_label"].tolist() == [11]
  # Unrestricted it is a "classification".
  plain = in_memory.evaluator(_real(), clean[0], 1000)
  scores = plain.run({"logits": clean[1]})
  assert scores["real/top1"] == 2 / 4 and scores["real/count"] == 4


def test_the_subsets():
  assert len({*A}) == len({*R}) == 200 and len({*A} & {*R}) == 86
  assert (np.diff(A) > 0).all() and (np.diff(R) > 0).all()
  assert A[-1] == R[-1] == 988 and R[0] == 1
  # Of ImageNet-R's class folders, the first and the last by wnid.
  wnids = class_names.imagenet1k()
  assert wnids[1] == "n01443537" and wnids[988] == "n12267677"


def test_wrong_classes_are_refused(clean):
  swapped = tuple(reversed(class_names.imagenet1k()))
  of_r = {"dataset": "imagenet_r:0.2.0"}
  for options, source, words in (
    (of_r, clean[0], ["classes: got 'imagenet_a'", "'imagenet_r'"]),
    (of_r | {"classes": "imagenet_r"}, clean[0], []),
    ({}, handmade.records([0, 1], 10), ["e.dataset: ", "10 classes"]),
    ({}, handmade.records([0], 1000, names=swapped), ["e.dataset: ", "order"]),
  ):
    options, head = SubsetConfig(name="a", **options), class_names.Head(1000)
    errors = in_memory.errors(options, source, head)
    assert len(errors) == bool(words)
    assert all(word in e for e in errors for word in words)


# --- TFDS's own builders, given few images.


def _jpeg(value: int) -> bytes:
  data = io.BytesIO()
  Image.new("RGB", (8, 8), (value, value, value)).save(data, "jpeg")
  return data.getvalue()


def _by_pixel(source):
  """Grey value of an image -> its label or labels, from the pixels' batches."""
  labels = {}
  for record in source.records().as_numpy_iterator():
    image = np.asarray(Image.open(io.BytesIO(record["image"])))
    label = record["label"]
    labels[int(image.mean().round())] = (
      np.flatnonzero(label).tolist() if label.ndim else int(label)
    )
  return labels


@pytest.mark.slow
def test_reals_labels_go_by_file_name(tmp_path, monkeypatch):
  """real.json is in the order of sorted names, the archive in none."""
  json_file = tmp_path / "real.json"
  json_file.write_text(json.dumps([[3], [], [7, 999, 0], [5, 6], [1]]))
  manual = tmp_path / "tfds" / "downloads" / "manual"
  manual.mkdir(parents=True)
  with tarfile.open(manual / "ILSVRC2012_img_val.tar", "w") as tar:
    for i in (4, 1, 5, 3, 2):
      info = tarfile.TarInfo(f"ILSVRC2012_val_{i:08}.JPEG")
      data = _jpeg(i * 20)
      info.size = len(data)
      tar.addfile(info, io.BytesIO(data))
  manager, info = tfds.download.DownloadManager, tfds.core.DatasetInfo
  given = lambda self, url: str(json_file)
  monkeypatch.setattr(manager, "download", given)
  monkeypatch.setattr(info, "initialize_from_bucket", lambda self: None)
  name, data_dir = "imagenet2012_real", str(tmp_path / "tfds")
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  builder = tfds.builder(name, data_dir=data_dir)
  builder.download_and_prepare(download_config=config)

  source = sources.open_source(name, "validation", data_dir)
  want = {20: [3], 40: [], 60: [0, 7, 999], 80: [5, 6], 100: [1]}
  assert _by_pixel(source) == want
  assert source.is_multilabel and source.num_classes == 1000
  assert source.class_names == class_names.imagenet1k()
  table = source.labels()
  assert table.shape == (5, 1000) and table.dtype == bool and table.sum() == 7
  # More than fits into memory is read as a stream.
  monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  again = sources.open_source(name, "validation", data_dir)
  assert type(again) is not type(source)
  assert _by_pixel(again) == want
  np.testing.assert_array_equal(again.labels(), table)
