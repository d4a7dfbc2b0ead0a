"""The report on runs: a page, its charts as files, and a summary."""

import functools
import html
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from etils import epath

from vit_jax.callbacks.progress import format_seconds
from vit_jax.reporting import (
  charts,
  comparison,
  curves,
  model_figures,
  per_class,
  saved_images,
  tables,
)
from vit_jax.reporting.charts import ChartFiles, Line
from vit_jax.reporting.page import breakable, cards, missing, page, share, table
from vit_jax.reporting.runs import Run, find_runs
from vit_jax.reporting.summary import summarise
from vit_jax.writers.atomic_files import replace_text

BASELINES = {"random_init": "random weights", "raw_pixels": "raw pixels"}
NUM_IMAGES = 24
MOST_TILES = 8
MOST_WEIGHTS = 4  # L2 weights with a chart of their own


def write_report(*paths: str, out: str | None = None) -> pathlib.Path:
  """Writes `report.html`, `figures/*.svg` and `summary.json`.

  Several paths are compared: their curves share the charts, whatever their
  data. The runs of one folder share them by data set.

  Args:
    *paths: Each a run's workdir, or a folder of such.
    out: Folder to write to; None: the path, or, of several, `report/` in the
      folder that holds them all (in the working directory if that is `/`).

  Returns:
    Path of the page.

  Raises:
    ValueError: There is no run in one of the folders.
  """
  runs = find_runs(*paths)
  is_one_folder = len(paths) == 1
  names = [r.name for r in runs]
  subject = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
  if is_one_folder:
    subject = pathlib.Path(paths[0]).resolve().name
  trained = [r for r in runs if r.is_trained]
  groups = curves.by_dataset(trained) if is_one_folder else {"Curves": trained}
  summary = summarise(runs)
  chart_files = ChartFiles()
  text = _page(f"Report: {subject}", runs, groups, summary, chart_files)
  target = pathlib.Path(out) if out else default_folder(paths)
  (target / "figures").mkdir(parents=True, exist_ok=True)
  for name, svg in chart_files.files.items():
    (target / "figures" / name).write_text(svg, "utf-8")
  values = json.dumps(summary, indent=2, ensure_ascii=False)
  replace_text(epath.Path(target / "summary.json"), values + "\n")
  replace_text(epath.Path(target / "report.html"), text)
  return target / "report.html"


def default_folder(paths: Sequence[str]) -> pathlib.Path:
  """Returns where a report on these runs is written."""
  if len(paths) == 1:
    return pathlib.Path(paths[0])
  above = os.path.commonpath([pathlib.Path(p).resolve().parent for p in paths])
  is_root = above == pathlib.Path(above).anchor
  return pathlib.Path("" if is_root else above) / "report"


def _page(
  title: str,
  runs: list[Run],
  groups: dict[str, list[Run]],
  summary: dict[str, Any],
  chart_files: ChartFiles,
) -> str:
  """Returns the page.

  Args:
    title: Its title.
    runs: Those to report on; published weights have probes alone.
    groups: Title -> the runs whose curves share charts.
    summary: As `summarise` returns it.
    chart_files: Gets the charts.
  """
  probes = per_class.probes_section(runs)
  trained = [r for r in runs if r.is_trained]
  if not trained:
    return page(title, f"<h1>{breakable(title)}</h1>\n{probes}")
  # Runs that are compared ran side by side: the sum of their times says little.
  seconds = None if "Curves" in groups else summary["wall_seconds"]
  parts = [
    head(title, trained, seconds, summary["versions"] or {}),
    tables.scores(trained),
    tables.other_scores(trained),
    comparison.differences_section(trained) if trained[1:] else "",
    _facts(trained),
    comparison.costs_section(trained),
    curves.time_section(trained),
    *(curves.section(k, v, chart_files) for k, v in groups.items()),
    per_class.evaluators_section(trained),
    probes,
    comparison.fewshot_section(trained, chart_files),
    fewshot_section(trained, chart_files, has_probes=bool(probes)),
    _predictions(trained),
    _positions(trained, chart_files),
    model_figures.runs_section(trained, chart_files),
  ]
  return page(title, "\n".join(parts))


