"""What a run writes: metrics, metadata, atomic files."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricWriter(Protocol):
  """Takes the metrics of a run, as clu's `metric_writers.MetricWriter` does.

  Any of clu's writers is one, and any object with these methods.
  """

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes metrics of a step, which is the number of updates applied.

    Scores of an evaluator come in a call of their own, behind those of
    training. Steps never decrease.
    """

  def flush(self) -> None:
    """Writes what is buffered; called before each checkpoint."""

  def close(self) -> None:
    """Ends writing."""
