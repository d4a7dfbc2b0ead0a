"""Judges of a state: each has `run(params)` -> {metric: value}.

It has two halves: `gather(params)`, for which the devices are needed, and
`score(gathered)` on the host, which training need not wait for. `note` is a
line about the data that it scores.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.config import Config, ConfigError
from vit_jax.evaluators.background import Background as Background
from vit_jax.evaluators.classification import Classification
from vit_jax.evaluators.fewshot import Fewshot
from vit_jax.weights import Head

EVALUATORS = {"classification": Classification, "fewshot": Fewshot}


Evaluator = Classification | Fewshot


def build(
  config: Config,
  predict: Callable[[Any, jax.Array], Any],
  mesh: Mesh,
  random_params: Callable[[], Any],
  head: Head,
) -> list[Evaluator]:
  """Returns the evaluators of a config, in its order.

  Args:
    config: The run; options left None are taken from `config.data`.
    predict: (params, uint8 images) -> (logits, out), not jitted.
    mesh: Where it runs.
    random_params: Makes freshly initialised parameters, for baselines.
    head: The classes of the model's logits.

  Raises:
    ConfigError: The classes of a data set are not those of the head.
  """
  judges, faults = [], []
  for e in config.evals:
    e = dataclasses.replace(
      e,
      dataset=e.dataset or config.data.dataset,
      batch_size=e.batch_size or config.data.batch_size,
    )
    try:
      judges.append(
        EVALUATORS[e.kind](e, config, predict, mesh, random_params, head)
      )
    except ValueError as error:
      faults.append(f"config.evals.{e.name}.dataset: {error}")
  if faults:
    raise ConfigError(faults)
  return judges
