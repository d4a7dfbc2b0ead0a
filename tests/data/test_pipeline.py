"""Batches: a function of (seed, step), whatever the number of processes."""

import dataclasses

import numpy as np
import pytest
from numbered import OPS, assert_same, global_batches, joined, numbers

from vit_jax.data import pipeline, tfds_source
from vit_jax.data.tf_cpu import tf


@pytest.fixture(scope="module")
def run():
  """More than two epochs; some batches have records of two."""
  return global_batches(numbers(55), 9)


def test_a_batch_is_what_the_contract_says(run):
  batch = run[0]
  assert batch["image"].shape == (16, 8, 8, 3)
  assert {k: v.dtype for k, v in batch.items()} == {
    "image": np.uint8,
    "label": np.int32,
    "mask": np.bool_,
    "index": np.int64,
  }
  assert batch["mask"].all()
  np.testing.assert_array_equal(batch["label"], batch["index"] % 7)


def share_of_equal_images(batch, other):
  """Among the records that are in both batches."""
  image_of = dict(zip(other["index"], other["image"], strict=True))
  pairs = zip(batch["index"], batch["image"], strict=True)
  return np.mean([(image_of[i] == x).all() for i, x in pairs if i in image_of])


def test_the_seed_decides_order_and_augmentation(run):
  others = joined(global_batches(numbers(55), 3, seed=1))
  whole = joined(run[:3])
  assert (whole["index"] != others["index"]).mean() > 0.9
  assert share_of_equal_images(whole, others) < 0.2  # one of 50 crops and flips


def test_augmentation_differs_from_epoch_to_epoch(run):
  assert share_of_equal_images(joined(run[:3]), joined(run[4:7])) < 0.2


def test_a_later_start_with_more_processes_continues_the_same_run(run):
  """See test_views.py for records that are streamed."""
  assert_same(global_batches(numbers(55), 4, 2, start_step=5), run[5:])


def test_a_number_of_processes_that_divides_no_batch_is_refused():
  with pytest.raises(ValueError, match="0 of 3"):
    pipeline.train_batches(
      numbers(100), OPS, batch_size=64, seed=0, process_count=3
    )
  for index, count in ((2, 2), (0, 3)):
    with pytest.raises(ValueError, match=f"{index} of {count}"):
      pipeline.eval_batches(
        numbers(9), OPS, batch_size=4, process_index=index, process_count=count
      )


def evaluated(source, **options):
  """The batches of two processes, in this order, and how many they are."""
  runs = [
    list(
      pipeline.eval_batches(
        source, OPS, process_index=p, process_count=2, **options
      )
    )
    for p in range(2)
  ]
  return sum(runs, []), [len(run) for run in runs]


@pytest.mark.parametrize(
  "num_examples", [pytest.param(1, marks=pytest.mark.slow), 13]
)
def test_evaluation_yields_every_record_once(num_examples):
  source = numbers(num_examples)
  batches, counts = evaluated(source, batch_size=8)
  assert counts == [pipeline.num_eval_batches(source, batch_size=8)] * 2
  assert {batch["image"].shape for batch in batches} == {(4, 8, 8, 3)}
  whole = joined(batches)
  real = whole["mask"]
  np.testing.assert_array_equal(whole["index"][real], np.arange(num_examples))
  assert (whole["index"][~real] == -1).all()
  assert not whole["image"][~real].any()
  assert whole["index"].dtype == np.int64


def test_evaluation_of_some_records():
  source = numbers(50)
  options = dict(batch_size=4, indices=np.array([40, 3, 3, 17, 49, 0]))
  batches = list(pipeline.eval_batches(source, OPS, **options))
  assert pipeline.num_eval_batches(source, **options) == 2 == len(batches)
  whole = joined(batches)
  assert whole["index"][whole["mask"]].tolist() == [0, 3, 17, 40, 49]
  none = pipeline.eval_batches(source, OPS, batch_size=4, indices=[])
  assert not [*none]
  with pytest.raises(ValueError, match="indices: got 0 to 50"):
    pipeline.eval_batches(source, OPS, batch_size=4, indices=[0, 50])


def _records(path, num, start):
  """Writes examples as TFDS does; the image is PNG, the label its number."""
  with tf.io.TFRecordWriter(str(path)) as writer:
    for i in range(start, start + num):
      png = tf.io.encode_png(np.full([8, 8, 1], i % 256, np.uint8)).numpy()
      feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
      }
      features = tf.train.Features(feature=feature)
      writer.write(tf.train.Example(features=features).SerializeToString())
  return str(path)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
  """100 records in files of 50, 0, 1, 30 and 39, the ends of two unused."""
  folder = tmp_path_factory.mktemp("records")
  pieces, start = [], 0
  for i, (num, skip, unused) in enumerate(
    [(50, 0, 0), (1, 0, 0), (33, 3, 0), (41, 0, 2)]
  ):
    take = num - skip - unused
    file = _records(folder / f"{i}.tfrecord", num, start - skip)
    pieces.append(tfds_source.Piece(file, skip, take))
    start += take
  return tfds_source.TfdsStream(
    name="files",
    split="train",
    num_examples=start,
    num_classes=256,
    pieces=tuple(pieces),
  )


@pytest.mark.slow
def test_any_part_of_files_can_be_read(stream):
  stream = dataclasses.replace(stream, file_bytes=12_000)  # 16 at a time
  assert stream.num_examples == 120
  for start, stop in ((0, 120), (49, 52), (9, 9), (119, 120)):
    records = list(stream.records(start, stop).as_numpy_iterator())
    assert [int(r["index"]) for r in records] == list(range(start, stop))
    assert [int(r["label"]) for r in records] == list(range(start, stop))
  np.testing.assert_array_equal(stream.labels(), np.arange(120))
  at = stream.raw_at(np.array([3, 50, 90])).map(stream.load)
  assert [int(r["label"]) for r in at] == [3, 50, 90]


@pytest.mark.slow
def test_an_image_smaller_than_the_crop_is_named(stream):
  batches = pipeline.eval_batches(
    stream, "decode|central_crop(9)", batch_size=4
  )
  with pytest.raises(ValueError, match=r"'files'.*CentralCrop.*\(9, 9\)"):
    next(batches)
