"""VTAB-1k: slices, labels, images; records written with TFDS's own features."""

import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from vit_jax.data import pipeline, sources, tfds_source, vtab, vtab_source
from vit_jax.data.splits import Span, SplitError
from vit_jax.data.tf_cpu import tf
from vit_jax.data.vtab import TASKS
from vit_jax.tools.sweep import points

# Classes, records of the benchmark's test split, and where val200 begins: the
# table of the benchmark, and the numbers of its own tests.
TABLE = {
  "caltech101": (102, 6084, ("train", 2754)),
  "cifar100": (100, 10_000, ("train", 45_000)),
  "dtd": (47, 1880, ("validation", 0)),
  "oxford_flowers102": (102, 6149, ("validation", 0)),
  "oxford_iiit_pet": (37, 3669, ("train", 2944)),
  "sun397": (397, 21_750, ("validation", 0)),
  "svhn": (10, 26_032, ("train", 65_931)),
  "patch_camelyon": (2, 32_768, ("validation", 0)),
  "eurosat": (10, 5400, ("train", 16_200)),
  "resisc45": (45, 6300, ("train", 18_900)),
  "diabetic_retinopathy": (5, 42_670, ("validation", 0)),
  "clevr_count": (8, 15_000, ("train", 63_000)),
  "clevr_distance": (6, 15_000, ("train", 63_000)),
  "dmlab": (6, 22_735, ("validation", 0)),
  "dsprites_location": (16, 73_728, ("train", 589_824)),
  "dsprites_orientation": (16, 73_728, ("train", 589_824)),
  "kitti_distance": (4, 711, ("validation", 0)),
  "smallnorb_azimuth": (18, 12_150, ("test", 0)),
  "smallnorb_elevation": (9, 12_150, ("test", 0)),
}


def test_tasks_and_splits_are_those_of_the_benchmark():
  assert list(TASKS) == list(TABLE)
  groups = [vtab.NATURAL] * 7 + [vtab.SPECIALIZED] * 4 + [vtab.STRUCTURED] * 8
  for task, group, row in zip(
    TASKS.values(), groups, TABLE.values(), strict=True
  ):
    num_classes, num_test, (split, start) = row
    assert (task.num_classes, task.group) == (num_classes, group)
    sizes = {"train800": 800, "val200": 200, "train800val200": 1000}
    assert task.split_sizes == sizes | {"test": num_test}
    train, val = Span("train", 0, 800), Span(split, start, start + 200)
    assert task.spans("train800") == (train,)
    for text in ("train800val200", "train800+val200"):
      assert task.spans(text) == (train, val)
    (test,) = task.spans("test")
    for other in (train, val):  # Apart from the test.
      assert other.split != test.split or (
        other.stop <= test.start or test.stop <= other.start
      )
  svhn = TASKS["svhn"].spans("train800val200[799:801]")
  assert svhn == (Span("train", 799, 800), Span("train", 65_931, 65_932))
  with pytest.raises(SplitError, match="train800 .800 records., val200"):
    TASKS["dtd"].spans("train")


def _depths(*values):
  coords = np.full([len(values), 3], 99.0, np.float32)
  coords[:, 2] = values
  return {"objects/pixel_coords": tf.constant(coords)}


def test_clevr_counts_objects_and_takes_the_depth_of_the_nearest():
  for number in range(3, 11):
    depths = _depths(*range(number))
    assert int(vtab_source.object_count(depths)) == number - 3
  above = np.nextafter(np.float32(8), np.float32(9))
  # A depth on a threshold is in the lower interval.
  labels = {7.5: 0, 8.0: 0, above: 1, 8.6: 2, 9.5: 3, 10.0: 4, 50.0: 5}
  for depth, label in labels.items():
    depths = _depths(60.0, depth, 99.0)
    assert int(vtab_source.object_distance(depths)) == label


CAR, VAN, TRUCK, PEDESTRIAN, MISC = 0, 1, 2, 3, 7


def test_kitti_distance_is_that_of_the_nearest_vehicle():
  for label, *objects in (
    (0, (CAR, 5.0)),
    (0, (CAR, 8.0)),  # On a threshold.
    (1, (VAN, 8.1)),
    (1, (TRUCK, 20.0), (CAR, 70.0)),
    (2, (CAR, 20.1)),
    (2, (CAR, 20.1), (PEDESTRIAN, 2.0)),
    (3, (PEDESTRIAN, 2.0), (MISC, 9.0)),
    (3,),
  ):
    location = np.zeros([len(objects), 3], np.float32)
    location[:, 2] = [z for _, z in objects]
    record = {
      "objects/type": tf.constant([t for t, _ in objects], tf.int64),
      "objects/location": tf.constant(location),
    }
    assert int(vtab_source.vehicle_distance(record)) == label


