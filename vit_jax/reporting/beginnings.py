"""The linear probes and the trials with which fine-tuning began."""

from collections.abc import Sequence

from vit_jax.reporting.page import breakable, share, table
from vit_jax.reporting.runs import Run
from vit_jax.writers.fine_tuning import LinearProbe


def section(runs: Sequence[Run]) -> str:
  """Returns what the probe of each run reached, and a table of its trials.

  "" if no run has any.
  """
  parts = [_text(r, r.linear_probe) for r in runs if r.linear_probe]
  parts += [_trials(r) for r in runs if r.trials.trials]
  return "<h2>Linear probe and trials</h2>\n" + "".join(parts) if parts else ""


def fine_tuned_text(probe: LinearProbe) -> str:
  """Returns what became of the probe, in words."""
  if probe.fine_tuned is None:
    return "fine-tuning goes on"
  saved = "linear probe" if probe.is_saved else "fine-tuned model"
  return f"fine-tuned: {share(probe.fine_tuned)}; the {saved} is saved"


def _text(run: Run, probe: LinearProbe) -> str:
  return (
    f"<p><b>{breakable(run.name)}</b>: a linear probe (ridge regression on"
    f" features of the pre-trained model, L2 {probe.l2:,g}) predicts"
    f" {share(probe.top1)} of the held-out images right;"
    f" {fine_tuned_text(probe)}.</p>"
  )


def _trials(run: Run) -> str:
  """Returns a table: candidates by rows, lengths of the trials by columns."""
  lengths = sorted({t.steps for t in run.trials.trials})
  top1 = {(t.candidate, t.steps): t.top1 for t in run.trials.trials}
  names = dict.fromkeys(t.candidate for t in run.trials.trials)
  best = {
    n: max(v or 0 for (_, m), v in top1.items() if m == n) for n in lengths
  }

  def cell(name: str, steps: int) -> str:
    if (name, steps) not in top1:
      return ""
    value = top1[name, steps]
    if value is None:
      return "diverged"
    return "*" * (value == best[steps]) + share(value)

  def last(name: str) -> list[float]:  # the longest trials first
    return [top1.get((name, n)) or -1.0 for n in reversed(lengths)]

  rows = [
    (name, *(cell(name, n) for n in lengths))
    for name in sorted(names, key=last, reverse=True)
  ]
  head = (run.name, *(f"{n:,} steps" for n in lengths))
  chosen = run.trials.chosen
  text = f"Chosen: {chosen}." if chosen else "The trials go on."
  return (
    f"{table('numbers', head, rows)}"
    f'<p class="soft">Top-1 of the held-out images at the end of short trials.'
    f" {breakable(text)}</p>"
  )
