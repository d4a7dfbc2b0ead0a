"""Few-shot accuracies: runs compared, and each run with its baselines."""

import functools
import html
from collections.abc import Iterable, Sequence

from vit_jax.tools.reporting import charts
from vit_jax.tools.reporting.charts import ChartFiles, Line
from vit_jax.tools.reporting.page import breakable, missing, share, table
from vit_jax.tools.reporting.runs import Run

BASELINES = {"random_init": "random weights", "raw_pixels": "raw pixels"}
MOST_WEIGHTS = 4  # L2 weights with their own chart


def side_by_side(runs: Sequence[Run], chart_files: ChartFiles) -> str:
  """Returns few-shot accuracies of several runs on the same data.

  Args:
    runs: The runs to compare.
    chart_files: The charts of the page; the new ones are added.
  """
  sets: dict[str, dict[str, tuple[str, dict[str, float]]]] = {}
  for run in runs:
    for name in run.fewshot_names():
      if by_l2 := run.fewshot(name):
        first = next(iter(by_l2.items()))
        sets.setdefault(run.data_title(name), {})[run.name] = first
  parts = []
  for text, by_run in sets.items():
    if len(by_run) < 2:
      continue
    best = _best(v for _, v in by_run.values())
    rows = [[name, l2, *_cells(v, best)] for name, (l2, v) in by_run.items()]
    lines = [_line(name, v) for name, (_, v) in by_run.items()]
    lines = lines[: charts.MOST_LINES]
    draw = functools.partial(
      charts.fewshot, lines, f"Few-shot, {text}", max(best.values())
    )
    drawn = chart_files.add(
      f"fewshot_{text}", draw, f"few-shot accuracy, {text}"
    )
    cut = ", ".join(list(by_run)[charts.MOST_LINES :])
    parts.append(
      f"<h3>{breakable(text)}</h3>"
      f'<div class="grid">{drawn}</div>'
      f"{table('numbers', ['run', 'L2', *best], rows)}"
      + missing(cut and f"curves of {cut}, which the table has")
    )
  if not parts:
    return ""
  note = (
    "<p>The first L2 weight of each config, which counts. Columns: labelled"
    " images per class; bold: the best of a column.</p>"
  )
  return f"<h2>Few-shot, side by side</h2>\n{note}{''.join(parts)}"


def section(
  runs: Sequence[Run], chart_files: ChartFiles, has_probes: bool
) -> str:
  """Returns the few-shot accuracies of each run; "" if only probes have any.

  Args:
    runs: The runs of the report.
    chart_files: The charts of the page; the new ones are added.
    has_probes: Whether the page has probes.
  """
  parts = [
    _accuracies(run, name, chart_files)
    for run in runs
    for name in run.fewshot_names()
  ]
  if has_probes and not parts:
    return ""
  return "<h2>Few-shot transfer</h2>\n" + (
    "".join(parts) or missing("few-shot accuracies, of which no run wrote any")
  )


def _best(accuracies: Iterable[dict[str, float]]) -> dict[str, float]:
  """Returns number of shots -> largest accuracy, by rising number."""
  best: dict[str, float] = {}
  for by_shots in accuracies:
    for shots, value in by_shots.items():
      best[shots] = max(value, best.get(shots, 0.0))
  return dict(sorted(best.items(), key=lambda item: int(item[0])))


def _cells(by_shots: dict[str, float], best: dict[str, float]) -> list[str]:
  """Returns accuracies as cells of a table; the best of a column is marked."""
  return [
    "*" * (by_shots.get(shots) == value) + share(by_shots.get(shots))
    for shots, value in best.items()
  ]


def _line(label: str, by_shots: dict[str, float]) -> Line:
  return Line(label, [int(k) for k in by_shots], list(by_shots.values()))


def _accuracies(run: Run, name: str, chart_files: ChartFiles) -> str:
  """Returns table and charts of the last accuracies of an evaluator."""
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
  best = _best(values for _, _, values in rows)
  numbers = table(
    "numbers",
    ["features", "L2", *best],
    [[text, w, *_cells(values, best)] for w, text, values in rows],
  )
  drawn = []
  for weight in weights[:MOST_WEIGHTS]:
    lines = [_line(text, values) for w, text, values in rows if w == weight]
    title = f"Few-shot accuracy, L2 {weight}"
    draw = functools.partial(charts.fewshot, lines, title, max(best.values()))
    file = f"fewshot_{run.name}_{name}_l2_{weight}"
    drawn.append(chart_files.add(file, draw, f"{title}: {run.name}"))
  sets = _sets(run, name)
  left_out = [] if sets else [f"baseline of {text}" for text in absent]
  if more := weights[MOST_WEIGHTS:]:
    left_out.append(f"charts of L2 {', '.join(more)}, which the table has")
  return (
    f"<h3>{breakable(run.split_title(name))}: {breakable(run.name)}</h3>"
    f"<p>{html.escape(_text(run, name, weights))}</p>"
    f'<div class="grid">{"".join(drawn)}</div>{numbers}{sets}'
    + missing("; ".join(left_out))
  )


def _sets(run: Run, name: str) -> str:
  """Returns a row for each data set of a mean; "" if it is no mean."""
  members = run.groups.get(name, ())
  accuracies = {n: next(iter(run.fewshot(n).values()), {}) for n in members}
  if not accuracies:
    return ""
  shots = sorted({k for v in accuracies.values() for k in v}, key=int)
  rows = [
    [run.split_title(n), *(share(v.get(k)) for k in shots)]
    for n, v in accuracies.items()
  ]
  return table("numbers", ["data set", *shots], rows)


def _text(run: Run, name: str, weights: list[str]) -> str:
  """Returns a text about the numbers of a few-shot evaluator."""
  options = run.evals.get(run.groups.get(name, [name])[0])
  draws = len(options.seeds) if options else 1
  text = (
    "A linear classifier in closed form (ridge regression) on frozen features"
  )
  if draws > 1:
    text += f", mean of {draws} draws of the labelled images"
  if len(weights) > 1:
    text += f". All L2 weights of the config; the first, {weights[0]}, counts"
  return f"{text}. Columns: labelled images per class; bold: their best."
