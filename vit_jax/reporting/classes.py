"""What `per_class` evaluators wrote of each class: the worst, the confused."""

import html
from typing import Any

from vit_jax.config import json_file
from vit_jax.evaluators.per_class import FILE
from vit_jax.reporting.page import breakable, missing, share, table
from vit_jax.reporting.runs import Run

MOST = 10  # classes, and pairs of classes, in a table


def section(runs: list[Run]) -> str:
  """Returns the worst classes and the most frequent confusions of each run.

  Nothing where no run has an evaluator of kind "per_class".
  """
  parts, lacking = [], []
  for run in runs:
    for name in (n for n, e in run.evals.items() if e.kind == "per_class"):
      file = run.path / FILE.format(name)
      try:
        found = json_file.read(file)
        if found:
          parts.append(_of(run, name, found))
        else:
          lacking.append(f"{file.name} of {run.name} (not there)")
      except Exception as e:  # a damaged file may raise anything
        what = "not read" if isinstance(e, OSError) else "damaged"
        lacking.append(f"{file.name} of {run.name} ({what})")
  if not parts and not lacking:
    return ""
  return f"<h2>Classes</h2>\n{''.join(parts)}{missing('; '.join(lacking))}"


def tables(found: dict[str, Any]) -> list[str]:
  """Returns tables of the worst classes, of all, and of the confusions.

  Args:
    found: `classes` and `confusions` as a `per_class` evaluator writes them.
  """
  names = {c["class"]: c["name"] for c in found["classes"]}
  counts = {c["class"]: c["count"] for c in found["classes"]}
  with_images = [c for c in found["classes"] if c["count"]]
  worst = sorted(with_images, key=lambda c: c["right"] / c["count"])
  is_all = len(worst) <= MOST
  parts = [_by_class("classes" if is_all else "worst classes", worst[:MOST])]
  if shown := found["confusions"][:MOST]:
    parts.append(
      table(
        "numbers",
        ["confused most often", "images", "of the class"],
        [
          [f"{names[a]} → {names[b]}", f"{n:,}", share(n / counts[a])]
          for a, b, n in shown
        ],
      )
    )
  if not is_all:
    every = _by_class("class", sorted(worst, key=lambda c: c["class"]))
    summary = f"<summary>all {len(worst):,} classes</summary>"
    parts.append(f"<details>{summary}{every}</details>")
  return parts


def _by_class(title: str, rows: list[dict[str, Any]]) -> str:
  return table(
    "numbers",
    [title, "right", "images", "named so"],
    [
      [
        c["name"],
        share(c["right"] / c["count"]),
        f"{c['count']:,}",
        f"{c['predicted']:,}",
      ]
      for c in rows
    ],
  )


def _of(run: Run, name: str, found: dict[str, Any]) -> str:
  with_images = [c for c in found["classes"] if c["count"]]
  pairs = found["confusions"]
  calibration = table(
    "numbers",
    ["confidence", "right", "images"],
    [
      [share(b["confidence"]), share(b["right"]), f"{b['count']:,}"]
      for b in found["bins"]
      if b["count"]
    ],
  )
  grid = "".join([*tables(found), calibration])
  error = run.last(f"{name}/ece")
  mean = run.last(f"{name}/per_class")
  text = (
    f"{len(with_images):,} classes, mean of their accuracies {share(mean)}."
    f" {sum(n for _, _, n in pairs):,} of {found['count']:,} images are named"
    f" wrongly, in {len(pairs):,} different ways. Expected calibration error"
    f" {share(error)}: how far confidence and accuracy are apart, on average"
    " over the bins of the last table."
  )
  return (
    f"<h3>{breakable(run.scored(name))}: {breakable(run.label)}</h3>"
    f'<p>{html.escape(text)}</p><div class="grid">{grid}</div>'
  )
