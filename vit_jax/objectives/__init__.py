"""Objectives: every objective by its name in `config.objective.kind`.

An objective is one file with its options, their checks, the module and the
loss. Only its functions import jax and flax, so that `--help` is fast. See
`vit_jax.objectives.objective`. Those of the wings are imported on demand.
"""

from vit_jax.names import Table
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.objectives.objective import Objective

__all__ = ["OBJECTIVES", "Classification", "MaskedPatch", "Objective"]

WITHOUT_LABELS = "vit_jax.self_supervised"

OBJECTIVES: Table[str, type[Objective]] = Table(
  {
    "classification": Classification,
    "dino": f"{WITHOUT_LABELS}.dino:DINO",
    "dinov2": f"{WITHOUT_LABELS}.dinov2:DINOv2",
    "distillation": f"{WITHOUT_LABELS}.distillation:Distillation",
    "mae": f"{WITHOUT_LABELS}.mae:MAE",
    "masked_patch": MaskedPatch,
    "regression": "vit_jax.finetune.regression:Regression",
  }
)
