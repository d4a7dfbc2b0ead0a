"""Scores of a model: every evaluator by the name in `config.evals.*.kind`.

An evaluator is one file: its options with their checks, and the class that
scores. Its functions import jax, the file does not, so that `--help` is quick.
See `vit_jax.evaluators.evaluator`.
"""

from collections.abc import Iterable

from vit_jax.evaluators.classification import ClassificationConfig
from vit_jax.evaluators.evaluator import EvaluatorConfig
from vit_jax.evaluators.fewshot import FewshotConfig
from vit_jax.evaluators.knn import KnnConfig
from vit_jax.evaluators.linear import LinearConfig
from vit_jax.evaluators.multilabel import MultilabelConfig
from vit_jax.evaluators.per_class import PerClassConfig
from vit_jax.evaluators.regression import RegressionConfig
from vit_jax.evaluators.subset import SubsetConfig

EVALUATORS: dict[str, type[EvaluatorConfig]] = {
  "classification": ClassificationConfig,
  "fewshot": FewshotConfig,
  "knn": KnnConfig,
  "linear": LinearConfig,
  "multilabel": MultilabelConfig,
  "per_class": PerClassConfig,
  "regression": RegressionConfig,
  "subset": SubsetConfig,
}


def groups(
  evals: Iterable[EvaluatorConfig],
) -> dict[str, tuple[EvaluatorConfig, ...]]:
  """Returns the evaluators of each `group` by its name, in their order."""
  members: dict[str, tuple[EvaluatorConfig, ...]] = {}
  for e in evals:
    if e.group is not None:
      members[e.group] = (*members.get(e.group, ()), e)
  return members
