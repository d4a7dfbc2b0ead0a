"""An evaluator that compares with a second checkpoint."""

import dataclasses

from vit_jax.evaluators.evaluator import Evaluator, EvaluatorConfig
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class Agreement(EvaluatorConfig):
  """Linear CKA of the features of the run and of another model."""

  other: str = option("", "the other model, anything that vit_jax.load reads")

  def errors(self, where):
    yield from super().errors(where)
    if not self.other:
      yield f"{where}.other: got none, expected weights to compare with."

  def models(self):
    return {"other": self.other}

  def make(self, context):
    return _Agreement(context)


class _Agreement(Evaluator):
  """Scores `<name>/cka`, 0 to 1 (arXiv:1905.00414)."""

  def __init__(self, context):
    super().__init__(context)
    self._other = context.models["other"]

    def features(params, batch):
      ours, theirs = params
      _, a = context.predict(ours, batch["image"])
      _, b = self._other.predict(theirs, batch["image"])
      return a["pre_logits"], b["pre_logits"], batch["mask"]

    self._features = context.jit(features)

  def gather(self, params):
    """Returns the features of both models for each batch."""
    batches = self.context.batches(self.context.sources["split"])
    both = params, self._other.params
    return list(self.context.forward(self._features, both, batches))

  def score(self, gathered):
    """Returns the CKA, computed on the host."""
    import numpy as np

    a, b = (
      np.concatenate([x[i][x[2]] for x in gathered]).astype(np.float64)
      for i in (0, 1)
    )
    a, b = a - a.mean(0), b - b.mean(0)
    norm = lambda x, y: np.linalg.norm(x.T @ y) ** 2
    cka = norm(a, b) / max(1e-30, (norm(a, a) * norm(b, b)) ** 0.5)
    return {f"{self.config.name}/cka": float(cka)}
