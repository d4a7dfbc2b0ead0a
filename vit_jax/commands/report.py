"""Writes a report on runs: `vit-jax report RUN [RUN...]`.

Each RUN is a run, or a folder of runs. Writes `report.html` (one file, pictures
inside, no network), `figures/*.svg` and `summary.json`: for one RUN into it,
for several into `report/` in the folder that holds them all. What a run lacks
is left out, with a line that says so; one that is still going, or was stopped
before its end, is shown as such.
"""

import argparse

from vit_jax.config import commands


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """Parses the command line; imports nothing heavy."""
  parser = commands.parser(
    "report",
    __doc__.partition("\n\n")[2],
    "vit-jax report runs/demo\nvit-jax report runs/a runs/b --out=runs/a_b",
  )
  parser.add_argument(
    "runs", nargs="+", metavar="RUN", help="a run, or a folder of runs"
  )
  parser.add_argument(
    "--out", type=commands.local_folder, help="folder to write to"
  )
  return parser.parse_args(argv)


if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  parse()

# ruff: noqa: E402
import functools
import html
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
from etils import epath

from vit_jax.callbacks.progress import format_seconds
from vit_jax.reporting import (
  classes,
  comparison,
  curves,
  figures,
  model_figures,
  probes,
  saved_images,
  tables,
  time_breakdown,
)
from vit_jax.reporting import runs as runs_lib
from vit_jax.reporting import summary as summary_lib
from vit_jax.reporting.figures import Line
from vit_jax.reporting.page import (
  breakable,
  cards,
  missing,
  page,
  picture,
  share,
  table,
)
from vit_jax.reporting.runs import Run
from vit_jax.writers.atomic_files import replace_text

BASELINES = {"random_init": "random weights", "raw_pixels": "raw pixels"}
NUM_IMAGES = 24
MOST_TILES = 8
MOST_WEIGHTS = 4  # L2 weights with a chart of their own


