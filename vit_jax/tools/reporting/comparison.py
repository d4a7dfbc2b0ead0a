"""Compares runs: state, options that differ, cost."""

import json
from collections.abc import Sequence
from typing import Any

from vit_jax.config import options_of
from vit_jax.tools.reporting import tables
from vit_jax.tools.reporting.page import breakable, missing, states
from vit_jax.tools.reporting.run_state import remarks, state
from vit_jax.tools.reporting.runs import Run
from vit_jax.writers.atomic_files import lines_text


def states_section(runs: Sequence[Run]) -> str:
  """Returns the state of each run, and a note about unreadable lines."""
  rows = [(r.name if runs[1:] else "", *state(r)[:2], remarks(r)) for r in runs]
  unread = [
    f"{lines_text(r.unread)} of the metrics of {r.name}, cut off or damaged"
    for r in runs
    if r.unread
  ]
  note = f"Not read: {breakable('; '.join(unread))}."
  return states(rows) + (f'<p class="missing">{note}</p>' if unread else "")


def differences(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
  """Returns the options in which runs differ, with the value of each run.

  An evaluator that only some runs have is one entry, "evals.NAME", with its
  kind, data set and split.

  Args:
    runs: The runs; runs without a config.json are left out.

  Returns:
    Path of the option -> name of the run -> value; None if the run has no such
    option.
  """
  runs = [r for r in runs if r.config]
  flat = {r.name: options_of(r.config) for r in runs}
  shared = set.intersection(*(set(r.evals) for r in runs)) if runs else set()
  differing: dict[str, dict[str, Any]] = {}
  for key in dict.fromkeys(k for options in flat.values() for k in options):
    where, _, rest = key.partition(".")
    if where == "evals" and rest.split(".")[0] not in shared:
      continue
    values = {name: options.get(key) for name, options in flat.items()}
    if any(v != next(iter(values.values())) for v in values.values()):
      differing[key] = values
  for name in dict.fromkeys(n for r in runs for n in r.evals):
    if name not in shared:
      differing[f"evals.{name}"] = {
        r.name: f"{r.evals[name].kind} on {r.data_title(name)}"
        if name in r.evals
        else None
        for r in runs
      }
  return differing


def differences_section(runs: Sequence[Run]) -> str:
  """Returns a table of the options in which runs differ."""
  unknown = ", ".join(r.name for r in runs if not r.config)
  left_out = missing(unknown and f"options of {unknown}: no config.json")
  if sum(bool(r.config) for r in runs) < 2:
    return ""
  differing = differences(runs)
  if not differing:
    text = "<p>None: all options are the same.</p>"
  else:
    options = [
      {key: _value(by_name.get(r.name)) for key, by_name in differing.items()}
      for r in runs
    ]
    text = tables.side_by_side(runs, options)
  return f"<h2>Differences of the configs</h2>\n{text}{left_out}"


def _value(value: Any) -> str:
  """Returns the value of an option as text, without quotation marks."""
  if value is None:
    return "—"
  if isinstance(value, str):
    return value
  return json.dumps(value, ensure_ascii=False)


def costs_section(runs: Sequence[Run]) -> str:
  """Returns a table of the costs of each run."""
  costs = [tables.cost_texts(run) for run in runs]
  if not any(costs):
    return ""
  return f"<h2>Cost</h2>\n{tables.side_by_side(runs, costs)}"
