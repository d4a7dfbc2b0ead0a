"""Opens the tasks of VTAB-1k, "vtab:<task>", and makes their labels.

A task is slices of a data set of TFDS, see `vit_jax.data.vtab`. Some data sets
have no label, but objects or positions from which it is made. Images do not
change, except those of dSprites, whose pixels 0 and 1 become 0 and 255.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.data import splits, tfds_source, vtab
from vit_jax.data.source import Record
from vit_jax.data.tf_cpu import tf
from vit_jax.data.tfds_records import TfdsFiles
from vit_jax.data.vtab import TASKS, Task
from vit_jax.options import check_choice

CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)
NO_VEHICLE = 1000.0  # metres
NUM_VEHICLE_TYPES = 3  # car, van, truck: the first of KITTI's types
FEWEST_OBJECTS = 3  # in an image of CLEVR


def interval(value, bounds: Sequence[float]):
  """Returns the number of the last bound below a value, int32.

  A value on a bound is not above it.

  Args:
    value: float32 [].
    bounds: Rising, the first one below every value.

  Example:
    >>> [int(interval(x, (0.0, 8.0, 9.0))) for x in (8.0, 8.1, 9.5)]
    [0, 1, 2]
  """
  is_below = tf.constant(bounds, tf.float32) < value
  return tf.maximum(tf.reduce_sum(tf.cast(is_below, tf.int32)) - 1, 0)


def object_count(record: Record):
  """Returns the number of objects minus 3, the smallest number: 0 to 7."""
  return tf.shape(record["objects/pixel_coords"])[0] - FEWEST_OBJECTS


def object_distance(record: Record):
  """Returns the interval of the depth of the nearest object: 0 to 5."""
  depths = record["objects/pixel_coords"][:, 2]
  return interval(tf.reduce_min(depths), CLEVR_DEPTHS)


def vehicle_distance(record: Record):
  """Returns the interval of the distance of the nearest car, van or truck.

  0: up to 8 metres, 1: up to 20 metres, 2: farther, 3: no such vehicle.
  """
  is_vehicle = record["objects/type"] < NUM_VEHICLE_TYPES
  distances = tf.boolean_mask(record["objects/location"][:, 2], is_vehicle)
  nearest_one = tf.reduce_min(tf.concat([distances, [NO_VEHICLE]], 0))
  return interval(nearest_one, KITTI_METRES)


def x_position(record: Record):
  """Returns the horizontal position of the shape: 32 in 16 classes."""
  return _scaled(record["label_x_position"], 32 / 16)


def orientation(record: Record):
  """Returns the orientation of the shape: 40 in 16 classes, 3 or 2 in each."""
  return _scaled(record["label_orientation"], 40 / 16)


def _scaled(value, width: float):
  return tf.cast(tf.floor(tf.cast(value, tf.float32) / width), tf.int32)


class Label(NamedTuple):
  """Features of a serialized example, and the label that they make."""

  features: Mapping[str, Any]
  make: Callable[[Record], tf.Tensor]


def _feature(name: str) -> Label:
  """Returns a label that is a feature of the data set."""
  features = {name: tf.io.FixedLenFeature([], tf.int64)}
  return Label(features, lambda record: record[name])


def _many(shape: Sequence[int], dtype):
  return tf.io.FixedLenSequenceFeature(shape, dtype, allow_missing=True)


_COORDS = {"objects/pixel_coords": _many([3], tf.float32)}
_VEHICLES = {
  "objects/type": _many([], tf.int64),
  "objects/location": _many([3], tf.float32),
}
LABELS = {
  "label": _feature("label"),
  "label_azimuth": _feature("label_azimuth"),
  "label_elevation": _feature("label_elevation"),
  "object_count": Label(_COORDS, object_count),
  "object_distance": Label(_COORDS, object_distance),
  "vehicle_distance": Label(_VEHICLES, vehicle_distance),
  "x_position": Label(_feature("label_x_position").features, x_position),
  "orientation": Label(_feature("label_orientation").features, orientation),
}


def black_and_white(image):
  """Returns a PNG with 0 and 255 in place of 0 and 1."""
  return tf.io.encode_png(tf.io.decode_png(image) * tf.constant(255, tf.uint8))


IMAGES = {"dsprites:2.*.*": black_and_white}


def _parse(task: Task, example: tf.Tensor, names: Sequence[str]) -> Record:
  """Parses a serialized example, see `TfdsFiles.parse`."""
  label = LABELS[task.label]
  features = dict(label.features) if "label" in names else {}
  if "image" in names:
    features["image"] = tf.io.FixedLenFeature([], tf.string)
  record = tf.io.parse_single_example(example, features)
  parsed = {}
  if "image" in names:
    convert = IMAGES.get(task.dataset, lambda image: image)
    parsed["image"] = convert(record["image"])
  if "label" in names:
    parsed["label"] = tf.cast(label.make(record), tf.int32)
  return parsed


def open_vtab(dataset: str, split: str, data_dir: str | None) -> TfdsFiles:
  """Opens a split of a task: train800, val200, train800val200 or test.

  Raises:
    ValueError: Unknown task or split; its data are not on disk (the message has
      the command that puts them there), or have other numbers of records than
      the benchmark's, so that its slices would be other images.
  """
  name = dataset.removeprefix(vtab.PREFIX)
  check_choice(name, TASKS, f"data set {dataset!r}")
  task = TASKS[name]
  builder = tfds_source.find_builder(task.dataset, data_dir)
  tfds_source.prepared(builder, task.dataset, data_dir)
  infos = builder.info.splits
  for base, size in task.sizes.items():
    if base not in infos or infos[base].num_examples != size:
      count = infos[base].num_examples if base in infos else 0
      raise ValueError(
        f"got data set {dataset!r} with {count:,} records in {base!r} of"
        f" {builder.data_dir}, expected the {size:,} of {task.dataset}."
      )
  spans = task.spans(split)
  names = None
  if task.label == "label":
    names = tuple(builder.info.features["label"].names)
  pieces = [p for span in spans for p in tfds_source.pieces_of(infos, span)]
  return tfds_source.reader(builder, task.dataset)(
    name=dataset,
    split=split,
    num_examples=splits.num_records(spans),
    num_classes=task.num_classes,
    class_names=names,
    pieces=tuple(pieces),
    file_bytes=tfds_source.bytes_of(infos, spans),
    parse=functools.partial(_parse, task),
    remark=task.note,
  )
