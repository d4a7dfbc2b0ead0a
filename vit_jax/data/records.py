"""What every source of records can do; `sources.open_source` makes one."""

import abc
import dataclasses
from typing import Any

import numpy as np

from vit_jax.data.host_tf import as_is, tf

Record = dict[str, Any]  # Of tensors, maybe nested.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Source(abc.ABC):
  """A split of a data set: records in a fixed order, numbered from 0.

  Reading has two stages. `raw` streams records as they are stored, or only
  their numbers, and is what gets shuffled; `load` turns one of them, in
  parallel with others, into {"image", "label", "index"}: the image as encoded
  bytes or uint8 [h, w, c], the label int32 [], the index int64 [].

  Attributes:
    name: as given in the config.
    split: as given in the config, slices included.
    num_examples: records in the split.
    num_classes: labels are below this.
    class_names: by label; None if the data set does not tell.
  """

  name: str
  split: str
  num_examples: int
  num_classes: int
  class_names: tuple[str, ...] | None = None
  # Records met so far that cannot be decoded; the pipeline fills it in.
  undecodable: set[int] = dataclasses.field(default_factory=set, repr=False)

  # Whether raw records are just numbers: shuffling them needs no memory.
  is_light = True

  def raw(self, start, stop) -> tf.data.Dataset:
    """Streams the raw records `start` to `stop` (excluded; may be tensors)."""
    return tf.data.Dataset.zip({"index": tf.data.Dataset.range(start, stop)})

  def raw_at(self, indices: np.ndarray) -> tf.data.Dataset:
    """Streams the raw records at the indices, which must rise."""
    indices = np.asarray(indices, np.int64)
    return tf.data.Dataset.from_tensor_slices({"index": indices})

  @abc.abstractmethod
  def load(self, raw: Record) -> Record:
    """Turns a raw record into {"image", "label", "index"}."""

  def reload(self, raw: Record) -> Record:
    """As `load`, by a slower way, for an image that could not be decoded."""
    return self.load(raw)

  @abc.abstractmethod
  def labels(self) -> np.ndarray:
    """Returns all labels, int32 [num_examples], without decoding an image."""

  def record_name(self, index: int) -> str:
    """Returns what a message calls a record."""
    return f"record {index} of {self.name!r}, split {self.split!r}"

  def records(self, start=0, stop=None) -> tf.data.Dataset:
    """Streams {"image", "label", "index"} in order."""
    raw = self.raw(start, self.num_examples if stop is None else stop)
    return raw.map(as_is(self.load), num_parallel_calls=tf.data.AUTOTUNE)