class Report:
  """Collects the parts of the page and its pictures.

  Args:
    runs: Runs to report on, or published weights of which there are probes.
    summary: As `summary.summarise` returns it.
    title: Title of the page.
    groups: Title -> the runs whose curves share charts.
  """

  def __init__(
    self,
    runs: list[Run],
    summary: dict,
    title: str,
    groups: dict[str, list[Run]],
  ):
    self.runs = [r for r in runs if r.is_trained]
    self.scored = runs
    self.summary, self.title = summary, title
    self.groups = groups
    self.pictures: dict[str, bytes] = {}

  def html(self) -> str:
    """Returns the page; `pictures` is complete afterwards."""
    if not self.runs:
      head = f"<h1>{breakable(self.title)}</h1>\n"
      return page(self.title, head + probes.section(self.scored))
    probed = probes.section(self.scored)
    parts = [
      self._head(),
      tables.scores(self.runs),
      tables.others(self.runs),
      comparison.differences_section(self.runs) if self.runs[1:] else "",
      self._facts(),
      comparison.costs_section(self.runs),
      time_breakdown.section(self.runs),
      *(curves.section(k, v, self._picture) for k, v in self.groups.items()),
      classes.section(self.runs),
      probed,
      comparison.fewshot_section(self.runs, self._picture),
      self._fewshot(has_probes=bool(probed)),
      self._predictions(),
      self._positions(),
      model_figures.of_runs(self.runs, self._picture),
    ]
    return page(self.title, "\n".join(parts))

  def _head(self) -> str:
    is_alone = len(self.runs) == 1
    tiles = [
      (
        share(value),
        what,
        more if is_alone else f"{run.label}{more and '; '}{more}",
      )
      for run in self.runs
      for value, what, more in tables.headlines(run)
    ]
    few = ""
    if tiles[MOST_TILES:]:
      few = f'<p class="soft">{MOST_TILES} of {len(tiles):,} scores; all are'
      few += " below.</p>\n"
    tiles = tiles[:MOST_TILES]
    seconds = self.summary["wall_seconds"]
    if seconds is not None and "Curves" not in self.groups:
      tiles.append((format_seconds(seconds), "wall time", ""))
    cells = "".join(
      f"<div><b>{html.escape(number)}</b><span>{breakable(what)}</span>"
      f"<i>{breakable(more)}</i></div>"
      for number, what, more in tiles
    )
    versions = self.summary["versions"] or {}
    text = ", ".join(f"{k} {v}" for k, v in versions.items())
    written = time.strftime("%Y-%m-%d %H:%M %Z")
    return (
      f"<h1>{breakable(self.title)}</h1>\n"
      f'<p class="soft">vit_jax, written {written}.'
      f" {html.escape(text) or 'Versions were not recorded.'}</p>\n"
      f'<div class="tiles">{cells}</div>\n{few}'
      + comparison.states_section(self.runs)
    )

  def _facts(self) -> str:
    facts = tables.facts(self.runs)
    folded = "".join(
      f"<details><summary>config of {breakable(run.name)}</summary><pre>"
      f"{html.escape(json.dumps(run.config, indent=2, ensure_ascii=False))}"
      "</pre></details>"
      for run in self.runs
      if run.config
    )
    files = {
      "config.json": [r.name for r in self.runs if not r.config],
      "metadata.json": [r.name for r in self.runs if not r.metadata],
    }
    lacking = [f"{k} of {', '.join(v)}" for k, v in files.items() if v]
    lacking += [f"{r.name}: {fault}" for r in self.runs for fault in r.faults]
    return (
      f"<h2>What was run</h2>\n{facts}{folded}{missing('; '.join(lacking))}"
    )

  def _fewshot(self, has_probes: bool) -> str:
    """Returns what runs wrote; nothing where only probes have accuracies."""
    parts = [
      self._fewshot_of(r, n) for r in self.runs for n in r.fewshot_names()
    ]
    if has_probes and not parts:
      return ""
    return "<h2>Few-shot transfer</h2>\n" + (
      "".join(parts)
      or missing("few-shot accuracies, of which no run wrote any")
    )

  def _fewshot_of(self, run: Run, name: str) -> str:
    """Returns table and charts of an evaluator's last accuracies."""
    found = {"trained weights": run.fewshot(name)}
    found |= {text: run.fewshot(name, of) for of, text in BASELINES.items()}
    absent = [text for text, by_l2 in found.items() if not by_l2]
    found = {text: by_l2 for text, by_l2 in found.items() if by_l2}
    weights = list(dict.fromkeys(w for by_l2 in found.values() for w in by_l2))
    rows = [
      (w, text, by_l2[w])
      for w in weights
      for text, by_l2 in found.items()
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
      draw = functools.partial(
        figures.fewshot, lines, title, max(best.values())
      )
      file = f"fewshot_{run.name}_{name}_l2_{weight}"
      drawn.append(self._picture(file, draw, f"{title}: {run.label}"))
    sets = tables.fewshot_sets(run, name)
    lacking = [] if sets else [f"baseline of {text}" for text in absent]
    if more := weights[MOST_WEIGHTS:]:
      lacking.append(f"charts of L2 {', '.join(more)}, which the table has")
    return (
      f"<h3>{breakable(run.scored(name))}: {breakable(run.label)}</h3>"
      f"<p>{html.escape(tables.fewshot_text(run, name, weights))}</p>"
      f'<div class="grid">{"".join(drawn)}</div>{numbers}{sets}'
      + missing("; ".join(lacking))
    )

  def _predictions(self) -> str:
    """Returns the first images of a split, and its worst mistakes."""
    parts, none, damaged = [], [], []
    for run in self.runs:
      try:
        found = saved_images.predictions(run, NUM_IMAGES)
      except Exception as e:  # A damaged file may raise anything.
        what = str(e)[:200] or type(e).__name__
        damaged.append(f"predictions.npz of {run.name}: {what}")
        continue
      if found is None or not found.first:
        none.append(run.name)
        continue
      parts.append(f"<h3>{breakable(found.of)}: {breakable(run.label)}</h3>")
      parts.append(_first_and_worst(found))
    text = (
      "<p>Under each image, the class that the model names and the probability"
      " it gives it; errors are framed, the true class below.</p>"
    )
    lacking = [f"predictions.npz of {', '.join(none)}"] if none else []
    return (
      f"<h2>Images</h2>\n{text if parts else ''}{''.join(parts)}"
      f"{missing('; '.join(lacking + damaged))}"
    )

  def _positions(self) -> str:
    """Returns similarities of positions, before and after interpolation."""
    found, lacking, drawn = {}, [], []
    for run in self.runs:
      try:
        found[run.name] = saved_images.load_positions(run)
      except Exception as e:  # A damaged checkpoint may raise anything.
        lacking.append(f"{run.name}: {str(e)[:200] or type(e).__name__}")

    def draw(name: str, title: str, positions: saved_images.Positions) -> None:
      h, w = positions.grid
      table = positions.of_patches()
      figure = functools.partial(
        figures.similarity, table, (h, w), f"{title}: {h} × {w}"
      )
      alt = f"cosine similarity of position embeddings, {title}"
      drawn.append(self._picture(f"positions_{name}", figure, alt))

    for run in self.runs:
      if run.name not in found:
        continue
      source = self._source_of(run)
      if source and source.name in found:
        old, grid = found[source.name], found[run.name].grid
        if old.grid == grid:
          lacking.append(f"interpolation for {run.name}: its grid is the same")
        else:
          title = f"{source.label}, interpolated"
          draw(f"{source.name}_for_{run.name}", title, old.resampled(grid))
      draw(run.name, run.label, found[run.name])
    text = (
      "Each small map belongs to one patch and is where the patch is; it"
      " shows how similar the embedding of its position is to all others."
    )
    return (
      f"<h2>Position embeddings</h2>\n{_grid(text, drawn)}"
      f"{missing('; '.join(lacking))}"
    )

  def _source_of(self, run: Run) -> Run | None:
    """Returns the run among these whose weights this one started from."""
    path = f"/{run.config.get('init') or ''}/"
    others = [r for r in self.runs if r is not run]
    return next((r for r in others if f"/{r.name}/" in path), None)

  def _picture(self, name: str, draw: Callable, alt: str) -> str:
    """Keeps a chart and returns its HTML; equal names get a number."""
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    light, dark = figures.render(draw)
    self.pictures[figures.file_name(stem, self.pictures)] = light
    return picture(light, dark, alt)


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
  runs = runs_lib.find_runs(*paths)
  is_alone = len(paths) == 1
  summary = summary_lib.summarise(runs, paths[0] if is_alone else None)
  names = [r.label for r in runs]
  title = names if len(names) <= 3 else [f"{len(names)} runs"]
  title = [pathlib.Path(paths[0]).resolve().name] if is_alone else title
  trained = [r for r in runs if r.is_trained]
  groups = curves.by_dataset(trained) if is_alone else {"Curves": trained}
  report = Report(runs, summary, f"Report: {', '.join(title)}", groups)
  text = report.html()
  target = pathlib.Path(out) if out else _home(paths)
  (target / "figures").mkdir(parents=True, exist_ok=True)
  for name, data in report.pictures.items():
    (target / "figures" / name).write_bytes(data)
  values = json.dumps(summary, indent=2, ensure_ascii=False)
  for name, data in (("summary.json", values + "\n"), ("report.html", text)):
    replace_text(epath.Path(target / name), data)
  return target / "report.html"


def _grid(text: str, pictures: list[str]) -> str:
  """Returns pictures side by side under their explanation; nothing for none."""
  pictures = "".join(pictures)
  return pictures and f'<p>{text}</p><div class="grid">{pictures}</div>'


def _first_and_worst(found: saved_images.Predictions) -> str:
  """Returns images with captions that say how many there are."""
  right = sum(e.label == e.guess for e in found.first)
  which = "" if found.is_whole else " that the run kept"
  worst = f"{found.num_wrong:,} of the {found.num_images:,} images{which} are"
  worst += " named wrongly"
  if len(found.mistakes) < found.num_wrong:
    worst += f"; the {len(found.mistakes)} of the highest probability"
  return (
    f'<p class="soft">The first images: {right} of {len(found.first)} right.'
    f'</p>{cards(found.first)}<p class="soft">Worst mistakes: {worst}.</p>'
    f"{cards(found.mistakes) if found.mistakes else ''}"
  )


def _home(paths: Sequence[str]) -> pathlib.Path:
  """Returns where a report on these runs is written."""
  if len(paths) == 1:
    return pathlib.Path(paths[0])
  above = os.path.commonpath([pathlib.Path(p).resolve().parent for p in paths])
  is_root = above == pathlib.Path(above).anchor
  return pathlib.Path("" if is_root else above) / "report"


def main(argv: list[str] | None = None) -> None:
  """Writes the report, and prints where."""
  args = parse(argv)
  # Tables are read on the host; a GPU may be busy with the run itself.
  jax.config.update("jax_platforms", "cpu")
  try:
    path = write_report(*args.runs, out=args.out)
  except ValueError as e:
    sys.exit(str(e))
  except OSError as e:
    where = e.filename or args.out or args.runs[0]
    sys.exit(f"{where}: {e.strerror or e}; --out=DIR writes elsewhere.")
  print(f"wrote {path}, {path.parent / 'summary.json'}, {path.parent}/figures/")


if __name__ == "__main__":
  main()
