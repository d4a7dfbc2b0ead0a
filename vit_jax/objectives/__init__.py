"""What a run learns: every objective by the name in `config.objective.kind`.

An objective is one file: its options, what can be wrong with them, and the
module and the loss that they make. jax and flax are imported inside its
functions, not by the file, so that `--help` need not wait for them. See
`vit_jax.objectives.objective`.
"""

from vit_jax.objectives.classification import Classification
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {
  "classification": Classification,
  "masked_patch": MaskedPatch,
}
