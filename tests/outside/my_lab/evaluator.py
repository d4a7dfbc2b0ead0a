import dataclasses

from vit_jax.evaluators import ClassificationConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Scores(ClassificationConfig):
  """The scores of the kind `classification`."""

  power: int = option(1, "an option of one's own")
