"""Streamed records from a simulated bucket, which takes long to answer.

The files have small records. Each piece that is read takes --seconds, and its
time at --rate, as if records had the size of ImageNet's. Prints images per
second of one host of 64, and labels per second of a split; on one host, also
images per second of an evaluation, and the seconds for few-shot examples at the
first and at the second evaluation.

python benchmarks/slow_store.py --seconds=0.02
"""

import argparse
import pathlib
import tempfile
import time

import numpy as np
from tensorflow.python.data.experimental.ops import testing  # noqa: TID251

from vit_jax.data import pipeline, tfds_records
from vit_jax.data.tf_cpu import tf

RECORD = 110e3  # bytes, the mean of ImageNet's
FILES, RECORDS = 64, 2000  # of each file
OF_LABELS = 100
OF_EVALUATION, OF_SHOTS = 780, 1250  # records of a file, as ImageNet's
ROWS = 10_000


class _Waiting:
  """A file of records, each with its share of the time of a piece."""

  def __init__(self, records, seconds):
    self._records, self._seconds = records, seconds

  def skip(self, count):
    records = self._records.skip(count)
    return records.apply(testing.sleep(int(1e6 * self._seconds)))


def _write(path: pathlib.Path) -> None:
  feature = {
    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x"])),
    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[1])),
  }
  example = tf.train.Example(features=tf.train.Features(feature=feature))
  with tf.io.TFRecordWriter(str(path)) as writer:
    for _ in range(RECORDS):
      writer.write(example.SerializeToString())


def _source(folder: pathlib.Path, files: int, records: int):
  return tfds_records.TfdsStream(
    name="slow",
    split="train",
    num_examples=files * records,
    num_classes=10,
    file_bytes=int(files * records * RECORD),
    pieces=tuple(
      tfds_records.Piece(str(folder / str(i)), 0, records) for i in range(files)
    ),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seconds", type=float, default=0.02)
  parser.add_argument("--rate", type=float, default=100e6, help="bytes/s")
  args = parser.parse_args()
  of_file = tf.data.TFRecordDataset

  def waiting(file, buffer_size):
    seconds = args.seconds * RECORD / buffer_size + RECORD / args.rate
    return _Waiting(of_file(file, buffer_size=buffer_size), seconds)

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for i in range(FILES):
      _write(folder / str(i))
    tf.data.TFRecordDataset = waiting
    records = pipeline.train_records(
      _source(folder, FILES, RECORDS),
      batch_size=4096,
      seed=0,
      shuffle_buffer=2560,
      process_index=0,
      process_count=64,
    )
    rows = iter(records.batch(64))
    next(rows)
    start, count = time.perf_counter(), 0
    while count < ROWS and time.perf_counter() - start < 25:
      next(rows)
      count += 64
    print(f"{count / (time.perf_counter() - start):,.0f} images/s of a host")
    split = _source(folder, 20, OF_LABELS)
    start = time.perf_counter()
    count = len(split.labels())
    print(f"{count / (time.perf_counter() - start):,.0f} labels/s")
    split = _source(folder, 16, OF_EVALUATION)
    start = time.perf_counter()
    count = sum(1 for _ in split.raw(0, split.num_examples))
    rate = count / (time.perf_counter() - start)
    print(f"{rate:,.0f} images/s of an evaluation")
    split = _source(folder, 16, OF_SHOTS)
    shots = split.raw_at(np.arange(0, split.num_examples, 128))
    seconds = []
    for _ in range(2):
      start = time.perf_counter()
      assert sum(1 for _ in shots) == -(-split.num_examples // 128)
      seconds.append(f"{time.perf_counter() - start:.2f} s")
    print(f"few-shot examples of 16 files: {', then '.join(seconds)}")


if __name__ == "__main__":
  main()
