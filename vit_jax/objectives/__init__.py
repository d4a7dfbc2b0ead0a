"""What a run learns: every objective by the name in `config.objective.kind`.

An objective is a frozen dataclass of its own options. `faults` says what is
wrong with them by words alone; `make` returns the module that is trained and
its loss. jax and flax are imported by `make`, not by these files, so that
`--help` need not wait for them.
"""

from vit_jax.objectives.classification import Classification

OBJECTIVES = {"classification": Classification}

Objective = Classification
