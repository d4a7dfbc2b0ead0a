"""Writes a report on runs: `vit-jax report runs/demo`.

Reads a run, or all runs of a directory, and writes beside them `report.html`
(one file, pictures inside, no network), `figures/*.svg` and `summary.json`.
What a run lacks is left out, with a line that says so.
"""

import argparse

from vit_jax.config import commands


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """Parses the command line; imports nothing heavy."""
  parser = commands.parser(
    "report",
    "Writes report.html (one file, pictures inside, no network), figures/*.svg"
    "\nand summary.json beside a run, or beside all runs of a directory.",
    "vit-jax report runs/demo",
  )
  parser.add_argument("directory", help="a run, or a directory of runs")
  parser.add_argument("--out", help="where to write (default: the directory)")
  return parser.parse_args(argv)


if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  parse()

# ruff: noqa: E402
import functools
import html
import json
import pathlib
import sys
import time
from collections.abc import Callable

import jax

from vit_jax.reporting import classes, figures, inside, kept, tables
from vit_jax.reporting import runs as runs_lib
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
from vit_jax.reporting.runs import TOP1, Run
from vit_jax.runtime.progress import format_seconds

BASELINES = {"random_init": "random weights", "raw_pixels": "raw pixels"}
NUM_IMAGES = 24
MOST_TILES = 8
MOST_WEIGHTS = 4  # L2 weights with a chart of their own


