"""What a run writes: metrics, metadata, atomic files."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricWriter(Protocol):
  """The interface of a writer of metrics, a part of clu's `MetricWriter`.

  Any of clu's metric_writers fits, and any object with these methods.
  """

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes metrics of a step, which is the number of updates applied.

    Each evaluator's scores come in a separate call, after the metrics of
    training. Steps never decrease.
    """

  def flush(self) -> None:
    """Writes what is buffered; called before each checkpoint."""

  def close(self) -> None:
    """Ends writing."""
