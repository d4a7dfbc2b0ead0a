"""Tables and figures of `make study`: `python benchmarks/study_report.py`.

Reads docs/study.jsonl, and writes study_*.svg and the tables of study.md in
benchmarks/notes. A score is the mean over the seeds, with the standard
deviation after ±. Rows without runs say so.
"""

import functools
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

# ruff: noqa: E402
import study
import tables
from matplotlib.figure import Figure

from vit_jax.tools.reporting import charts

NOTES = ROOT / "benchmarks" / "notes"
DOC = NOTES / "study.md"
SCORE = "fewshot/10shot"
NAMES = {"vit": "ViT", "hybrid": "hybrid", "resnet": "ResNet"}
PLACES = {"stem": "stem", "blocks": "every block", "shared": "shared"}
POSITIONS = {
  "none": "none",
  "learn": "1-D",
  "learn2d": "2-D",
  "relative": "relative",
}
# Appendix D.4, Table 8, in percent: B/16, 5-shot on ImageNet.
PAPER_TABLE_8 = {
  ("none", "stem"): 61.382,
  ("learn", "stem"): 64.206,
  ("learn", "blocks"): 63.964,
  ("learn", "shared"): 64.292,
  ("learn2d", "stem"): 64.001,
  ("learn2d", "blocks"): 64.046,
  ("learn2d", "shared"): 64.022,
  ("relative", "stem"): 64.032,
}
Lines = Mapping[str, dict]


def values(lines: Lines, score: str, **run) -> list[float]:
  """Returns a score of the seeds that have been run, in percent."""
  names = [study.Run(seed=seed, **run).name for seed in study.SEEDS]
  scores = [lines[n]["scores"].get(score) for n in names if n in lines]
  return [100 * v for v in scores if v is not None]


