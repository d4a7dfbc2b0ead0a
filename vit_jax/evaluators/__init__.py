"""Judges of a state: each has `run(params)` -> {metric: value}.

It has two halves: `gather(params)`, for which the devices are needed, and
`score(gathered)` on the host, which training need not wait for.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.config import Config
from vit_jax.evaluators.background import Background as Background
from vit_jax.evaluators.classification import Classification
from vit_jax.evaluators.fewshot import Fewshot

EVALUATORS = {"classification": Classification, "fewshot": Fewshot}


Evaluator = Classification | Fewshot


def build(
  config: Config,
  predict: Callable[[Any, jax.Array], Any],
  mesh: Mesh,
  random_params: Callable[[], Any],
) -> list[Evaluator]:
  """Returns the evaluators of a config, in its order.

  Args:
    config: The run; options left None are taken from `config.data`.
    predict: (params, uint8 images) -> (logits, out), not jitted.
    mesh: Where it runs.
    random_params: Makes freshly initialised parameters, for baselines.
  """
  judges = []
  for e in config.evals:
    e = dataclasses.replace(
      e,
      dataset=e.dataset or config.data.dataset,
      batch_size=e.batch_size or config.data.batch_size,
    )
    judges.append(EVALUATORS[e.kind](e, config, predict, mesh, random_params))
  return judges
