"""Draws what runs did: `python -m vit_jax.report runs/demo`.

Reads a run, or all runs of a directory, and writes beside them `report.html`
(one file, pictures inside, no network), `figures/*.png` and `summary.json`.
What a run lacks is left out, with a line that says so.
"""

import argparse
import html
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from vit_jax import checkpoint, figures
from vit_jax import runs as runs_lib
from vit_jax.figures import Line
from vit_jax.models.resample import resample_posemb
from vit_jax.page import missing, page, picture, share, table
from vit_jax.progress import format_seconds
from vit_jax.runs import Run

BASELINES = {"random_init": "random weights", "raw_pixels": "raw pixels"}
NUM_IMAGES = 36
TABLE = ("Transformer", "posembed_input", "pos_embedding")


class Report:
  """Collects the parts of the page and its pictures.

  Args:
    runs: What to show.
    summary: As `runs.summarise` returns it.
    title: Of the page.
  """

  def __init__(self, runs: list[Run], summary: dict, title: str):
    self.runs, self.summary, self.title = runs, summary, title
    self.pictures: dict[str, bytes] = {}

  def html(self) -> str:
    """Returns the page; `pictures` is full afterwards."""
    parts = [
      self._head(),
      self._facts(),
      *(self._curves(name, group) for name, group in self._groups().items()),
      self._fewshot(),
      self._predictions(),
      self._positions(),
    ]
    return page(self.title, "\n".join(parts))

  def _head(self) -> str:
    tiles = [(share(value), text) for value, text in self._headlines()]
    seconds = self.summary["wall_seconds"]
    if seconds is not None:
      tiles.append((format_seconds(seconds), "wall time"))
    cells = "".join(
      f"<div><b>{html.escape(number)}</b><span>{html.escape(text)}</span></div>"
      for number, text in tiles
    )
    versions = self.summary["versions"] or {}
    text = ", ".join(f"{k} {v}" for k, v in versions.items())
    written = time.strftime("%Y-%m-%d %H:%M %Z")
    return (
      f"<h1>{html.escape(self.title)}</h1>\n"
      f'<p class="soft">vit_jax, written {written}.'
      f" {html.escape(text) or 'Versions were not recorded.'}</p>\n"
      f'<div class="tiles">{cells}</div>'
    )

  def _headlines(self) -> list[tuple[float | None, str]]:
    summary = self.summary
    if "runs" in summary:
      named = [(r.last(r.top1()), f"{r.label}: {r.top1()}") for r in self.runs]
      return [(v, text) for v, text in named if v is not None][:4]
    return [
      (summary["glyphs_val_accuracy"], "glyphs, validation"),
      (
        (summary["fewshot"] or {}).get("10"),
        "digits, 10 labels a class, frozen features",
      ),
      (summary["digits_test_accuracy"], "digits, fine-tuned"),
      (summary["digits_test_accuracy_from_scratch"], "digits, from scratch"),
    ]

  def _facts(self) -> str:
    columns = [runs_lib.facts(run) for run in self.runs]
    names = dict.fromkeys(k for column in columns for k in column)
    facts = table(
      "facts",
      ["", *(r.label for r in self.runs)],
      [[n, *(c.get(n, "—") for c in columns)] for n in names],
    )
    folded = "".join(
      f"<details><summary>config of {html.escape(run.name)}</summary><pre>"
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
    return (
      f"<h2>What was run</h2>\n{facts}{folded}{missing('; '.join(lacking))}"
    )

  def _groups(self) -> dict[str, list[Run]]:
    """Runs on the same data are compared in one picture."""
    groups: dict[str, list[Run]] = {}
    for run in self.runs:
      groups.setdefault(run.dataset, []).append(run)
    return groups

  def _curves(self, dataset: str, group: list[Run]) -> str:
    shown, more = group[: figures.MOST_LINES], group[figures.MOST_LINES :]
    names = ", ".join(r.label for r in shown)
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
      else:
        lines = _lines((_name(r, shown), r, metric) for r in shown)
      if lines:
        picture_of = f"{what}: {names}"
        drawn.append(
          self._picture(f"{what}_{dataset}", draw(lines), picture_of)
        )
    left = [f"curves of {r.name} (too many for one picture)" for r in more]
    return (
      f"<h2>{html.escape(dataset)}: {html.escape(names)}</h2>\n"
      f'<div class="grid">{"".join(drawn)}</div>'
      + missing("; ".join(lacking + left))
    )

  def _fewshot(self) -> str:
    parts = [self._fewshot_of(r) for r in self.runs if r.fewshot()]
    return "<h2>Few-shot transfer</h2>\n" + (
      "".join(parts)
      or missing("few-shot accuracies, of which no run wrote any")
    )

  def _fewshot_of(self, run: Run) -> str:
    """Table and picture of a run's last few-shot accuracies."""
    found = {run.label: run.fewshot()}
    found |= {text: run.fewshot(key) for key, text in BASELINES.items()}
    absent = [text for text, values in found.items() if not values]
    found = {text: values for text, values in found.items() if values}
    shots = sorted({k for values in found.values() for k in values}, key=int)
    best = {k: max(v.get(k) or 0.0 for v in found.values()) for k in shots}
    mark = lambda v, k: "*" if v is not None and v == best[k] else ""
    cells = lambda v: [mark(v.get(k), k) + share(v.get(k)) for k in shots]
    numbers = table(
      "numbers",
      ["features", *shots],
      [[text, *cells(values)] for text, values in found.items()],
    )
    lines = []
    for text, values in found.items():
      points = [(int(k), v) for k, v in values.items() if v is not None]
      lines.append(Line(text, *zip(*points, strict=True)))
    name = run.evaluators("fewshot")[0]
    options = (run.config.get("evals") or {}).get(name, {})
    data = options.get("dataset") or run.dataset
    draws = len(options.get("seeds") or [])
    text = (
      "A linear classifier in closed form (ridge regression) on frozen"
      f" features: {data}"
      + (f", mean of {draws} draws of the labelled images" if draws > 1 else "")
      + (f", L2 weight {options['l2'][0]:g}" if options.get("l2") else "")
      + ". Columns: labelled images per class."
    )
    drawn = self._picture(
      f"fewshot_{run.name}", figures.fewshot(lines), f"few-shot, {run.label}"
    )
    return (
      f"<p>{html.escape(text)}</p>"
      f'<div class="grid">{drawn}{numbers}</div>'
      + missing(", ".join(f"baseline of {text}" for text in absent))
    )

  def _predictions(self) -> str:
    parts, lacking = [], []
    for run in self.runs:
      rows = runs_lib.predictions(run, NUM_IMAGES)
      if rows is None or not len(rows["images"]):
        lacking.append(run.name)
        continue
      right = sum(map(str.__eq__, rows["labels"], rows["guesses"]))
      text = (
        f"{run.label}, {run.dataset}: {right} of {len(rows['images'])} right"
      )
      figure = figures.predictions(**rows)
      parts.append(self._picture(f"predictions_{run.name}", figure, text, text))
    text = (
      "The first images of the split. Under each, the class that the model"
      " names and the probability it gives it; errors are framed, the true"
      " class below."
    )
    lacking = f"predictions.npz of {', '.join(lacking)}" if lacking else ""
    return f"<h2>Test images</h2>\n{_grid(text, parts)}{missing(lacking)}"

  def _positions(self) -> str:
    """Similarity of position embeddings, before and after interpolation."""
    found, lacking, drawn = {}, [], []
    for run in self.runs:
      try:
        found[run.name] = load_positions(run)
      except Exception as e:  # Whatever a damaged checkpoint may raise.
        lacking.append(f"{run.name}: {str(e)[:200] or type(e).__name__}")

    def draw(name: str, title: str, positions: Positions) -> None:
      h, w = positions.grid
      figure = figures.similarity(
        positions.of_patches(), (h, w), f"{title}: {h} × {w}"
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
      "Each small map belongs to one patch and lies where the patch does; it"
      " shows how similar the embedding of its position is to all others."
    )
    return (
      f"<h2>Position embeddings</h2>\n{_grid(text, drawn)}"
      f"{missing('; '.join(lacking))}"
    )

  def _source_of(self, run: Run) -> Run | None:
    """The run among these whose weights this one started from."""
    parts = pathlib.PurePath(run.config.get("init") or "").parts
    return next((r for r in self.runs if r.name in parts and r != run), None)

  def _picture(self, name: str, figure, alt: str, caption: str = "") -> str:
    """Keeps a picture and returns its HTML."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    self.pictures[f"{name}.png"] = png = figures.png(figure)
    return picture(png, alt, caption)


def write_report(directory: str, out: str | None = None) -> pathlib.Path:
  """Writes `report.html`, `figures/*.png` and `summary.json`.

  Args:
    directory: A run's workdir, or a directory of such.
    out: Where to write; None: to `directory`.

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


class Positions(NamedTuple):
  """A learned position embedding.

  table: [1 n d].
  grid: Rows and columns of patches.
  has_cls_row: Whether row 0 belongs to the class token.
  """

  table: np.ndarray
  grid: tuple[int, int]
  has_cls_row: bool

  def of_patches(self) -> np.ndarray:
    """Returns the rows of the patches, [h*w d]."""
    return self.table[0, int(self.has_cls_row) :]

  def resampled(self, grid: tuple[int, int]) -> "Positions":
    """Returns what fine-tuning on this grid starts from."""
    new = resample_posemb(self.table, self.grid, grid, self.has_cls_row)
    return Positions(new, grid, self.has_cls_row)


def load_positions(run: Run) -> Positions:
  """Reads the table of a run's newest checkpoint.

  Raises:
    ValueError: The model has no such table, or no grid is recorded.
    FileNotFoundError: The run has no checkpoint.
  """
  if not (run.path / checkpoint.FOLDER).is_dir():
    raise FileNotFoundError("no checkpoint")
  params, metadata = checkpoint.load_params(str(run.path))
  metadata = run.metadata | metadata
  for key in TABLE:
    params = params.get(key) if isinstance(params, dict) else None
  if params is None:
    raise ValueError("its positions are not learned")
  if "grid" not in metadata:
    raise ValueError("its metadata has no grid")
  array, (h, w) = np.asarray(params, np.float32), metadata["grid"]
  has_cls_row = metadata.get("has_cls_row", array.shape[1] == h * w + 1)
  return Positions(array, (h, w), bool(has_cls_row))


def _grid(text: str, pictures: list[str]) -> str:
  """Pictures side by side under their explanation; nothing for none."""
  pictures = "".join(pictures)
  return pictures and f'<p>{text}</p><div class="grid">{pictures}</div>'


def _name(run: Run, group: list[Run]) -> str:
  """The heading names a run that is alone; its line need not."""
  return run.label if len(group) > 1 else ""


def _lines(wanted) -> list[Line]:
  """Curves of (label, run, metric), without those that have no point."""
  lines = [Line(label, *run.series(metric)) for label, run, metric in wanted]
  return [line for line in lines if len(line.x)]


def _accuracies(group: list[Run]) -> list[Line]:
  """Top-1 of every run, over its steps; of a single one, all that it scored."""
  if len(group) > 1:
    return _lines((_scored(r), r, r.curve() or "") for r in group)
  (run,) = group
  names = run.evaluators("classification")
  prefix = {n: f"{n} " if len(names) > 1 else "" for n in names}
  wanted = [
    (f"{prefix[n]}top-{k}", run, f"{n}/top{k}") for n in names for k in (1, 5)
  ]
  wanted += [
    (f"{n} 10-shot", run, f"{n}/10shot") for n in run.evaluators("fewshot")[:1]
  ]
  return _lines(wanted)[: figures.MOST_LINES]


def _scored(run: Run) -> str:
  """The run, and on which evaluator if not on the one that stands for it."""
  if run.curve() == run.top1():
    return run.label
  return f"{run.label}, {run.curve().removesuffix('/top1')}"


def _accuracy_chart(group: list[Run]) -> Callable:
  classes = group[0].metadata.get("num_classes")
  return lambda lines: figures.accuracy(lines, 1 / classes if classes else None)


def main(argv: list[str] | None = None) -> None:
  """Reads the command line."""
  parser = argparse.ArgumentParser(
    "python -m vit_jax.report", description=__doc__.split("\n")[0]
  )
  parser.add_argument("directory", help="a run, or a directory of runs")
  parser.add_argument("--out", help="where to write (default: the directory)")
  args = parser.parse_args(argv)
  # Tables are read on the host; a GPU may be busy with the run itself.
  jax.config.update("jax_platforms", "cpu")
  try:
    path = write_report(args.directory, args.out)
  except ValueError as e:
    sys.exit(str(e))
  print(f"wrote {path}, {path.parent / 'summary.json'}, {path.parent}/figures/")


if __name__ == "__main__":
  main()