def cell(scores: Sequence[float]) -> str:
  """Returns "81.2 ± 0.4"; if seeds are missing, "81.2 ± 0.4 (of 2)"."""
  if not scores:
    return "not yet run"
  text = f"{statistics.mean(scores):.1f}"
  if len(scores) > 1:
    text += f" ± {statistics.stdev(scores):.1f}"
  lack = len(scores) < len(study.SEEDS)
  return text + f" (of {len(scores)})" * lack


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table, and where its numbers are from."""
  rule = ["---"] * len(head)
  table = ("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
  return "\n".join(["<!-- receipt: study.jsonl -->", *table])


def _family_rows(lines: Lines, score: str, key: str, points, size="small"):
  for family, name in NAMES.items():
    cells = (
      cell(values(lines, score, model=f"{family}-{size}", **{key: point}))
      for point in points
    )
    yield [name, *cells]


def data_size(lines: Lines) -> str:
  """Figure 4: few-shot accuracy by the number of training images."""
  head = ["images", *(f"{n:,}" for n in study.IMAGES)]
  return markdown(head, [*_family_rows(lines, SCORE, "images", study.IMAGES)])


def _compute_points() -> list[dict]:
  small = [dict(model="small", steps=s) for s in study.STEPS]
  return [*small, dict(model="medium", steps=study.STEPS[-1])]


def compute(lines: Lines) -> str:
  """Figure 5: few-shot accuracy by pre-training FLOPs."""
  points = _compute_points()
  head = ["size, steps", *(f"{p['model']}, {p['steps']:,}" for p in points)]
  rows = []
  for family, name in NAMES.items():
    runs = [{**p, "model": f"{family}-{p['model']}"} for p in points]
    rows.append([name, *(cell(values(lines, SCORE, **r)) for r in runs)])
    flops = [_flops(lines, **r) for r in runs]
    texts = (f"{f / 1e12:.2f}" if f else "not yet run" for f in flops)
    rows.append(["its 10^12 FLOPs", *texts])
  return markdown(head, rows)


def _flops(lines: Lines, **run) -> int | None:
  name = study.Run(seed=study.SEEDS[0], **run).name
  return lines[name]["train_flops"] if name in lines else None


def positions(lines: Lines) -> str:
  """Table 8: few-shot accuracy by positions, and where they are added."""
  head = ["positions", "added at", "digits, 10-shot", "glyphs, top-1",
          "paper: ImageNet, 5-shot"]  # fmt: skip
  rows = []
  for posemb, at in study.POSITIONS:
    run = dict(model="vit-small", posemb=posemb, posemb_at=at)
    where = PLACES[at] if posemb in ("learn", "learn2d") else ""
    where = "attention" if posemb == "relative" else where
    scores = (cell(values(lines, s, **run)) for s in (SCORE, "glyphs/top1"))
    rows.append(
      [POSITIONS[posemb], where, *scores, f"{PAPER_TABLE_8[posemb, at]:.1f}"]
    )
  return markdown(head, rows)


def pretraining(lines: Lines) -> str:
  """Section 4.6: masked patches against scratch and supervision."""
  head = ["pre-training", "digits, 10-shot", "digits, fine-tuned"]
  rows = []
  for name, task in (
    ("none", None),
    ("masked patches", "masked"),
    ("supervised", "glyphs"),
  ):
    tuned, fewshot = [], []
    for seed in study.SEEDS:
      init = task and study.Run("vit-small", seed, task=task)
      of = study.Run("vit-small", seed, task="digits", init=init).name
      if of in lines:
        tuned.append(100 * lines[of]["scores"]["digits/top1"])
      # Untrained weights are scored beside the run that is trained.
      score = SCORE if task else SCORE.replace("/", "/random_init/")
      source = study.Run("vit-small", seed, task=task or "glyphs").name
      if source in lines:
        fewshot.append(100 * lines[source]["scores"][score])
    rows.append([name, cell(fewshot), cell(tuned)])
  return markdown(head, rows)


def baselines(lines: Lines) -> str:
  """What needs no training: untrained networks, and pixels."""
  rows = []
  for family, name in NAMES.items():
    untrained = values(
      lines, SCORE.replace("/", "/random_init/"), model=f"{family}-small"
    )
    rows.append([f"{name}, untrained", cell(untrained)])
  pixels = values(lines, SCORE.replace("/", "/raw_pixels/"), model="vit-small")
  rows.append(["pixels", f"{pixels[0]:.1f}" if pixels else "not yet run"])
  return markdown(["features", "digits, 10-shot"], rows)


def cost(lines: Lines) -> str:
  """What the runs took, and on what."""
  runs = [lines[r.name] for r in study.grid() if r.name in lines]
  if not runs:
    return "not yet run"
  machines = sorted({line["machine"] for line in runs})
  commits = sorted({line["commit"][:7] for line in runs})
  jax = sorted({line["versions"]["jax"] for line in runs})
  total = lambda key: sum(line[key] for line in runs)
  return (
    f"{len(runs)} of {len(study.grid())} runs,"
    f" {total('train_flops') / 1e12:.0f} x 10^12 FLOPs,"
    f" {total('cpu_seconds') / 60:.0f} minutes of processor time,"
    f" {total('seconds') / 60:.0f} on the clock; on"
    f" {', '.join(machines)}, jax {', '.join(jax)}, commit"
    f" {', '.join(commits)}."
  )


TABLES: dict[str, Callable[[Lines], str]] = {
  "data_size": data_size,
  "compute": compute,
  "positions": positions,
  "pretraining": pretraining,
  "baselines": baselines,
  "cost": cost,
}


def with_tables(text: str, lines: Lines) -> str:
  """Returns the page with its tables made anew."""
  made = {k: functools.partial(make, lines) for k, make in TABLES.items()}
  return tables.with_tables(text, made)


def draw(
  lines: Lines,
  title: str,
  x_label: str,
  ticks: Sequence[float],
  runs: Sequence[dict],
  place: Callable[[dict], float],
) -> Figure:
  """Draws the mean accuracy of each family over a logarithmic axis.

  Args:
    lines: Results.
    title: What is drawn.
    x_label: What the axis has, with its unit.
    ticks: Places that are written below the axis.
    runs: Size of the model, and what is varied, for each point.
    place: Function run -> place on the axis.
  """
  drawn, places = [], []
  for family, name in NAMES.items():
    points = []
    for run in runs:
      of_run = {**run, "model": f"{family}-{run['model']}"}
      if scores := values(lines, SCORE, **of_run):
        points.append((place(of_run), statistics.mean(scores)))
    x, y = zip(*points, strict=True) if points else ((), ())
    drawn.append(charts.Line(name, x, y))
    places += x
  figure = charts.curves(
    title, drawn, "{:.1f}%", "{:g}%".format, floor=40.0, x_label=x_label
  )
  charts.set_log_axis(figure.axes[0], places or [*ticks], ticks)
  return figure


def draw_data_size(lines: Lines) -> Figure:
  """Draws figure 4: accuracy over training images."""
  return draw(
    lines,
    "Digits, 10-shot, by pre-training data",
    "images of glyphs",
    study.IMAGES,
    [dict(model="small", images=n) for n in study.IMAGES],
    lambda run: run["images"],
  )


def draw_compute(lines: Lines) -> Figure:
  """Draws figure 5: accuracy over FLOPs."""
  return draw(
    lines,
    "Digits, 10-shot, by pre-training compute",
    "10^12 FLOPs of pre-training",
    (0.5, 1, 2, 3),
    _compute_points(),
    lambda run: (_flops(lines, **run) or 0) / 1e12,
  )


FIGURES: dict[str, Callable[[Lines], Figure]] = {
  "data_size": draw_data_size,
  "compute": draw_compute,
}


def main() -> None:
  lines = study.read(study.RESULTS)
  DOC.write_text(with_tables(DOC.read_text(), lines))
  for name, draw in FIGURES.items():
    svg = charts.render(lambda draw=draw: draw(lines))
    (NOTES / f"study_{name}.svg").write_text(svg, "utf-8")


if __name__ == "__main__":
  main()
