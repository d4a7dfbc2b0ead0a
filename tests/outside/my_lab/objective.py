import dataclasses

from vit_jax.objectives import Classification, Objective
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Focused(Objective):
  """The loss of classification, with other options."""

  focus: float = option(0.5, "a share, 0 to 1")
  label_smoothing: float = option(0.125, "another default than ours")
  loss: float = option(1.0, "a number, not the loss of the head")
  head_loss = "softmax"

  def errors(self):
    if not 0 <= self.focus <= 1:
      yield f"config.objective.focus: got {self.focus}, expected 0 to 1."

  def make(self, *args):
    return Classification(label_smoothing=self.label_smoothing).make(*args)


class Unstated(Focused):
  head_loss = None
