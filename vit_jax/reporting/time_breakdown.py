"""Where the wall time of runs went: a bar and its numbers for each."""

import html
from collections.abc import Sequence

from vit_jax.callbacks.accounting import duration
from vit_jax.reporting.page import breakable, missing
from vit_jax.reporting.runs import Run

# In the order of the bar; the words of the page for each.
WORDS = {
  "step": "steps",
  "input": "waiting for images",
  "evaluation": "evaluations",
  "save": "checkpoints",
  "start": "starts",
  "compile": "compilation",
  "repeated": "steps done again",
  "restart": "stopped",
}
SMALLEST = 0.004  # share of a bar that can be seen


def section(runs: Sequence[Run]) -> str:
  """Returns the section; "" if no run has an account of its time."""
  found = {run.label: run.seconds for run in runs}
  told = {label: seconds for label, seconds in found.items() if seconds}
  if not told:
    return ""
  lacking = ", ".join(label for label in found if label not in told)
  text = (
    "Wall time since the first start of each run, to its end; of one that did"
    " not end, or of an earlier version, to its last checkpoint or line of"
    " training. “Stopped” is from the last sign of life of a process to the"
    " start of the next; steps after the last checkpoint had to be done again."
  )
  parts = [
    (f"<h3>{breakable(label)}</h3>" if runs[1:] else "") + _bar(seconds)
    for label, seconds in told.items()
  ]
  lacking = lacking and f"times of {lacking}, which kept no account"
  return (
    f"<h2>Where the time went</h2>\n<p>{text}</p>{''.join(parts)}"
    f"{missing(lacking)}"
  )


def _bar(seconds: dict[str, float]) -> str:
  """Returns a bar of the shares, and below it each with its time."""
  total = sum(seconds.values())
  shares = {k: seconds[k] / total if total else 0.0 for k in WORDS}
  parts = "".join(
    f'<i class="spent-{k}" style="width: {100 * share:.2f}%"></i>'
    for k, share in shares.items()
    if share >= SMALLEST
  )
  items = "".join(
    f'<li><i class="spent-{k}"></i>{WORDS[k]} <b>{duration(seconds[k])}</b>'
    f" {100 * share:.1f}%</li>"
    for k, share in shares.items()
    if seconds[k] >= 0.05
  )
  said = f"{100 * shares['step']:.0f} % of {duration(total)} in steps"
  return (
    f'<div class="spent" role="img" aria-label="{html.escape(said)}">{parts}'
    f'</div><ul class="spent-key">{items}</ul>'
  )
