"""The numbers of `summary.json`."""

import pathlib
from typing import Any

from vit_jax.config import json_file
from vit_jax.reporting import comparison
from vit_jax.reporting.runs import SHOT, Run


def is_demo(runs: list[Run], directory: pathlib.Path | None) -> bool:
  """Whether these are the runs of the demo's folder, complete or not."""
  if directory is None:
    return False
  made = {"pretrain", "finetune"} <= {r.name for r in runs}
  return made or (directory / "demo.json").exists()


def summarise(
  runs: list[Run], directory: str | pathlib.Path | None = None
) -> dict[str, Any]:
  """Returns the contents of summary.json; null where nothing was measured.

  Shares are from 0 to 1, each from the last line that has it. Runs other than
  the demo's have all their last values instead, by run, and are compared.

  Args:
    runs: The runs.
    directory: The folder that they are all of; None: they are of several.
  """
  directory = None if directory is None else pathlib.Path(directory)
  facts = json_file.read(directory / "demo.json") if directory else {}
  versions = facts.get("versions") or next(
    (r.metadata["versions"] for r in runs if r.metadata.get("versions")), None
  )
  end = {
    "wall_seconds": facts.get("wall_seconds") or _wall_seconds(runs, directory),
    "versions": versions,
  }
  if not is_demo(runs, directory):
    values = {
      r.name: {n: r.last(n) for n in r.names if n not in ("step", "time")}
      for r in runs
    }
    return {"runs": values, **comparison.summary(runs), **end}
  by_name = {r.name: r for r in runs}
  top1 = {n: r.last(r.top1()) for n, r in by_name.items()}
  shots = {of: {} for of in ("features", "random_init", "raw_pixels")}
  if run := by_name.get("pretrain"):
    for name in run.evaluators(SHOT)[:1]:
      shots = {
        of: run.fewshot(name, of.replace("features", "")) for of in shots
      }
  first = {of: next(iter(by_l2.values()), None) for of, by_l2 in shots.items()}
  return {
    "glyphs_val_accuracy": top1.get("pretrain"),
    "fewshot": first["features"],
    "fewshot_random_init": first["random_init"],
    "fewshot_raw_pixels": first["raw_pixels"],
    "fewshot_by_l2": shots,
    "digits_test_accuracy": top1.get("finetune"),
    "digits_test_accuracy_from_scratch": top1.get("scratch"),
    **end,
  }


def _wall_seconds(
  runs: list[Run], directory: pathlib.Path | None
) -> float | None:
  """Returns seconds to the last line written, since the time in `started`.

  `make demo` leaves that file (seconds of the epoch), so that installing
  packages does not count, but starting the programs and making the data does.
  Without it: the sum over the runs, see `Run.wall_seconds`.
  """
  started = directory and directory / "started"
  times = [r["time"] for run in runs for r in run.rows if "time" in r]
  if started and started.exists() and times:
    return round(max(times) - float(started.read_text()), 3)
  spans = [s for s in (r.wall_seconds() for r in runs) if s is not None]
  return round(sum(spans), 3) if spans else None
