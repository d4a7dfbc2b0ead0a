"""Scores of each class, from `per_class` evaluators and from probes."""

import html
import pathlib
import re
from typing import Any

import numpy as np

from vit_jax.config import json_file
from vit_jax.evaluators.per_class import FILE
from vit_jax.tools.reporting.page import (
  breakable,
  cards,
  error_text,
  missing,
  share,
  table,
)
from vit_jax.tools.reporting.runs import PROBES, Run
from vit_jax.weights.npz_file import open_npz

MOST = 10  # largest number of classes, or of pairs of classes, in a table
TITLES = {
  "fewshot": "Few-shot",
  "linear": "Linear probe",
  "knn": "Nearest neighbours",
}
MEANING = {
  "fewshot": "Ridge regression on frozen features, in closed form.",
  "linear": "A linear layer, trained by gradient on frozen features.",
  "knn": "The vote of the training images whose features are nearest.",
}
UNITS = {
  "score": "The regression's target is 1 for the class and -1 for all others.",
  "probability": "It is the linear layer's softmax.",
  "share of the votes": "Near ones have more votes than far ones.",
}
_SHOTS = re.compile(r"(?:l2=(?P<l2>[^/]+)/)?(?:(?P<k>\d+)shot|(?P<all>all))")


def evaluators_section(runs: list[Run]) -> str:
  """Returns the worst classes and the most frequent confusions of each run.

  Returns "" if no run has an evaluator of kind "per_class".
  """
  parts, left_out = [], []
  for run in runs:
    for name in (n for n, e in run.evals.items() if e.kind == "per_class"):
      file = run.path / FILE.format(name)
      try:
        parts.append(_evaluator(run, name, json_file.read(file)))
      except Exception as e:  # a damaged file may raise anything
        what = error_text(e) if file.exists() else "not there"
        left_out.append(f"{file.name} of {run.name}: {what}")
  if not parts and not left_out:
    return ""
  return f"<h2>Classes</h2>\n{''.join(parts)}{missing('; '.join(left_out))}"


def tables(content: dict[str, Any]) -> list[str]:
  """Returns tables of the worst classes, of all classes, and of confusions.

  Args:
    content: `classes` and `confusions` of a `per_class` evaluator.
  """
  names = {c["class"]: c["name"] for c in content["classes"]}
  counts = {c["class"]: c["count"] for c in content["classes"]}
  with_images = [c for c in content["classes"] if c["count"]]
  worst = sorted(with_images, key=lambda c: c["right"] / c["count"])
  is_all = len(worst) <= MOST
  parts = [_by_class("classes" if is_all else "worst classes", worst[:MOST])]
  if shown := content["confusions"][:MOST]:
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


def _evaluator(run: Run, name: str, content: dict[str, Any]) -> str:
  with_images = [c for c in content["classes"] if c["count"]]
  pairs = content["confusions"]
  calibration = table(
    "numbers",
    ["confidence", "right", "images"],
    [
      [share(b["confidence"]), share(b["right"]), f"{b['count']:,}"]
      for b in content["bins"]
      if b["count"]
    ],
  )
  grid = "".join([*tables(content), calibration])
  error = run.last(f"{name}/ece")
  mean = run.last(f"{name}/balanced_accuracy")
  text = (
    f"{len(with_images):,} classes, mean of their accuracies {share(mean)}."
    f" {sum(n for _, _, n in pairs):,} of {content['count']:,} images are named"
    f" wrongly, in {len(pairs):,} different ways. Expected calibration error"
    f" {share(error)}: how far confidence and accuracy are apart, on average"
    " over the bins of the last table."
  )
  return (
    f"<h3>{breakable(run.split_title(name))}: {breakable(run.name)}</h3>"
    f'<p>{html.escape(text)}</p><div class="grid">{grid}</div>'
  )


