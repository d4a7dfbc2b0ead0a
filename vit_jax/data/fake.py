"""Fake records with the shapes and sizes of a real data set.

They need no disk, so that any config can be tried, timed and tested. Their
labels repeat in order, 0, 1, ... An image is noise over a pattern of its class,
so that a model can learn something.
"""

import dataclasses
import functools

import numpy as np

from vit_jax.data import builders, splits, tfds_source
from vit_jax.data.builders import glyphs
from vit_jax.data.dataset_info import DATASETS, Info, lookup
from vit_jax.data.source import Record, Source
from vit_jax.data.tf_cpu import tf

_NUM_IMAGES = 256  # different images, which records share


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FakeSource(Source):
  """Fake records, made from their index in the base splits.

  A slice of a split has the same records as that part of the split.
  """

  spans: tuple[splits.Span, ...]
  info: Info

  def _base_index(self, index):
    """Returns the index in the unsliced split, which decides the content."""
    lengths = [span.stop - span.start for span in self.spans]
    ends = np.cumsum(lengths)
    shifts = np.array([s.start for s in self.spans]) - (ends - lengths)
    part = tf.searchsorted(ends, tf.reshape(index, [-1]), side="right")
    return index + tf.reshape(tf.gather(shifts, part), tf.shape(index))

  def load(self, raw: Record) -> Record:
    """See `Source`."""
    base = self._base_index(raw["index"])
    num_kinds = self.num_classes or _NUM_IMAGES
    images = _images(num_kinds, self.info.image, self.info.size)
    return {
      "image": tf.gather(images, base % len(images)),
      "label": tf.cast(self._label(base), self.label_spec.dtype),
      "index": raw["index"],
    }

  def _label(self, base):
    """Returns the label of a record; regression targets are 0, 1, ..."""
    if not self.is_regression:
      return _label(base, self)
    numbers = tf.cast(base % _NUM_IMAGES, tf.float32)
    return tf.repeat(numbers[..., None], self.num_classes, -1)

  def labels(self) -> np.ndarray:
    """See `Source`."""
    base = np.concatenate([np.arange(s.start, s.stop) for s in self.spans])
    if self.is_multilabel or self.is_regression:
      return self._label(base).numpy()
    if not self.num_classes:
      return np.full(len(base), -1, np.int32)
    return (base % self.num_classes).astype(np.int32)


def open_fake(dataset: str, split: str, data_dir: str | None) -> FakeSource:
  """Opens fake records for a data set of `DATASETS`, or that TFDS knows.

  Raises:
    ValueError: Unknown data set or split.
  """
  info = dataset_info(dataset, data_dir)
  spans = splits.parse_split(split, info.splits)
  return FakeSource(
    name=dataset,
    split=split,
    num_examples=splits.num_records(spans),
    num_classes=info.num_classes,
    is_multilabel=info.is_multilabel,
    is_regression=info.is_regression,
    class_names=info.names,
    spans=spans,
    info=info,
  )


def dataset_info(dataset: str, data_dir: str | None = None) -> Info:
  """Returns the info of any data set, without its records.

  Raises:
    ValueError: Unknown data set.
  """
  info = lookup(dataset)
  if info and info.splits:
    return info
  builder = tfds_source.find_builder(dataset, data_dir, known=DATASETS)
  tfds_source.check_features(dataset, builder)
  label = tfds_source.find_label(builder.info.features)
  num_classes = len(label.names)
  if builder.name == builders.Glyphs.name:
    config = builder.builder_config
    sizes = {
      "train": config.count,
      "validation": glyphs.num_validation(config.count),
    }
    return Info(num_classes, sizes, "png", (config.size, config.size))
  sizes = {k: v.num_examples for k, v in builder.info.splits.items()}
  # TFDS knows the sizes only once it has prepared the data.
  guess = {"train": 10_000, "validation": 1000, "test": 1000}
  return Info(
    num_classes,
    sizes or guess,
    is_multilabel=label.is_multilabel,
    is_regression=label.is_regression,
    names=label.names if label.is_regression else None,
  )


def _label(base, source: FakeSource):
  """Returns the class of a record, or bool [..., classes] for multi-label data.

  In multi-label data, every third record also has the next class, and every
  sixteenth none.
  """
  if not source.num_classes:
    return base * 0 - 1
  label = base % source.num_classes
  if not source.is_multilabel:
    return label
  is_first, is_second = (
    tf.one_hot(classes, source.num_classes, True, False, dtype=tf.bool)
    for classes in (label, (label + 1) % source.num_classes)
  )
  is_second &= tf.expand_dims(base % 3 == 2, -1)
  return (is_first | is_second) & tf.expand_dims(base % 16 != 15, -1)


@functools.cache
def _images(num_classes: int, kind: str, size: tuple[int, int]) -> tf.Tensor:
  """Returns encoded images, string [n]; n is a multiple of the classes if few.

  Record i gets image i modulo n, so that every class has its own images.
  """
  count = _NUM_IMAGES
  if num_classes < count:
    count -= count % num_classes
  rng = np.random.RandomState(0)
  encode = tf.io.encode_jpeg if kind == "jpeg" else tf.io.encode_png
  with tf.init_scope():  # The first use may be inside a traced function.
    return tf.stack(
      [encode(_image(rng, i % num_classes, size)) for i in range(count)]
    )


def _image(rng, label: int, size: tuple[int, int]) -> np.ndarray:
  """Returns noise over a wave; the class sets its direction and length."""
  y, x = np.mgrid[: size[0], : size[1]].astype(np.float32) / max(size)
  angle = label * 2.4  # Radians; about the golden angle, so classes differ.
  phase = x * np.cos(angle) + y * np.sin(angle)
  wave = np.sin(phase * np.float32(2 * np.pi * (1 + label % 7)))
  noise = rng.randint(0, 81, size=(*size, 3), dtype=np.uint8)
  return np.uint8(88 + 60 * wave[..., None]) + noise
