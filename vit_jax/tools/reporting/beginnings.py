"""The linear probes and the trials before fine-tuning."""

from collections.abc import Sequence

from vit_jax.finetune.results import ProbeOutcome
from vit_jax.tools.reporting.page import breakable, share, table
from vit_jax.tools.reporting.runs import Run


def section(runs: Sequence[Run]) -> str:
  """Returns the score of each run's linear probe, and a table of its trials.

  Returns "" if no run has a probe or trials.
  """
  parts = [_text(r, r.linear_probe) for r in runs if r.linear_probe]
  parts += [_trials(r) for r in runs if r.trials.trials]
  return "<h2>Linear probe and trials</h2>\n" + "".join(parts) if parts else ""


def fine_tuned_text(probe: ProbeOutcome) -> str:
  """Returns a text about the score after fine-tuning."""
  if probe.weight is None:
    return "fine-tuning goes on"
  balanced = ""
  if probe.balanced is not None:
    balanced = (
      f"; balanced accuracy: {share(probe.balanced)}, fine-tuned:"
      f" {share(probe.fine_tuned_balanced)}, saved:"
      f" {share(probe.saved_balanced)}"
    )
  return (
    f"fine-tuned: {share(probe.fine_tuned)}; saved: {probe.saved_model},"
    f" {share(probe.saved)}{balanced}"
  )


def _text(run: Run, probe: ProbeOutcome) -> str:
  return (
    f"<p><b>{breakable(run.name)}</b>: a linear probe (ridge regression on"
    f" features of the pre-trained model, L2 {probe.l2:,g}) predicts"
    f" {share(probe.top1)} of the held-out images right;"
    f" {fine_tuned_text(probe)}.</p>"
  )


def _trials(run: Run) -> str:
  """Returns a table of the trials in order; the best one is marked."""
  trials = run.trials.trials
  best = min((t.loss for t in trials if t.loss is not None), default=None)

  def loss(trial):
    if trial.loss is None:
      return "diverged"
    return "*" * (trial.loss == best) + f"{trial.loss:.4f}"

  rows = [(t.changes, f"{t.steps:,}", loss(t), share(t.top1)) for t in trials]
  head = ("trial", "steps", "held-out loss", "top-1")
  chosen = run.trials.chosen
  text = f"Chosen: {chosen}." if chosen else "The trials go on."
  return (
    f"<p><b>{breakable(run.name)}</b>: changes were tried one after the other;"
    " those with a lower loss on the held-out images stayed."
    f" {breakable(text)}</p>" + table("numbers", head, rows)
  )
