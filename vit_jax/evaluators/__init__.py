"""Evaluators, by the name in `config.evals.*.kind`.

An evaluator is one file: its options with their checks, and the class that
scores. It imports jax only in functions, so that `--help` is fast. The
interface is in `vit_jax.evaluators.evaluator`.
"""

from collections.abc import Iterable

from vit_jax.evaluators.classification import ClassificationConfig
from vit_jax.evaluators.evaluator import EvaluatorConfig
from vit_jax.evaluators.fewshot import FewshotConfig
from vit_jax.evaluators.knn import KnnConfig
from vit_jax.evaluators.linear import LinearConfig
from vit_jax.evaluators.multilabel import MultilabelConfig
from vit_jax.evaluators.per_class import PerClassConfig
from vit_jax.evaluators.subset import SubsetConfig
from vit_jax.names import Table

WITHOUT_LABELS = "vit_jax.self_supervised"

EVALUATORS: Table[str, type[EvaluatorConfig]] = Table(
  {
    "attentive": f"{WITHOUT_LABELS}.attentive_probe:AttentiveConfig",
    "classification": ClassificationConfig,
    "fewshot": FewshotConfig,
    "knn": KnnConfig,
    "linear": LinearConfig,
    "multilabel": MultilabelConfig,
    "per_class": PerClassConfig,
    "rankme": f"{WITHOUT_LABELS}.rankme:RankMeConfig",
    "regression": "vit_jax.finetune.regression_evaluator:RegressionConfig",
    "segmentation": f"{WITHOUT_LABELS}.segmentation:SegmentationConfig",
    "subset": SubsetConfig,
  }
)


def groups(
  evals: Iterable[EvaluatorConfig],
) -> dict[str, tuple[EvaluatorConfig, ...]]:
  """Returns name of a group -> its evaluators, in the order of the config."""
  members: dict[str, tuple[EvaluatorConfig, ...]] = {}
  for e in evals:
    if e.group is not None:
      members[e.group] = (*members.get(e.group, ()), e)
  return members