def head(
  title: str,
  runs: list[Run],
  seconds: float | None,
  versions: dict[str, str],
) -> str:
  """Returns the title, the main scores and what became of each run."""
  tiles = [
    (
      share(value),
      what,
      f"{run.name}{more and '; '}{more}" if runs[1:] else more,
    )
    for run in runs
    for value, what, more in tables.headlines(run)
  ]
  note = ""
  if tiles[MOST_TILES:]:
    note = f'<p class="soft">{MOST_TILES} of {len(tiles):,} scores; all are'
    note += " below.</p>\n"
  tiles = tiles[:MOST_TILES]
  if seconds is not None:
    tiles.append((format_seconds(seconds), "wall time", ""))
  cells = "".join(
    f"<div><b>{html.escape(number)}</b><span>{breakable(what)}</span>"
    f"<i>{breakable(more)}</i></div>"
    for number, what, more in tiles
  )
  text = ", ".join(f"{k} {v}" for k, v in versions.items())
  written = time.strftime("%Y-%m-%d %H:%M %Z")
  return (
    f"<h1>{breakable(title)}</h1>\n"
    f'<p class="soft">vit_jax, written {written}.'
    f" {html.escape(text) or 'Versions were not recorded.'}</p>\n"
    f'<div class="tiles">{cells}</div>\n{note}'
    + comparison.states_section(runs)
  )


def _facts(runs: list[Run]) -> str:
  """Returns what was run, with the configs folded."""
  folded = "".join(
    f"<details><summary>config of {breakable(run.name)}</summary><pre>"
    f"{html.escape(json.dumps(run.config, indent=2, ensure_ascii=False))}"
    "</pre></details>"
    for run in runs
    if run.config
  )
  files = {
    "config.json": [r.name for r in runs if not r.config],
    "metadata.json": [r.name for r in runs if not r.metadata],
  }
  left_out = [f"{k} of {', '.join(v)}" for k, v in files.items() if v]
  left_out += [f"{r.name}: {error}" for r in runs for error in r.errors]
  return (
    f"<h2>What was run</h2>\n{tables.facts(runs)}{folded}"
    f"{missing('; '.join(left_out))}"
  )


def fewshot_section(
  runs: list[Run], chart_files: ChartFiles, has_probes: bool
) -> str:
  """Returns what runs wrote; nothing where only probes have accuracies."""
  parts = [
    _fewshot_of(run, name, chart_files)
    for run in runs
    for name in run.fewshot_names()
  ]
  if has_probes and not parts:
    return ""
  return "<h2>Few-shot transfer</h2>\n" + (
    "".join(parts) or missing("few-shot accuracies, of which no run wrote any")
  )


def _fewshot_of(run: Run, name: str, chart_files: ChartFiles) -> str:
  """Returns table and charts of an evaluator's last accuracies."""
  by_features = {"trained weights": run.fewshot(name)}
  by_features |= {text: run.fewshot(name, of) for of, text in BASELINES.items()}
  absent = [text for text, by_l2 in by_features.items() if not by_l2]
  weights = list(dict.fromkeys(w for v in by_features.values() for w in v))
  rows = [
    (w, text, by_l2[w])
    for w in weights
    for text, by_l2 in by_features.items()
    if w in by_l2
  ]
  shots = sorted({k for _, _, values in rows for k in values}, key=int)
  best = {k: max(v.get(k, 0.0) for _, _, v in rows) for k in shots}
  mark = lambda v, k: "*" if v.get(k) == best[k] else ""
  numbers = table(
    "numbers",
    ["features", "L2", *shots],
    [
      [text, w, *(mark(v, k) + share(v.get(k)) for k in shots)]
      for w, text, v in rows
    ],
  )
  drawn = []
  for weight in weights[:MOST_WEIGHTS]:
    lines = [
      Line(text, [int(k) for k in values], list(values.values()))
      for w, text, values in rows
      if w == weight
    ]
    title = f"Few-shot accuracy, L2 {weight}"
    draw = functools.partial(charts.fewshot, lines, title, max(best.values()))
    file = f"fewshot_{run.name}_{name}_l2_{weight}"
    drawn.append(chart_files.add(file, draw, f"{title}: {run.name}"))
  sets = tables.fewshot_sets(run, name)
  left_out = [] if sets else [f"baseline of {text}" for text in absent]
  if more := weights[MOST_WEIGHTS:]:
    left_out.append(f"charts of L2 {', '.join(more)}, which the table has")
  return (
    f"<h3>{breakable(run.split_title(name))}: {breakable(run.name)}</h3>"
    f"<p>{html.escape(tables.fewshot_text(run, name, weights))}</p>"
    f'<div class="grid">{"".join(drawn)}</div>{numbers}{sets}'
    + missing("; ".join(left_out))
  )


