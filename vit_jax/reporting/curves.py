"""Curves over steps, and where the wall time of the runs went."""

import functools
import html
import math
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from vit_jax.callbacks.accounting import duration
from vit_jax.reporting import charts
from vit_jax.reporting.charts import MOST_LINES, ChartFiles, Line
from vit_jax.reporting.page import breakable, missing
from vit_jax.reporting.runs import TOP1, Run

MOST_SETS = 6  # charts of accuracy, each on another set
CROSSES = "Crosses on an axis: steps at which the value was not finite."
METRICS = (
  ("train/loss", "loss", charts.loss),
  ("train/lr", "learning rate", charts.learning_rate),
  ("train/images_per_second", "throughput", charts.throughput),
)
# In the order of the bar; the words of the page for each.
TIME_NAMES = {
  "step": "steps",
  "input": "waiting for images",
  "evaluation": "evaluations",
  "save": "checkpoints",
  "start": "starts",
  "compile": "compilation",
  "repeated": "steps done again",
  "restart": "stopped",
}
SMALLEST_SHARE = 0.004  # share of a bar that can be seen


def by_dataset(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """Groups runs on the same data, by its name."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.dataset, []).append(run)
  return groups


def section(name: str, runs: Sequence[Run], chart_files: ChartFiles) -> str:
  """Returns the charts of runs, each with the curves of all of them.

  Runs with batches of different sizes are drawn over the images they have seen.

  Args:
    name: Their data set, or any other title.
    runs: Those of more than `MOST_LINES` are left out, and named.
    chart_files: Those of the page.
  """
  runs = sorted(runs, key=lambda run: not run.rows)  # which has no curve
  shown, more = runs[:MOST_LINES], runs[MOST_LINES:]
  names = ", ".join(r.name for r in shown)
  title = names if len(runs) <= 3 else f"{len(runs)} runs"
  x_label, scale = _axis(shown)
  x_end = max((r.steps * scale(r) for r in shown), default=0)
  drawn, left_out, gaps = [], [], []

  def draw(what: str, lines: list[Line], chart: Callable[..., Figure]) -> None:
    if cut := [line.label for line in lines[MOST_LINES:]]:
      left_out.append(f"curves of {', '.join(cut)}: see the tables")
    if lines := lines[:MOST_LINES]:
      chart = functools.partial(chart, lines, x_label=x_label, x_end=x_end)
      if not all(math.isfinite(v) for line in lines for v in line.y):
        gaps.append(what)
      drawn.append(chart_files.add(f"{what}_{name}", chart, f"{what}: {names}"))

  def lines_of(wanted) -> list[Line]:
    """Returns curves of (label, run, metric), leaving out empty ones.

    A run has the same colour in all charts.
    """
    lines = []
    for label, run, metric in wanted:
      steps, values = run.points(metric)
      if any(map(math.isfinite, values)):
        x = [s * scale(run) for s in steps]
        place = shown.index(run) if shown[1:] else None
        lines.append(Line(label, x, values, place))
    return lines

  for metric, what, chart in METRICS:
    if none := [r.name for r in shown if not r.series(metric)[0]]:
      left_out.append(f"{what} of {', '.join(none)}")
    draw(what, lines_of((_label(r, shown), r, metric) for r in shown), chart)
    if metric == "train/lr":  # the accuracies follow, in the second row
      if none := [r.name for r in shown if not r.series(r.top1())[0]]:
        left_out.append(f"accuracy of {', '.join(none)}")
      for what, title_of, wanted in _accuracies(shown):
        accuracy = functools.partial(
          charts.accuracy, chance=_chance(shown), title=title_of
        )
        draw(what, lines_of(wanted), accuracy)
  if more:
    names = ", ".join(r.name for r in more)
    left_out.append(f"curves of {names} (too many for one picture)")
  return (
    f"<h2>{breakable(name)}: {breakable(title)}</h2>\n"
    f'<div class="grid">{"".join(drawn)}</div>'
    + (f'<p class="soft">{CROSSES}</p>' if gaps else "")
    + missing("; ".join(left_out))
  )


def _axis(runs: Sequence[Run]) -> tuple[str, Callable[[Run], int]]:
  """Returns the name of the axis, and by what a run's steps are multiplied."""
  sizes = {r.name: r.config.get("data", {}).get("batch_size") for r in runs}
  if len({*sizes.values()}) > 1 and all(sizes.values()):
    return "images seen", lambda run: sizes[run.name]
  return "step", lambda run: 1


def _label(run: Run, runs: Sequence[Run]) -> str:
  """Returns a name for a line, or "" where the heading names the only run."""
  return run.name if len(runs) > 1 else ""


def _accuracies(runs: list[Run]) -> list[tuple[str, str, list]]:
  """Returns name, title and (label, run, metric) of the curves of each chart.

  A single run has one chart with all its scores. Several runs have a chart for
  each set that was scored more than once by any of them; where there is none,
  for each set.
  """
  if len(runs) == 1:
    return [("accuracy", "Accuracy", _of_one(runs[0]))]
  sets: dict[str, list] = {}
  for run in runs:
    for name in run.evaluators(TOP1):
      of_set = sets.setdefault(run.top1_title(name), [])
      of_set.append((run.name, run, f"{name}/top1"))
  curves = {
    text: wanted
    for text, wanted in sets.items()
    if any(len(run.series(metric)[0]) > 1 for _, run, metric in wanted)
  } or sets
  curves = dict(list(curves.items())[:MOST_SETS])
  name = lambda text: "accuracy" if len(curves) == 1 else f"accuracy {text}"
  return [(name(t), f"Accuracy, {t}", w) for t, w in curves.items()]


def _of_one(run: Run) -> list[tuple[str, Run, str]]:
  """Returns all accuracies of a run: top-1 and few-shot."""
  names = run.evaluators(TOP1)
  if len(names) > 1:
    wanted = [(f"{run.top1_title(n)}, top-1", run, f"{n}/top1") for n in names]
  else:
    wanted = [(f"top-{k}", run, f"{n}/top{k}") for n in names for k in (1, 5)]
  fewshot = run.fewshot_names()
  for name in fewshot:
    which = f"{run.split_title(name)}, " if len(fewshot) > 1 else ""
    for i, l2 in enumerate(run.fewshot(name)):
      metric = f"{name}/l2={l2}/10shot" if i else f"{name}/10shot"
      wanted.append((f"{which}10-shot, L2 {l2}", run, metric))
  return wanted


def _chance(runs: Sequence[Run]) -> float | None:
  """Returns the accuracy of guessing, if it is the same for all runs."""
  counts = {r.metadata.get("num_classes") for r in runs}
  return 1 / counts.pop() if len(counts) == 1 and all(counts) else None


def time_section(runs: Sequence[Run]) -> str:
  """Returns the section; "" if no run has an account of its time."""
  times = {run.name: run.seconds for run in runs}
  known = {label: seconds for label, seconds in times.items() if seconds}
  if not known:
    return ""
  unknown = ", ".join(label for label in times if label not in known)
  text = (
    "Wall time since the first start of each run, to its end or, if it did not"
    " end, to its last checkpoint or row of training. “Stopped” is the time"
    " from the last sign of life of a process to the start of the next; steps"
    " after the last checkpoint had to be done again."
  )
  parts = [
    (f"<h3>{breakable(label)}</h3>" if runs[1:] else "") + _bar(seconds)
    for label, seconds in known.items()
  ]
  unknown = unknown and f"times of {unknown}: no rows of training"
  return (
    f"<h2>Where the time went</h2>\n<p>{text}</p>{''.join(parts)}"
    f"{missing(unknown)}"
  )


def _bar(seconds: dict[str, float]) -> str:
  """Returns a bar of the shares, and below it each with its time."""
  total = sum(seconds.values())
  shares = {k: seconds[k] / total if total else 0.0 for k in TIME_NAMES}
  parts = "".join(
    f'<i class="spent-{k}" style="width: {100 * share:.2f}%"></i>'
    for k, share in shares.items()
    if share >= SMALLEST_SHARE
  )
  items = "".join(
    f'<li><i class="spent-{k}"></i>{TIME_NAMES[k]}'
    f" <b>{duration(seconds[k])}</b> {100 * share:.1f}%</li>"
    for k, share in shares.items()
    if seconds[k] >= 0.05
  )
  alt = f"{100 * shares['step']:.0f} % of {duration(total)} in steps"
  return (
    f'<div class="spent" role="img" aria-label="{html.escape(alt)}">{parts}'
    f'</div><ul class="spent-key">{items}</ul>'
  )
