"""The data of a config, as a run trains on them."""

import dataclasses
from collections.abc import Iterator

from vit_jax.batch import Batch
from vit_jax.config import Config
from vit_jax.data.pipeline import train_batches
from vit_jax.data.records import Source


@dataclasses.dataclass(frozen=True)
class TrainingData:
  """A split in the order of config.seed, an implementation of `batch.Data`.

  Args:
    source: What config.data names.
    config: Says how it is preprocessed, shuffled and cut into batches.
  """

  source: Source
  config: Config

  @property
  def num_examples(self) -> int:
    """Records of the split."""
    return self.source.num_examples

  @property
  def num_classes(self) -> int:
    """Labels are below this."""
    return self.source.num_classes

  @property
  def class_names(self) -> tuple[str, ...] | None:
    """By label; None if the data set does not tell."""
    return self.source.class_names

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
