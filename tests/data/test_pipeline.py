"""Batches: a function of (seed, step), whatever the number of processes."""

import dataclasses
import itertools
import os

import numpy as np
import pytest
from numbered import (
  OPS,
  Numbers,
  Streamed,
  assert_same,
  global_batches,
  joined,
  numbers,
)

from vit_jax.data import pipeline, tfds_source
from vit_jax.data.tf_cpu import tf


def test_a_batch_is_what_the_contract_says():
  (batch,) = global_batches(numbers(100), 1)
  assert batch["image"].shape == (16, 8, 8, 3)
  assert {k: v.dtype for k, v in batch.items()} == {
    "image": np.uint8,
    "label": np.int32,
    "mask": np.bool_,
    "index": np.int64,
  }
  assert batch["mask"].all()
  np.testing.assert_array_equal(batch["label"], batch["index"] % 7)


def test_the_seed_decides_order_and_augmentation():
  source = numbers(100)
  first = global_batches(source, 3)
  assert_same(first, global_batches(source, 3))
  (other,) = global_batches(source, 1, seed=1)
  assert not np.array_equal(first[0]["index"], other["index"])
  # The pixels of the same records differ, too.
  by_index = dict(zip(other["index"], other["image"], strict=True))
  both = [
    np.array_equal(image, by_index[i])
    for batch in first
    for i, image in zip(batch["index"], batch["image"], strict=True)
    if i in by_index
  ]
  assert both and np.mean(both) < 0.3


@pytest.mark.parametrize("cls", [Numbers, Streamed])
def test_a_later_start_with_more_processes_continues_the_same_run(cls):
  # A batch of 16: some are in two epochs.
  source = numbers(55, cls)
  run = global_batches(source, 9, shuffle_buffer=32)
  batches = global_batches(source, 4, 2, start_step=5, shuffle_buffer=32)
  assert_same(batches, run[5:])


def test_augmentation_differs_from_epoch_to_epoch():
  batches = global_batches(numbers(16), 8)
  images = [batch["image"][np.argsort(batch["index"])] for batch in batches]
  same = [
    (a == b).all((1, 2, 3)).mean() for a, b in itertools.combinations(images, 2)
  ]
  assert np.mean(same) < 0.1  # One of 50 crops and flips.


def test_a_number_of_processes_that_divides_no_batch_is_refused():
  with pytest.raises(ValueError, match="got 64 for process 0 of 3"):
    pipeline.train_batches(
      numbers(100), OPS, batch_size=64, seed=0, process_count=3
    )
  with pytest.raises(ValueError, match="process 2 of 2"):
    pipeline.eval_batches(
      numbers(9), OPS, batch_size=4, process_index=2, process_count=2
    )
  with pytest.raises(ValueError, match="got 4 for process 0 of 3, expected"):
    pipeline.eval_batches(numbers(9), OPS, batch_size=4, process_count=3)


