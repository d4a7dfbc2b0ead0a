"""Evaluators whose data sets are not on disk: an error, or left out."""

import shlex
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.config import Config, ConfigError, EvaluatorConfig
from vit_jax.data.sources import Sources

Evals = tuple[EvaluatorConfig, ...]


def missing(evals: Sequence[EvaluatorConfig], sources: Sources) -> Evals:
  """Returns the evaluators that may be left out and have no records on disk.

  Args:
    evals: The options of all evaluators, data sets included.
    sources: Opens the data sets.
  """
  return tuple(
    e
    for e in evals
    if e.LEFT_OUT_BY
    and not all(sources.is_on_disk(e.dataset, getattr(e, s)) for s in e.SPLITS)
  )


def left_out(config: Config, absent: Evals) -> Evals:
  """Returns the missing evaluators that the config leaves out."""
  return tuple(
    e for e in absent if getattr(config, e.LEFT_OUT_BY[0]) == e.LEFT_OUT_BY[1]
  )


def advice(config: Config, absent: Evals) -> list[str]:
  """Returns an error for missing evaluators that the config does not leave out.

  One error for each option that would leave them out, not one for each data
  set.
  """
  needed: dict[tuple[str, str], list[str]] = {}
  for e in absent:
    # The training data have an error of their own.
    if e not in left_out(config, absent) and e.dataset != config.data.dataset:
      needed.setdefault(e.LEFT_OUT_BY, []).append(e.dataset)
  data_dir = config.data.data_dir
  where = f" --data_dir={shlex.quote(data_dir)}" if data_dir else ""
  return [
    f"config.{key}: got {getattr(config, key)!r}, but not on disk:"
    f" {', '.join(names)}. Leave out their scores: --config.{key}={value}; or"
    f" prepare them: for d in {' '.join(map(shlex.quote, names))}; do vit-jax"
    f" prepare $d{where}; done"
    for (key, value), names in needed.items()
  ]


def agree(data_dir: str | None, here: Mapping[str, bool]) -> None:
  """Raises unless all processes have the same data sets on disk. Collective.

  Args:
    data_dir: `config.data.data_dir`.
    here: Data set -> whether this process has it; the same keys in all.

  Raises:
    ConfigError: Only some of the processes have a data set.
  """
  if jax.process_count() == 1 or not here:
    return
  mine = np.array(list(here.values()), bool)
  every = multihost_utils.process_allgather(mine)
  differ = (every != every[0]).any(axis=0)
  if names := [n for n, d in zip(here, differ, strict=True) if d]:
    raise ConfigError(
      [
        f"config.data.data_dir: got {data_dir!r}, where only some of the"
        f" {len(every)} processes find {', '.join(names)}; expected all, or"
        " none."
      ]
    )
