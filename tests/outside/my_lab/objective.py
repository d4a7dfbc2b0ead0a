import dataclasses

from vit_jax.objectives import Classification
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Focused(Classification):
  """Classification, with an option that it does not read."""

  focus: float = option(0.5, "a share, 0 to 1")
  label_smoothing: float = option(0.125, "another default than ours")

  def errors(self):
    yield from super().errors()
    if not 0 <= self.focus <= 1:
      yield f"config.objective.focus: got {self.focus}, expected 0 to 1."