def _predictions(runs: list[Run]) -> str:
  """Returns the first images of a split, and its worst mistakes."""
  parts, absent, damaged = [], [], []
  for run in runs:
    try:
      predictions = saved_images.predictions(run, NUM_IMAGES)
    except Exception as e:  # A damaged file may raise anything.
      what = str(e)[:200] or type(e).__name__
      damaged.append(f"predictions.npz of {run.name}: {what}")
      continue
    if predictions is None or not predictions.first:
      absent.append(run.name)
      continue
    title = f"{breakable(predictions.of)}: {breakable(run.name)}"
    parts += [f"<h3>{title}</h3>", _first_and_worst(predictions)]
  text = (
    "<p>Under each image, the class that the model names and the probability"
    " it gives it; errors are framed, the true class below.</p>"
  )
  left_out = [f"predictions.npz of {', '.join(absent)}"] if absent else []
  return (
    f"<h2>Images</h2>\n{text if parts else ''}{''.join(parts)}"
    f"{missing('; '.join(left_out + damaged))}"
  )


def _first_and_worst(predictions: saved_images.Predictions) -> str:
  """Returns images with captions that say how many there are."""
  first, mistakes = predictions.first, predictions.mistakes
  right = sum(e.label == e.guess for e in first)
  worst = f"{predictions.num_wrong:,} of the {predictions.num_images:,} images"
  worst += " are named wrongly"
  if len(mistakes) < predictions.num_wrong:
    worst += f"; the {len(mistakes)} of the highest probability"
  return (
    f'<p class="soft">The first images: {right} of {len(first)} right.</p>'
    f'{cards(first)}<p class="soft">Worst mistakes: {worst}.</p>'
    f"{cards(mistakes) if mistakes else ''}"
  )


def _positions(runs: list[Run], chart_files: ChartFiles) -> str:
  """Returns similarities of positions, before and after interpolation."""
  by_run: dict[str, saved_images.Positions] = {}
  left_out, drawn = [], []
  for run in runs:
    try:
      by_run[run.name] = saved_images.load_positions(run)
    except Exception as e:  # A damaged checkpoint may raise anything.
      left_out.append(f"{run.name}: {str(e)[:200] or type(e).__name__}")

  def draw(name: str, title: str, positions: saved_images.Positions) -> None:
    h, w = positions.grid
    similarity = functools.partial(
      charts.similarity,
      positions.of_patches(),
      positions.grid,
      f"{title}: {h} × {w}",
    )
    alt = f"cosine similarity of position embeddings, {title}"
    drawn.append(chart_files.add(f"positions_{name}", similarity, alt))

  for run in runs:
    if run.name not in by_run:
      continue
    source = _source_of(run, runs)
    if source and source.name in by_run:
      grid = by_run[run.name].grid
      if by_run[source.name].grid == grid:
        left_out.append(f"interpolation for {run.name}: its grid is the same")
      else:
        title = f"{source.name}, interpolated"
        resampled = by_run[source.name].resampled(grid)
        draw(f"{source.name}_for_{run.name}", title, resampled)
    draw(run.name, run.name, by_run[run.name])
  text = (
    "<p>Each small map belongs to one patch and is where the patch is; it"
    " shows how similar the embedding of its position is to all others.</p>"
  )
  grid = f'{text}<div class="grid">{"".join(drawn)}</div>' if drawn else ""
  return f"<h2>Position embeddings</h2>\n{grid}{missing('; '.join(left_out))}"


def _source_of(run: Run, runs: list[Run]) -> Run | None:
  """Returns the run among these whose weights this one started from."""
  path = f"/{run.config.get('init') or ''}/"
  others = [r for r in runs if r is not run]
  return next((r for r in others if f"/{r.name}/" in path), None)
