"""The file of the short trials before a run, see `vit_jax.sweep.trials`."""

import dataclasses

FILE = "trials.json"  # in the workdir


@dataclasses.dataclass(frozen=True)
class Trial:
  """A short run.

  candidate: Its name.
  steps: Its length.
  top1: Share of the held-out images that it predicts right; None: it diverged.
  """

  candidate: str
  steps: int
  top1: float | None = None


@dataclasses.dataclass(frozen=True)
class Trials:
  """Contents of `FILE`.

  steps: Length of the first trials; it stays the same when the run resumes.
  trials: Those made so far.
  chosen: The best candidate; None: not known yet.
  """

  steps: int = 0
  trials: tuple[Trial, ...] = ()
  chosen: str | None = None