class Report:
  """Collects the parts of the page and its pictures.

  Args:
    runs: Runs to report on.
    summary: As `runs.summarise` returns it.
    title: Title of the page.
  """

  def __init__(self, runs: list[Run], summary: dict, title: str):
    self.runs, self.summary, self.title = runs, summary, title
    self.pictures: dict[str, bytes] = {}

  def html(self) -> str:
    """Returns the page; `pictures` is complete afterwards."""
    parts = [
      self._head(),
      tables.scores(self.runs),
      tables.others(self.runs),
      self._facts(),
      *(self._curves(name, group) for name, group in self._groups().items()),
      classes.section(self.runs),
      self._fewshot(),
      self._predictions(),
      self._positions(),
      inside.of_runs(self.runs, self._picture),
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
    ][:MOST_TILES]
    seconds = self.summary["wall_seconds"]
    if seconds is not None:
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
      f'<div class="tiles">{cells}</div>'
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

  def _groups(self) -> dict[str, list[Run]]:
    """Groups runs on the same data, which are compared in one picture."""
    groups: dict[str, list[Run]] = {}
    for run in self.runs:
      groups.setdefault(run.dataset, []).append(run)
    return groups

  def _curves(self, dataset: str, group: list[Run]) -> str:
    shown, more = group[: figures.MOST_LINES], group[figures.MOST_LINES :]
    names = ", ".join(r.label for r in shown)
    title = names if len(group) <= 3 else f"{len(group)} runs"
    charts = [
      ("train/loss", "loss", figures.loss),
      ("train/lr", "learning rate", figures.learning_rate),
      (None, "accuracy", None),
      ("train/images_per_second", "throughput", figures.throughput),
    ]
    drawn, lacking = [], []
    for metric, what, draw in charts:
      has_none = [r.name for r in shown if not r.series(metric or r.top1())[0]]
      if has_none:
        lacking.append(f"{what} of {', '.join(has_none)}")
      if metric is None:
        lines, draw = _accuracies(shown), _accuracy_chart(shown)
        if cut := [line.label for line in lines[figures.MOST_LINES :]]:
          lacking.append(f"curves of {', '.join(cut)}: see the tables")
        lines = lines[: figures.MOST_LINES]
      else:
        lines = _lines((_name(r, shown), r, metric) for r in shown)
      if lines:
        picture_of = f"{what}: {names}"
        drawn.append(
          self._picture(
            f"{what}_{dataset}", functools.partial(draw, lines), picture_of
          )
        )
    if more:
      names = ", ".join(r.name for r in more)
      lacking.append(f"curves of {names} (too many for one picture)")
    return (
      f"<h2>{breakable(dataset)}: {breakable(title)}</h2>\n"
      f'<div class="grid">{"".join(drawn)}</div>' + missing("; ".join(lacking))
    )

  def _fewshot(self) -> str:
    parts = [
      self._fewshot_of(r, n) for r in self.runs for n in r.fewshot_names()
    ]
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
        found = kept.predictions(run, NUM_IMAGES)
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
        found[run.name] = kept.load_positions(run)
      except Exception as e:  # A damaged checkpoint may raise anything.
        lacking.append(f"{run.name}: {str(e)[:200] or type(e).__name__}")

    def draw(name: str, title: str, positions: kept.Positions) -> None:
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
    parts = pathlib.PurePath(run.config.get("init") or "").parts
    return next((r for r in self.runs if r.name in parts and r != run), None)

  def _picture(self, name: str, draw: Callable, alt: str) -> str:
    """Keeps a chart and returns its HTML."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    light, dark = figures.render(draw)
    self.pictures[f"{name}.svg"] = light
    return picture(light, dark, alt)


def write_report(directory: str, out: str | None = None) -> pathlib.Path:
  """Writes `report.html`, `figures/*.svg` and `summary.json`.

  Args:
    directory: A run's workdir, or a directory of such.
    out: Folder to write to; None: `directory`.

  Returns:
    Path of the page.

  Raises:
    ValueError: There is no run in the directory.
  """
  runs = runs_lib.find_runs(directory)
  summary = runs_lib.summarise(runs, directory)
  title = pathlib.Path(directory).resolve().name
  report = Report(runs, summary, f"Report: {title}")
  text = report.html()
  target = pathlib.Path(out or directory)
  (target / "figures").mkdir(parents=True, exist_ok=True)
  for name, data in report.pictures.items():
    (target / "figures" / name).write_bytes(data)
  values = json.dumps(summary, indent=2, ensure_ascii=False)
  (target / "summary.json").write_text(values + "\n", encoding="utf-8")
  (target / "report.html").write_text(text, encoding="utf-8")
  return target / "report.html"


def _grid(text: str, pictures: list[str]) -> str:
  """Returns pictures side by side under their explanation; nothing for none."""
  pictures = "".join(pictures)
  return pictures and f'<p>{text}</p><div class="grid">{pictures}</div>'


def _name(run: Run, group: list[Run]) -> str:
  """Returns a name for a line, or "" where the heading names the only run."""
  return run.label if len(group) > 1 else ""


def _lines(wanted) -> list[Line]:
  """Returns curves of (label, run, metric), leaving out empty ones."""
  lines = [Line(label, *run.series(metric)) for label, run, metric in wanted]
  return [line for line in lines if len(line.x)]


def _first_and_worst(found: kept.Predictions) -> str:
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


def _accuracies(group: list[Run]) -> list[Line]:
  """Returns top-1 of every run over its steps; of a single run, all scores."""
  if len(group) > 1:
    return _lines((_scored(r), r, r.curve() or "") for r in group)
  (run,) = group
  names = run.evaluators(TOP1)
  if len(names) > 1:
    wanted = [(f"{run.scored(n)}, top-1", run, f"{n}/top1") for n in names]
  else:
    wanted = [(f"top-{k}", run, f"{n}/top{k}") for n in names for k in (1, 5)]
  fewshot = run.fewshot_names()
  for name in fewshot:
    which = f"{run.scored(name)}, " if len(fewshot) > 1 else ""
    for i, l2 in enumerate(run.fewshot(name)):
      metric = f"{name}/l2={l2}/10shot" if i else f"{name}/10shot"
      wanted.append((f"{which}10-shot, L2 {l2}", run, metric))
  return _lines(wanted)


def _scored(run: Run) -> str:
  """Returns names of run and evaluator, if not the one that represents it."""
  if run.curve() == run.top1():
    return run.label
  return f"{run.label}, {run.curve().removesuffix('/top1')}"


def _accuracy_chart(group: list[Run]) -> Callable:
  classes = group[0].metadata.get("num_classes")
  return lambda lines: figures.accuracy(lines, 1 / classes if classes else None)


def main(argv: list[str] | None = None) -> None:
  """Writes the report, and prints where."""
  args = parse(argv)
  # Tables are read on the host; a GPU may be busy with the run itself.
  jax.config.update("jax_platforms", "cpu")
  try:
    path = write_report(args.directory, args.out)
  except ValueError as e:
    sys.exit(str(e))
  print(f"wrote {path}, {path.parent / 'summary.json'}, {path.parent}/figures/")


if __name__ == "__main__":
  main()
