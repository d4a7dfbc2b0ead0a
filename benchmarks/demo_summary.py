"""Adds the numbers of `make demo` to its summary.json, and prints four of them.

Run: python benchmarks/demo_summary.py runs/demo
"""

import json
import pathlib
import sys
from typing import Any

from vit_jax.tools.reporting.runs import SHOT, Run, find_runs


def headline(runs: dict[str, Run]) -> dict[str, Any]:
  """Returns accuracies, shares from 0 to 1; None where a run has none.

  Args:
    runs: Those of the demo, by name; all that it has made so far.
  """
  top1 = {name: run.last(run.top1()) for name, run in runs.items()}
  fewshot = {of: {} for of in ("features", "random_init", "raw_pixels")}
  if run := runs.get("pretrain"):
    for name in run.evaluators(SHOT)[:1]:
      fewshot = {
        of: run.fewshot(name, of.replace("features", "")) for of in fewshot
      }
  first = {
    of: next(iter(by_l2.values()), None) for of, by_l2 in fewshot.items()
  }
  return {
    "glyphs_val_accuracy": top1.get("pretrain"),
    "fewshot": first["features"],
    "fewshot_random_init": first["random_init"],
    "fewshot_raw_pixels": first["raw_pixels"],
    "fewshot_by_l2": fewshot,
    "digits_test_accuracy": top1.get("finetune"),
    "digits_test_accuracy_from_scratch": top1.get("scratch"),
  }


def lines(summary: dict[str, Any]) -> list[str]:
  """Returns the demo's four accuracies, and what they took, as a text."""
  rows = (
    ("10 images a class, ridge on frozen features", summary["fewshot"]["10"]),
    ("10 images a class, ridge on pixels", summary["fewshot_raw_pixels"]["10"]),
    ("fine-tuned, 300 steps", summary["digits_test_accuracy"]),
    ("from scratch, 300 steps", summary["digits_test_accuracy_from_scratch"]),
  )
  return [
    "accuracy on 500 scanned digits",
    *(f"  {what:45}{value:6.1%}" for what, value in rows),
    f"all in {summary['wall_seconds']:.0f} s",
  ]


def main(folder: pathlib.Path) -> None:
  """Rewrites summary.json, and prints its main numbers.

  The wall time is that from `started` (seconds of the epoch, which the Makefile
  writes after the installation) to the last row of metrics.
  """
  runs = {run.name: run for run in find_runs(folder)}
  path = folder / "summary.json"
  summary = headline(runs) | json.loads(path.read_text("utf-8"))
  last = max(row["time"] for run in runs.values() for row in run.rows)
  started = float((folder / "started").read_text())
  summary["wall_seconds"] = round(last - started, 3)
  text = json.dumps(summary, indent=2, ensure_ascii=False)
  path.write_text(text + "\n", "utf-8")
  print("\n".join(lines(summary)))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
