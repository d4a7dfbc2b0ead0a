"""The numbers of `summary.json`."""

from collections.abc import Sequence
from typing import Any

from vit_jax.reporting import tables
from vit_jax.reporting.comparison import differences
from vit_jax.reporting.run_state import state
from vit_jax.reporting.runs import Run


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
  """Returns the contents of summary.json; null where nothing was measured.

  Shares are from 0 to 1, each from the last row that has it. Wall seconds are
  the sum of those of the runs.
  """
  trained = [r for r in runs if r.is_trained]
  summary: dict[str, Any] = {
    "runs": {
      r.name: {n: r.last(n) for n in r.names if n not in ("step", "time")}
      for r in runs
    },
    "states": {r.name: state(r)._asdict() for r in trained},
    "costs": {r.name: tables.costs(r) for r in trained},
  }
  if len(trained) > 1:
    summary["differences"] = differences(trained)
  seconds = [s for r in runs if (s := r.wall_seconds()) is not None]
  summary["wall_seconds"] = round(sum(seconds), 3) if seconds else None
  versions = (r.metadata.get("versions") for r in runs)
  summary["versions"] = next(filter(None, versions), None)
  return summary
