"""Files on the start of a fine-tuning: its linear probe, its short trials."""

import dataclasses

LINEAR_PROBE, TRIALS = "linear_probe.json", "trials.json"  # in the workdir


@dataclasses.dataclass(frozen=True)
class ProbeOutcome:
  """Contents of `LINEAR_PROBE`, see `vit_jax.linear_probe`.

  top1: Share of the held-out images that the probe predicts right.
  l2: Its penalty.
  fine_tuned: The same share for the fine-tuned model; None during training.
  balanced, fine_tuned_balanced: Their balanced accuracies, which decide if the
    loss weights the classes; otherwise None, and the shares decide.
  """

  top1: float = 0.0
  l2: float = 0.0
  fine_tuned: float | None = None
  balanced: float | None = None
  fine_tuned_balanced: float | None = None

  @property
  def is_saved(self) -> bool:
    """Whether the probe is better, and is therefore the model of the run."""
    if self.balanced is not None and self.fine_tuned_balanced is not None:
      return self.fine_tuned_balanced < self.balanced
    return self.fine_tuned is not None and self.fine_tuned < self.top1


@dataclasses.dataclass(frozen=True)
class Trial:
  """A short run.

  changes: Names of its changes to the config.
  steps: Its length.
  top1: Share of the held-out images that it predicts right; None if it
    diverged.
  loss: Their mean loss, which compares trials; None if it diverged.
  """

  changes: str = ""
  steps: int = 0
  top1: float | None = None
  loss: float | None = None


@dataclasses.dataclass(frozen=True)
class Trials:
  """Contents of `TRIALS`, see `vit_jax.sweep.trials`.

  steps: Length of a trial; it stays the same when the run resumes.
  trials: The trials so far.
  chosen: The changes that the run has; None before the choice.
  """

  steps: int = 0
  trials: tuple[Trial, ...] = ()
  chosen: str | None = None
