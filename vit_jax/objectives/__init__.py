"""What a run learns: every objective by the name in `config.objective.kind`.

An objective is one file: its options with their checks, the module and the
loss. Its functions import jax and flax, the file does not, so that `--help` is
quick. See `vit_jax.objectives.objective`.
"""

from vit_jax.objectives.classification import Classification
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.objectives.objective import Objective
from vit_jax.objectives.regression import Regression

OBJECTIVES: dict[str, type[Objective]] = {
  "classification": Classification,
  "masked_patch": MaskedPatch,
  "regression": Regression,
}