@pytest.mark.parametrize("num_examples, processes", [(1, 4), (8, 1), (61, 4)])
def test_evaluation_yields_every_record_once(num_examples, processes):
  source = numbers(num_examples)
  runs = [
    list(
      pipeline.eval_batches(
        source,
        "decode|resize(8)",
        batch_size=8,
        process_index=p,
        process_count=processes,
      )
    )
    for p in range(processes)
  ]
  expected = pipeline.num_eval_batches(source, batch_size=8)
  assert [len(run) for run in runs] == [expected] * processes
  batches = [batch for run in runs for batch in run]
  assert {batch["image"].shape for batch in batches} == {
    (8 // processes, 8, 8, 3)
  }
  everything = joined(batches)
  real = everything["mask"]
  np.testing.assert_array_equal(
    everything["index"][real], np.arange(num_examples)
  )
  assert (everything["index"][~real] == -1).all()
  assert not everything["image"][~real].any()
  assert everything["index"].dtype == np.int64


def test_evaluation_of_some_records():
  source = numbers(50)
  wanted = np.array([40, 3, 3, 17, 49, 0])
  for processes in (1, 2):
    batches = [
      batch
      for p in range(processes)
      for batch in pipeline.eval_batches(
        source,
        OPS,
        batch_size=4,
        process_index=p,
        process_count=processes,
        indices=wanted,
      )
    ]
    num = pipeline.num_eval_batches(source, batch_size=4, indices=wanted)
    assert num == 2 and len(batches) == num * processes
    everything = joined(batches)
    assert everything["index"][everything["mask"]].tolist() == [
      0,
      3,
      17,
      40,
      49,
    ]
  none = np.array([], int)
  assert not list(
    pipeline.eval_batches(source, OPS, batch_size=4, indices=none)
  )
  with pytest.raises(ValueError, match="indices: got 0 to 50, expected 0 to"):
    pipeline.eval_batches(source, OPS, batch_size=4, indices=[0, 50])


def _records(path, num, start, broken=None):
  """Writes examples as TFDS does; the image is PNG, the label its number."""
  with tf.io.TFRecordWriter(str(path)) as writer:
    for i in range(start, start + num):
      png = tf.io.encode_png(np.full([8, 8, 1], i % 256, np.uint8)).numpy()
      png = b"" if i == broken else png
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
@pytest.mark.parametrize("file_bytes", [0, 12_000])  # one after the other; 16
def test_any_part_of_files_can_be_read(stream, file_bytes):
  stream = dataclasses.replace(stream, file_bytes=file_bytes)
  assert stream.num_examples == 120
  for start, stop in ((0, 120), (49, 52), (9, 9), (119, 120)):
    records = list(stream.records(start, stop).as_numpy_iterator())
    assert [int(r["index"]) for r in records] == list(range(start, stop))
    assert [int(r["label"]) for r in records] == list(range(start, stop))
  np.testing.assert_array_equal(stream.labels(), np.arange(120))
  at = stream.raw_at(np.array([3, 50, 90])).map(stream.load)
  assert [int(r["label"]) for r in at] == [3, 50, 90]


def test_files_are_read_before_their_turn_up_to_a_gib(stream, monkeypatch):
  def noted(self, fn, **options):
    at_once[file_bytes] = options["cycle_length"]
    return interleave(self, fn, **options)

  at_once, interleave = {}, tf.data.Dataset.interleave
  monkeypatch.setattr(tf.data.Dataset, "interleave", noted)
  for file_bytes in (0, 4 * 2**20, 4 * 105 * 2**20, 4 * 2**30):
    files = dataclasses.replace(stream, file_bytes=file_bytes)
    indices = [r["index"] for r in files.raw(3, 110).as_numpy_iterator()]
    assert indices == list(range(3, 110))
  # tf.data keeps three times as many files.
  assert at_once == {4 * 2**20: 16, 4 * 105 * 2**20: 3}


@pytest.mark.slow
def test_records_at_given_numbers_are_read_from_files_once(tmp_path):
  broken = 200
  pieces = [
    tfds_source.Piece(_records(tmp_path / f"{i}", 300, 300 * i, broken), 0, 300)
    for i in range(3)
  ]
  source = tfds_source.TfdsStream(
    name="files",
    split="train",
    num_examples=900,
    num_classes=900,
    file_bytes=900_000,
    pieces=tuple(pieces),
  )
  some = range(0, 900, 2)
  batches = pipeline.eval_reader(
    source, "decode|central_crop(8)", batch_size=50, indices=some
  )
  first = list(batches())
  for piece in pieces:
    os.remove(piece.file)
  again = list(batches())
  assert_same(first, again)
  is_good = np.concatenate([batch["mask"] for batch in again])
  labels = np.concatenate([batch["label"] for batch in again])
  good = [n for n in some if n != broken]
  np.testing.assert_array_equal(labels[is_good], good)


@pytest.mark.parametrize("streams, size", [(1, 2**24), (1024, 2**18)])
def test_files_are_read_in_pieces_that_fit_the_memory(
  stream, monkeypatch, streams, size
):
  def records(file, buffer_size):
    sizes.add(buffer_size)
    return of_file(file, buffer_size=buffer_size)

  sizes, of_file = set(), tf.data.TFRecordDataset
  monkeypatch.setattr(tf.data, "TFRecordDataset", records)
  assert len(list(stream.raw(0, 60, streams))) == 60
  assert sizes == {size}


@pytest.mark.slow
def test_files_and_memory_give_the_same_records(stream):
  options = dict(name="m", split="train", num_examples=120, num_classes=256)
  memory = tfds_source.TfdsMemory(files=stream, **options)
  np.testing.assert_array_equal(memory.labels(), stream.labels())
  ops = "decode|central_crop(8)"
  assert_same(
    pipeline.eval_batches(memory, ops, batch_size=50),
    pipeline.eval_batches(stream, ops, batch_size=50),
  )
  one, resumed = (
    global_batches(stream, n, processes, ops, shuffle_buffer=32, start_step=s)
    for n, processes, s in ((4, 1, 2), (2, 2, 4))
  )
  assert_same(one[2:], resumed)
  for batch in one:
    # The image was read from the file of its own label and index.
    np.testing.assert_array_equal(batch["image"][:, 3, 3, 0], batch["label"])
    np.testing.assert_array_equal(batch["index"], batch["label"])


def test_an_image_smaller_than_the_crop_is_named(stream):
  batches = pipeline.eval_batches(
    stream, "decode|central_crop(9)", batch_size=4
  )
  with pytest.raises(
    ValueError,
    match=r"reading 'files' \('train'\).*CentralCrop.*\(9, 9\) pixels.*8",
  ):
    next(batches)
