"""Probes of `vit-jax evaluate` on a user's own images: scores and mistakes."""

import html
import pathlib
import re
from typing import Any

import numpy as np

from vit_jax.config import json_file
from vit_jax.reporting import classes
from vit_jax.reporting.page import breakable, cards, missing, share, table
from vit_jax.reporting.runs import PROBES, Run
from vit_jax.weights.npz_file import open_npz

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


def section(runs: list[Run]) -> str:
  """Returns the scores, classes, confusions and worst mistakes of each probe.

  Nothing where no run has one.
  """
  parts, lacking = [], []
  for run in runs:
    for file in sorted((run.path / PROBES).glob("*.json")):
      try:
        found = json_file.read(file)
        who = f": {run.label}" if len(runs) > 1 else ""
        parts.append(_of(found, file.with_suffix(".npz"), who))
      except Exception as e:  # A damaged file may raise anything.
        what = str(e)[:200] or type(e).__name__
        lacking.append(f"{PROBES}/{file.name} of {run.name}: {what}")
  return "".join(parts) + missing("; ".join(lacking))


def _of(found: dict[str, Any], images: pathlib.Path, who: str) -> str:
  kind = found["kind"]
  title = f"{TITLES.get(kind, kind)} on {found['dataset']}{who}"
  of = f"of what was {found['by']}".replace("of what was the", "of the")
  text = (
    f"{MEANING.get(kind, '')} Of {found['checkpoint']}: {found['note']}."
    f" Classes and mistakes below are {of}."
  )
  return (
    f"<h2>{breakable(title)}</h2>\n<p>{html.escape(text)}</p>"
    f"{_scores(found['scores'], found.get('l2'))}"
    f"<h3>Classes</h3><p>{html.escape(_counts(found))}</p>"
    f'<div class="grid">{"".join(classes.tables(found))}</div>'
    f"{_mistakes(found, images)}"
  )


def _scores(scores: dict[str, float], l2: list[float] | None) -> str:
  """Returns a table by L2 weight and shots, or of whatever was measured."""
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


def _counts(found: dict[str, Any]) -> str:
  wrong, count, ways = found["num_wrong"], found["count"], found["confusions"]
  text = f"{count - wrong:,} of {count:,} images are named right"
  text += f" ({share(1 - wrong / count)})."
  if len(ways) > 1:
    text += f" The {wrong:,} mistakes are of {len(ways):,} different kinds."
  return text


def _mistakes(found: dict[str, Any], images: pathlib.Path) -> str:
  rows = found["mistakes"]
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
    f" {found['unit']}, the true class, and its file. {UNITS[found['unit']]}"
  )
  if len(shown) < found["num_wrong"]:
    text += (
      f" These {len(shown)} of {found['num_wrong']:,} have the largest;"
      f" {PROBES}/{images.with_suffix('.json').name} names {len(rows):,}."
    )
  is_share = found["unit"] != "score"
  how = (lambda v: f"{100 * v:.0f}%") if is_share else (lambda v: f"{v:.2f}")
  return f"<h3>Worst mistakes</h3><p>{html.escape(text)}</p>" + cards(
    shown,
    number=how,
    records=[row["record"] for row in rows[: len(shown)]],
  )