def test_dsprites_labels():
  at = [int(_dsprites("x_position", x)) for x in range(32)]
  assert at == [x // 2 for x in range(32)]
  turned = [int(_dsprites("orientation", o)) for o in range(40)]
  # 16 classes of 2.5 orientations each: 3 and 2 of them in turn.
  assert np.bincount(turned).tolist() == [3, 2] * 8
  assert turned == sorted(turned) and turned[37:] == [14, 15, 15]


def _dsprites(name, value):
  label = vtab_source.LABELS[name]
  (key,) = label.features
  return label.make({key: tf.constant(value, tf.int64)})


def _examples(name, task, features, num):
  """Random records with the features of the real data set."""
  rng = np.random.default_rng(0)

  def made(feature):
    if isinstance(feature, tfds.features.FeaturesDict):
      return {k: made(v) for k, v in feature.items()}
    if isinstance(feature, tfds.features.Sequence):
      return [made(feature.feature) for _ in range(rng.integers(3, 11))]
    if isinstance(feature, tfds.features.Image):
      shape = [s or 12 for s in feature.shape]
      top = 2 if name.startswith("dsprites") else 256
      return rng.integers(0, top, shape).astype(np.uint8)
    if isinstance(feature, tfds.features.ClassLabel):
      return int(rng.integers(feature.num_classes))
    if isinstance(feature, tfds.features.Text):
      return "text"
    if isinstance(feature, tfds.features.BBoxFeature):
      return tfds.features.BBox(0.1, 0.1, 0.9, 0.9)
    values = 30 * rng.random(feature.shape)
    return values.astype(feature.np_dtype)

  return [made(features) for _ in range(num)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Every data set with 14 records a split, by TFDS's own writer."""
  folder = tmp_path_factory.mktemp("vtab")
  examples_of = {}
  for name, task in TASKS.items():
    if task.dataset in examples_of:
      continue
    builder = tfds.builder(task.dataset, data_dir=folder)
    pathlib.Path(builder.data_dir).mkdir(parents=True)
    examples = _examples(name, task, builder.info.features, 14)
    examples_of[task.dataset] = examples
    writer = tfds.core.SequentialWriter(
      builder.info, 10, file_format="tfrecord"
    )
    writer.initialize_splits(list(task.sizes))
    writer.add_examples({split: examples for split in task.sizes})
    writer.close_all()
  return folder, examples_of


@pytest.fixture
def small(monkeypatch):
  """The tasks with slices as small as the records that are written."""
  for name, task in TASKS.items():
    spans = {k: task.spans(k)[-1].split for k in ("val200", "test")}
    task = task._replace(
      sizes=dict.fromkeys(task.sizes, 14),
      train="train[:8]",
      val=f"{spans['val200']}[8:10]",
      test=f"{spans['test']}[10:]",
    )
    monkeypatch.setitem(TASKS, name, task)


@pytest.mark.nightly
@pytest.mark.parametrize("in_memory", [True, False])
def test_every_task_opens_as_tfds_writes_it(
  written, small, monkeypatch, in_memory
):
  folder, examples_of = written
  if not in_memory:
    monkeypatch.setattr(tfds_source, "MEMORY_LIMIT", 0)
  for name, task in TASKS.items():
    source = sources.open_source(
      f"vtab:{name}", "train800+val200+test", str(folder)
    )
    labels = source.labels()
    assert len(labels) == 14 and source.num_classes == task.num_classes
    assert 0 <= labels.min() < labels.max() < task.num_classes, name
    if task.label == "label":  # others are made of several
      # The writer keeps the order, in files of up to 10 records.
      wanted = [e["label"] for e in examples_of[task.dataset]]
      assert labels.tolist() == wanted, name
    assert (source.class_names is not None) == (task.label == "label")
    assert bool(source.note()) == (name == "oxford_iiit_pet")


@pytest.mark.nightly
def test_images_of_dsprites_are_black_and_white(written, small):
  folder, examples_of = written
  source = sources.open_source("vtab:dsprites_location", "test", str(folder))
  (batch,) = pipeline.eval_batches(source, "decode|resize(64)", batch_size=4)
  pixels = examples_of["dsprites:2.*.*"][10]["image"]
  assert {*np.unique(pixels)} == {0, 1}
  np.testing.assert_array_equal(batch["image"][0], np.tile(pixels, 3) * 255)
  # Records that are in two splits are counted.
  opened = sources.Sources(str(folder))
  for split, shared in (("val200", 2), ("test", 0)):
    count = points.num_shared(opened, "vtab:dtd", "train800val200", split)
    assert count == shared


@pytest.mark.nightly
def test_data_of_another_size_are_refused(written):
  with pytest.raises(ValueError, match="14 records .* 3,060"):
    sources.open_source("vtab:caltech101", "test", str(written[0]))


def test_data_that_are_not_there(tmp_path):
  with pytest.raises(ValueError, match="'kitti:3.1.0', which is not prepared"):
    sources.open_source("vtab:kitti_distance", "test", str(tmp_path))
  with pytest.raises(ValueError, match="Did you mean 'clevr_count'"):
    sources.open_source("vtab:clevr_cout", "test", str(tmp_path))
  assert not list(pathlib.Path(tmp_path).iterdir())
