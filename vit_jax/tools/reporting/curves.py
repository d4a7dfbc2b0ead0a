"""Curves over the steps, and the shares of the wall time."""

import functools
import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from vit_jax.callbacks.accounting import duration
from vit_jax.tools.reporting import charts
from vit_jax.tools.reporting.charts import MOST_LINES, ChartFiles, Line
from vit_jax.tools.reporting.page import breakable, missing
from vit_jax.tools.reporting.runs import LOSS, MAE, R2, TOP1, Run

MOST_SETS = 6  # charts of accuracy, one for each set
CROSSES = "Crosses on an axis: steps at which the value was not finite."
# The parts of the bar in order, and their names on the page.
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
SMALLEST_SHARE = 0.004  # smallest visible share of a bar


def by_dataset(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """Returns name of a data set -> its runs."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.dataset, []).append(run)
  return groups


def section(name: str, runs: Sequence[Run], chart_files: ChartFiles) -> str:
  """Returns charts, each with the curves of all runs.

  If batch sizes differ, the x axis counts images instead of steps.

  Args:
    name: Data set of the runs, or another title.
    runs: The runs; only the first `MOST_LINES` are drawn.
    chart_files: The charts of the page; the new ones are added.
  """
  runs = sorted(runs, key=lambda run: not run.rows)  # which has no curve
  shown, more = runs[:MOST_LINES], runs[MOST_LINES:]
  names = ", ".join(r.name for r in shown)
  title = names if len(runs) <= 3 else f"{len(runs)} runs"
  x_label, scale = _axis(shown)
  x_end = max((r.steps * scale(r) for r in shown), default=0)
  drawn, has_gaps = [], False
  left_out = [
    f"{what} of {', '.join(absent)}"
    for what, metric_of in (
      ("loss", lambda run: LOSS),
      ("learning rate", lambda run: "train/lr"),
      ("accuracy", lambda run: run.top1()),
      ("throughput", lambda run: "train/images_per_second"),
    )
    if (
      absent := [
        r.name
        for r in shown
        if not r.series(metric_of(r))[0]
        and not (what == "accuracy" and r.evaluators(R2))
      ]
    )
  ]
  for plot in _plots(shown):
    lines = []
    for label, run, metric in plot.curves:
      steps, values = run.points(metric)
      if any(map(math.isfinite, values)):
        x = [step * scale(run) for step in steps]
        place = shown.index(run) if shown[1:] else None  # a colour for each run
        lines.append(Line(label, x, values, place))
    if cut := [line.label for line in lines[MOST_LINES:]]:
      left_out.append(f"curves of {', '.join(cut)}: see the tables")
    if lines := lines[:MOST_LINES]:
      has_gaps |= not all(math.isfinite(v) for line in lines for v in line.y)
      draw = functools.partial(plot.draw, lines, x_label=x_label, x_end=x_end)
      file, alt = f"{plot.name}_{name}", f"{plot.name}: {names}"
      drawn.append(chart_files.add(file, draw, alt))
  if more:
    names = ", ".join(r.name for r in more)
    left_out.append(f"curves of {names} (too many for one picture)")
  return (
    f"<h2>{breakable(name)}: {breakable(title)}</h2>\n"
    f'<div class="grid">{"".join(drawn)}</div>'
    + (f'<p class="soft">{CROSSES}</p>' if has_gaps else "")
    + missing("; ".join(left_out))
  )


def _axis(runs: Sequence[Run]) -> tuple[str, Callable[[Run], int]]:
  """Returns the name of the x axis, and run -> factor of its steps."""
  sizes = {r.name: r.config.get("data", {}).get("batch_size") for r in runs}
  if len({*sizes.values()}) > 1 and all(sizes.values()):
    return "images seen", lambda run: sizes[run.name]
  return "step", lambda run: 1


class _Plot(NamedTuple):
  """A chart: name, function that draws lines, (label, run, metric) of each."""

  name: str
  draw: Callable[..., Figure]
  curves: list[tuple[str, Run, str]]


def _plots(runs: list[Run]) -> list[_Plot]:
  """Returns the charts of runs, in the order of the page."""

  def of_metric(name: str, draw: Callable[..., Figure], metric: str) -> _Plot:
    label = lambda run: run.name if runs[1:] else ""  # the heading names one
    return _Plot(name, draw, [(label(run), run, metric) for run in runs])

  return [
    of_metric("loss", charts.loss, LOSS),
    of_metric("learning rate", charts.learning_rate, "train/lr"),
    *_accuracies(runs),
    *_errors(runs),
    of_metric("throughput", charts.throughput, "train/images_per_second"),
  ]


def _accuracies(runs: list[Run]) -> list[_Plot]:
  """Returns the charts of accuracies.

  One run has one chart with all its scores. Several runs have a chart for each
  set that a run scored more than once; if there is none, for each set.
  """
  if len(runs) == 1:
    curves = _of_one(runs[0])
    draw = functools.partial(charts.accuracy, chance=_chance(curves))
    return [_Plot("accuracy", draw, curves)]
  sets: dict[str, list[tuple[str, Run, str]]] = {}
  for run in runs:
    for name in run.evaluators(TOP1):
      of_set = sets.setdefault(run.top1_title(name), [])
      of_set.append((run.name, run, f"{name}/top1"))
  repeated = {
    text: curves
    for text, curves in sets.items()
    if any(len(run.series(metric)[0]) > 1 for _, run, metric in curves)
  }
  shown = list((repeated or sets).items())[:MOST_SETS]
  return [
    _Plot(
      f"accuracy {text}" if shown[1:] else "accuracy",
      functools.partial(
        charts.accuracy, chance=_chance(curves), title=f"Accuracy, {text}"
      ),
      curves,
    )
    for text, curves in shown
  ]


def _errors(runs: list[Run]) -> list[_Plot]:
  """Returns charts of mean absolute errors, one for each number.

  A curve for each evaluator that predicts numbers.
  """
  curves: dict[str, list[tuple[str, Run, str]]] = {}
  for run in runs:
    who = f", {run.name}" if runs[1:] else ""
    for name in run.evaluators(R2):
      metrics = [m for m in run.names if MAE.fullmatch(m)]
      metrics = [m for m in metrics if m.startswith(f"{name}/")]
      # Several numbers may have different units: their mean is left out.
      metrics = [m for m in metrics if m != f"{name}/mae"] or metrics
      for metric in metrics:
        number = metric.removeprefix(f"{name}/").removesuffix("mae").strip("/")
        label = f"{run.split_title(name)}{who}"
        curves.setdefault(number, []).append((label, run, metric))
  return [
    _Plot(
      f"error {number}".strip(),
      functools.partial(
        charts.mae, f"Mean absolute error{f', {number}' * bool(number)}"
      ),
      of_number,
    )
    for number, of_number in [*curves.items()][:MOST_SETS]
  ]


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


def _chance(curves: Sequence[tuple[str, Run, str]]) -> float | None:
  """Returns the accuracy of guessing, if it is the same for all curves.

  Only the number of classes of the training data is known.
  """
  counts = set()
  for _, run, metric in curves:
    name = metric.partition("/")[0]
    is_known = run.is_on_training_data(name)
    is_known = is_known and run.evals[name].kind != "subset"
    counts.add(run.metadata.get("num_classes") if is_known else None)
  return 1 / counts.pop() if len(counts) == 1 and all(counts) else None


def time_section(runs: Sequence[Run]) -> str:
  """Returns the section about wall time; "" if no run has recorded it."""
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
  """Returns a bar of the shares, and below it the time of each part."""
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
