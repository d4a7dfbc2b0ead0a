"""Mean entropy of the predictions on a split: how unsure a model is."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from vit_jax.evaluators.evaluator import Context, Evaluator, EvaluatorConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class EntropyConfig(EvaluatorConfig):
  """Mean entropy of the predictions."""

  kind: str = "entropy"
  temperature: float = option(1.0, "divides the logits")

  scores_head: ClassVar[bool] = True

  def errors(self, where: str) -> Iterator[str]:
    """See `EvaluatorConfig`."""
    yield from super().errors(where)
    if self.temperature <= 0:
      yield f"{where}.temperature: got {self.temperature}, expected above 0."

  def make(self, context: Context) -> Evaluator:
    """See `EvaluatorConfig`."""
    return Entropy(context)


class Entropy(Evaluator):
  """Scores `<name>/entropy`, nats."""

  def __init__(self, context: Context):
    import jax

    super().__init__(context)

    def entropies(params, batch):
      logits, _ = context.predict(params, batch["image"])
      logp = jax.nn.log_softmax(logits / self.config.temperature)
      return -(jax.numpy.exp(logp) * logp).sum(-1), batch["mask"]

    self._entropies = context.jit(entropies)

  def gather(self, params: Any) -> list:
    """Returns the entropies of every batch, and which rows count."""
    batches = self.context.batches(self.context.sources["split"])
    return list(self.context.forward(self._entropies, params, batches))

  def score(self, gathered: list) -> dict[str, float]:
    """Returns their mean."""
    values = [v for part, mask in gathered for v in part[mask]]
    return {f"{self.config.name}/entropy": float(sum(values) / len(values))}