def probes_section(runs: list[Run]) -> str:
  """Returns the scores, classes, confusions and worst mistakes of each probe.

  Returns "" if no run has a probe.
  """
  parts, left_out = [], []
  for run in runs:
    for file in sorted((run.path / PROBES).glob("*.json")):
      try:
        probe = json_file.read(file)
        who = f": {run.name}" if len(runs) > 1 else ""
        parts.append(_probe(probe, file.with_suffix(".npz"), who))
      except Exception as e:  # A damaged file may raise anything.
        left_out.append(f"{PROBES}/{file.name} of {run.name}: {error_text(e)}")
  return "".join(parts) + missing("; ".join(left_out))


def _probe(probe: dict[str, Any], images: pathlib.Path, who: str) -> str:
  kind = probe["kind"]
  title = f"{TITLES.get(kind, kind)} on {probe['dataset']}{who}"
  text = (
    f"{MEANING.get(kind, '')} The model is {probe['checkpoint']};"
    f" {probe['note']}. The tables and mistakes below belong to"
    f" {probe['by']}."
  )
  return (
    f"<h2>{breakable(title)}</h2>\n<p>{html.escape(text)}</p>"
    f"{_scores(probe['scores'], probe.get('l2'))}"
    f"<h3>Classes</h3><p>{html.escape(_counts(probe))}</p>"
    f'<div class="grid">{"".join(tables(probe))}</div>'
    f"{_mistakes(probe, images)}"
  )


def _scores(scores: dict[str, float], l2: list[float] | None) -> str:
  """Returns a table by L2 weight and shots, or a table of all metrics."""
  matches = [_SHOTS.fullmatch(name) for name in scores]
  if not l2 or not all(matches):
    rows = [[k, _number(k, v)] for k, v in scores.items()]
    return table("numbers", ["", "score"], rows)
  by_l2: dict[str, dict[str, float]] = {}
  for m, value in zip(matches, scores.values(), strict=True):
    of = by_l2.setdefault(m["l2"] or f"{l2[0]:g}", {})
    of[m["k"] or "all"] = value
  shots = list(next(iter(by_l2.values())))  # in the order of the config
  rows = [
    [f"L2 {w}", *(share(of.get(k)) for k in shots)] for w, of in by_l2.items()
  ]
  return table("numbers", ["labelled images per class", *shots], rows)


def _number(name: str, value: float) -> str:
  is_share = name in ("top1", "held_out") or name.endswith("nn")
  return share(value) if is_share else f"{value:,.6g}"


def _counts(probe: dict[str, Any]) -> str:
  wrong, count, ways = probe["num_wrong"], probe["count"], probe["confusions"]
  text = f"{count - wrong:,} of {count:,} images are named right"
  text += f" ({share(1 - wrong / count)})."
  if len(ways) > 1:
    text += f" The {wrong:,} mistakes are of {len(ways):,} different kinds."
  return text


def _mistakes(probe: dict[str, Any], images: pathlib.Path) -> str:
  rows = probe["mistakes"]
  if not rows:
    return "<h3>Worst mistakes</h3><p>None.</p>"
  if not images.exists():
    return "<h3>Worst mistakes</h3>" + missing(f"{images.name}: not there")
  pictures = np.asarray(open_npz(images)["image"])
  shown = [
    (image, row["label"], row["prediction"], row["score"])
    for image, row in zip(pictures, rows, strict=False)
  ]
  text = (
    f"Under each image, the class that it is given and that class's"
    f" {probe['unit']}, the true class, and its file. {UNITS[probe['unit']]}"
  )
  if len(shown) < probe["num_wrong"]:
    text += (
      f" These {len(shown)} of {probe['num_wrong']:,} have the largest;"
      f" {PROBES}/{images.with_suffix('.json').name} names {len(rows):,}."
    )
  is_share = probe["unit"] != "score"
  how = (lambda v: f"{100 * v:.0f}%") if is_share else (lambda v: f"{v:.2f}")
  return f"<h3>Worst mistakes</h3><p>{html.escape(text)}</p>" + cards(
    shown,
    number=how,
    records=[row["record"] for row in rows[: len(shown)]],
  )
