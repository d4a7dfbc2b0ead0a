"""Images that show the number of their record, and batches of them."""

import numpy as np

from vit_jax.data import pipeline
from vit_jax.data.source import Source
from vit_jax.data.tf_cpu import tf

OPS = "decode|pad(2)|random_crop(8)|flip_lr"


class Numbers(Source):
  """Images that show the number of their record; there are no files."""

  def load(self, raw):
    index = raw["index"]
    # A mark that moves under crops and flips: pixels differ in every place.
    image = tf.reshape(tf.range(8 * 8, dtype=tf.int64), [8, 8, 1]) + index
    image = tf.cast(tf.repeat(image % 256, 3, -1), tf.uint8)
    label = tf.cast(index % self.num_classes, tf.int32)
    return {"image": image, "label": label, "index": index}

  def labels(self):
    return np.arange(self.num_examples, dtype=np.int32) % self.num_classes


class Streamed(Numbers):
  """The same, as if the records were read from files."""

  is_by_number = False

  def raw(self, start, stop, streams=1):
    numbers = tf.data.Dataset.range(start, stop)
    return numbers.map(lambda i: {"index": i % self.num_examples})


def numbers(num_examples, cls=Numbers, **options):
  options = {"num_examples": num_examples, "num_classes": 7, **options}
  return cls(name="n", split="s", **options)


def global_batches(source, steps, processes=1, ops=OPS, **options):
  """Training batches, put together from the parts of all processes."""
  options = {"batch_size": 16, "seed": 0, **options}
  parts = [
    pipeline.train_batches(
      source, ops, process_index=p, process_count=processes, **options
    )
    for p in range(processes)
  ]
  return [joined([next(part) for part in parts]) for _ in range(steps)]


def joined(parts):
  return {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}


def assert_same(batches, others):
  for batch, other in zip(batches, others, strict=True):
    assert batch.keys() == other.keys()
    for key in batch:
      np.testing.assert_array_equal(batch[key], other[key], err_msg=key)


def scored(source, ops, **options):
  """All records as one batch of an evaluation."""
  (batch,) = pipeline.eval_batches(
    source, ops, batch_size=source.num_examples, **options
  )
  return batch


def unusable(caplog):
  """The lines of the log that name records without pixels or labels."""
  lines = [r.getMessage() for r in caplog.records]
  return [m for m in lines if m.startswith("Cannot use ")]
