"""The report on runs: a page, its charts as files, and a summary in JSON."""

import dataclasses
import html
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from etils import epath

from vit_jax.callbacks.progress import format_seconds
from vit_jax.tools.reporting import (
  beginnings,
  comparison,
  curves,
  fewshot,
  model_figures,
  per_class,
  regression,
  saved_images,
  tables,
)
from vit_jax.tools.reporting.charts import ChartFiles
from vit_jax.tools.reporting.page import breakable, missing, page, share
from vit_jax.tools.reporting.run_state import state
from vit_jax.tools.reporting.runs import Run, find_runs
from vit_jax.writers.atomic_files import replace_text

MOST_TILES = 8


def write_report(*paths: str, out: str | None = None) -> pathlib.Path:
  """Writes `report.html`, `figures/*.svg` and `summary.json`.

  If there are several paths, each chart has the curves of all runs. If there is
  one folder of runs, each chart has the runs with the same data set.

  Args:
    *paths: Folders of runs, or folders that contain such folders.
    out: Folder to write to. None: the path, if there is one; for several,
      `report/` in the folder that contains all of them (if that is `/`, in the
      working directory).

  Returns:
    Path of the page.

  Raises:
    ValueError: One of the folders has no run.
  """
  runs = find_runs(*paths)
  is_one_folder = len(paths) == 1
  names = [r.name for r in runs]
  subject = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
  if is_one_folder:
    subject = pathlib.Path(paths[0]).resolve().name
  summary = summarise(runs)
  chart_files = ChartFiles()
  text = _page(f"Report: {subject}", runs, is_one_folder, summary, chart_files)
  target = pathlib.Path(out) if out else default_folder(paths)
  (target / "figures").mkdir(parents=True, exist_ok=True)
  for name, svg in chart_files.files.items():
    (target / "figures" / name).write_text(svg, "utf-8")
  values = json.dumps(summary, indent=2, ensure_ascii=False)
  replace_text(epath.Path(target / "summary.json"), values + "\n")
  replace_text(epath.Path(target / "report.html"), text)
  return target / "report.html"


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
  """Returns the contents of summary.json; null if a value was not measured.

  Shares are from 0 to 1, from the last row that has them. Wall seconds are the
  sum over the runs.
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
  probes = {r.name: r.linear_probe for r in trained if r.linear_probe}
  if probes:
    summary["linear_probes"] = {
      name: {**dataclasses.asdict(probe), "saved_model": probe.saved_model}
      for name, probe in probes.items()
    }
  if len(trained) > 1:
    summary["differences"] = comparison.differences(trained)
  seconds = [s for r in runs if (s := r.wall_seconds()) is not None]
  summary["wall_seconds"] = round(sum(seconds), 3) if seconds else None
  versions = (r.metadata.get("versions") for r in runs)
  summary["versions"] = next(filter(None, versions), None)
  return summary


def default_folder(paths: Sequence[str]) -> pathlib.Path:
  """Returns the folder of a report on these runs; see `write_report`."""
  if len(paths) == 1:
    return pathlib.Path(paths[0])
  above = os.path.commonpath([pathlib.Path(p).resolve().parent for p in paths])
  is_root = above == pathlib.Path(above).anchor
  return pathlib.Path("" if is_root else above) / "report"


def _page(
  title: str,
  runs: list[Run],
  is_one_folder: bool,
  summary: dict[str, Any],
  chart_files: ChartFiles,
) -> str:
  """Returns the page.

  Args:
    title: Title of the page.
    runs: The runs; a folder of published weights has only probes.
    is_one_folder: Whether the runs belong together, so that only runs on the
      same data share charts; otherwise they are compared with each other.
    summary: Result of `summarise`.
    chart_files: Gets the charts.
  """
  probes = per_class.probes_section(runs)
  trained = [r for r in runs if r.is_trained]
  if not trained:
    return page(title, f"<h1>{breakable(title)}</h1>\n{probes}")
  # For compared runs, the sum of the times means little.
  seconds = summary["wall_seconds"] if is_one_folder else None
  groups = curves.by_dataset(trained) if is_one_folder else {"Curves": trained}
  parts = [
    head(title, trained, seconds, summary["versions"] or {}),
    tables.scores(trained),
    tables.other_scores(trained),
    beginnings.section(trained),
    comparison.differences_section(trained) if trained[1:] else "",
    _facts(trained),
    comparison.costs_section(trained),
    curves.time_section(trained),
    *(curves.section(k, v, chart_files) for k, v in groups.items()),
    per_class.evaluators_section(trained),
    probes,
    fewshot.side_by_side(trained, chart_files),
    fewshot.section(trained, chart_files, has_probes=bool(probes)),
    regression.section(trained, chart_files),
    saved_images.section(trained),
    model_figures.runs_section(trained, chart_files),
  ]
  return page(title, "\n".join(parts))


def head(
  title: str,
  runs: list[Run],
  seconds: float | None,
  versions: dict[str, str],
) -> str:
  """Returns the title, the main scores and the state of each run."""
  tiles = []
  for run in runs:
    for value, what, remark in tables.headlines(run):
      texts = [run.name, remark] if len(runs) > 1 else [remark]
      text = share(value)
      if what.endswith(tables.R2_TITLE) and value is not None:
        text = f"{value:.3f}"  # it may be negative: no share
      tiles.append((text, what, "; ".join(filter(None, texts))))
  note = ""
  if len(tiles) > MOST_TILES:
    text = f"{MOST_TILES} of {len(tiles):,} scores; all are below."
    note = f'<p class="soft">{text}</p>\n'
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
  """Returns a table of the runs, with folded configs."""
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
