"""Files on the start of a fine-tuning: its linear probe, its short trials."""

import dataclasses

LINEAR_PROBE, TRIALS = "linear_probe.json", "trials.json"  # in the workdir


@dataclasses.dataclass(frozen=True)
class ProbeOutcome:
  """Contents of `LINEAR_PROBE`, see `vit_jax.finetune.linear_probe`.

  top1: Share of the held-out images that the probe predicts right.
  l2: Its penalty.
  fine_tuned: The same share for the fine-tuned model; None during training.
  saved: The same share for the saved model; None during training.
  weight: Weight of the fine-tuned parameters in the saved model, a mean of both
    models: 0 is the probe, 1 the fine-tuned model. None during training.
  balanced, fine_tuned_balanced, saved_balanced: The balanced accuracies of the
    three, which decide if the loss weights the classes; otherwise None, and the
    shares decide.
  """

  top1: float = 0.0
  l2: float = 0.0
  fine_tuned: float | None = None
  saved: float | None = None
  weight: float | None = None
  balanced: float | None = None
  fine_tuned_balanced: float | None = None
  saved_balanced: float | None = None

  @property
  def saved_model(self) -> str | None:
    """What the saved model is, in words; None during training."""
    if self.weight is None:
      return None
    if self.weight == 0:
      return "the linear probe"
    if self.weight == 1:
      return "the fine-tuned model"
    return (
      f"the mean of fine-tuned model ({self.weight:.0%}) and linear probe"
      f" ({1 - self.weight:.0%})"
    )


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
  """Contents of `TRIALS`, see `vit_jax.finetune.trials`.

  steps: Length of a trial; it stays the same when the run resumes.
  trials: The trials so far.
  chosen: The changes that the run has; None before the choice.
  """

  steps: int = 0
  trials: tuple[Trial, ...] = ()
  chosen: str | None = None
