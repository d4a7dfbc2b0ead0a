"""Evaluators whose data sets are not on disk: refused, or left out."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.config import Config, ConfigError, EvaluatorConfig
from vit_jax.data.sources import Sources

Evals = tuple[EvaluatorConfig, ...]


def missing(evals: Sequence[EvaluatorConfig], sources: Sources) -> Evals:
  """Returns those that could be left out, and have no records on disk.

  Args:
    evals: Their options, data sets included.
    sources: What looks for the records.
  """
  return tuple(
    e
    for e in evals
    if e.LEFT_OUT_BY
    and not all(sources.is_on_disk(e.dataset, getattr(e, s)) for s in e.SPLITS)
  )


def left_out(config: Config, absent: Evals) -> Evals:
  """Returns those of `missing` that the run goes without."""
  return tuple(
    e for e in absent if getattr(config, e.LEFT_OUT_BY[0]) == e.LEFT_OUT_BY[1]
  )


def advice(config: Config, absent: Evals) -> list[str]:
  """Returns how to go without those of `missing` that are refused."""
  needed: dict[tuple[str, str], list[str]] = {}
  for e in absent:
    if e not in left_out(config, absent):
      needed.setdefault(e.LEFT_OUT_BY, []).append(e.dataset)
  return [
    f"config.{key}: got {getattr(config, key)!r}, but {', '.join(names)}: not"
    " on disk. Prepare them as said above, or go without their scores:"
    f" --config.{key}={value}."
    for (key, value), names in needed.items()
  ]


def agree(config: Config, evals: Evals, gone: Evals) -> None:
  """Compares what the processes leave out; evaluators run in all of them.

  Raises:
    ConfigError: Only some of the processes find a data set.
  """
  if jax.process_count() == 1 or not any(e.LEFT_OUT_BY for e in evals):
    return
  mine = np.array([e in gone for e in evals], bool)
  every = multihost_utils.process_allgather(mine)
  if differ := (every != every[0]).any(axis=0).nonzero()[0].tolist():
    names = ", ".join(evals[i].dataset for i in differ)
    raise ConfigError(
      [
        f"config.data.data_dir: got {config.data.data_dir!r}, where only some"
        f" of the {len(every)} processes find {names}; expected all, or none."
      ]
    )
