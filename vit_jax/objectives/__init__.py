"""Objectives: every objective by its name in `config.objective.kind`.

An objective is one file with its options, their checks, the module and the
loss. Only its functions import jax and flax, so that `--help` is fast. See
`vit_jax.objectives.objective`.
"""

from vit_jax.finetune.regression import Regression
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.objectives.objective import Objective
from vit_jax.self_supervised.distillation import Distillation

OBJECTIVES: dict[str, type[Objective]] = {
  "classification": Classification,
  "distillation": Distillation,
  "masked_patch": MaskedPatch,
  "regression": Regression,
}
