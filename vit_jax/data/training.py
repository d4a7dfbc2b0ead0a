"""The training data of a config."""

import dataclasses
from collections.abc import Iterator

from vit_jax.batch import Batch
from vit_jax.config import Config
from vit_jax.data import decoding
from vit_jax.data.pipeline import train_batches
from vit_jax.data.source import Source


@dataclasses.dataclass(frozen=True)
class TrainingData:
  """A split in the order of config.seed, an implementation of `batch.Data`.

  Args:
    source: The split that config.data names.
    config: Its preprocessing, shuffling and batch size.
  """

  source: Source
  config: Config

  @property
  def num_examples(self) -> int:
    """Number of records in the split."""
    return self.source.num_examples

  @property
  def num_classes(self) -> int:
    """Number of classes; labels are below it."""
    return self.source.num_classes

  @property
  def class_names(self) -> tuple[str, ...] | None:
    """Names by label; None if the data set has none."""
    return self.source.class_names

  def identity(self) -> str:
    """What tells the records from others, see `Source`."""
    return self.source.identity()

  def most_unusable(self, step: int) -> int:
    """Returns how many rows up to a step may be of broken records.

    No record is in more than one row of an epoch, so more rows than this are
    those of more records than `decoding.most_unusable` allows.
    """
    rows = step * self.config.data.batch_size
    epochs = -(-rows // self.num_examples)
    num = self.num_examples
    return epochs * decoding.most_unusable(num, num)

  def batches(
    self, start_step: int, process_index: int, process_count: int
  ) -> Iterator[Batch]:
    """See `Data`; batch n is a function of (config.seed, n)."""
    data = self.config.data
    return train_batches(
      self.source,
      data.ops,
      batch_size=data.batch_size,
      seed=self.config.seed,
      start_step=start_step,
      shuffle_buffer=data.shuffle_buffer,
      process_index=process_index,
      process_count=process_count,
    )
