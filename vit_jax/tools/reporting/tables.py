"""The tables of the report: scores, configs, costs."""

import statistics
from collections.abc import Sequence
from typing import Any

from vit_jax.callbacks import accounting
from vit_jax.callbacks.progress import format_seconds
from vit_jax.checkpointing import resume_rules
from vit_jax.options import shown
from vit_jax.tools.reporting import beginnings
from vit_jax.tools.reporting import runs as runs_lib
from vit_jax.tools.reporting.page import share, table
from vit_jax.tools.reporting.runs import Run

R2_TITLE = ", R2"  # ends the name of such a score
MOST_CHANGES = 5  # largest number of changes of a config that are listed
# Metrics with their own column in the table of scores.
USUAL = ("top1", "balanced_accuracy", "top5", "loss", "count")
MOST_COLUMNS = 4  # more runs are rows instead of columns


def headlines(run: Run) -> list[tuple[float | None, str, str]]:
  """Returns share, name and remark for each score of a run.

  A held-out part of the training split is left out if there is a test split,
  because options are chosen by it.
  """
  names = run.evaluators(runs_lib.TOP1)
  tests = [n for n in names if not run.is_training_part(n)]
  scores = [
    (run.scores(n).get("top1"), f"{run.top1_title(n)}, top-1", "")
    for n in tests or names
  ]
  names = run.evaluators(runs_lib.R2)
  tests = [n for n in names if not run.is_training_part(n)]
  scores += [
    (run.scores(n).get("r2"), f"{run.split_title(n)}{R2_TITLE}", "")
    for n in tests or names
  ]
  if probe := run.linear_probe:
    text = f"before fine-tuning; {beginnings.fine_tuned_text(probe)}"
    scores.append((probe.top1, "linear probe, held-out images, top-1", text))
  for name in run.fewshot_names():
    by_l2 = run.fewshot(name)
    if not by_l2:
      continue
    first, *others = by_l2
    shots = "10" if "10" in by_l2[first] else list(by_l2[first])[-1]
    what = f"{run.split_title(name)}, {shots}-shot, L2 {first}"
    more = [f"L2 {w}: {share(by_l2[w].get(shots))}" for w in others]
    scores.append((by_l2[first].get(shots), what, ", ".join(more)))
  return scores


def scores(runs: list[Run]) -> str:
  """Returns a row for each evaluator with a top-1, for all runs.

  The linear probes with which runs began come first. Scores of the same kind
  and split are in adjacent rows; the best is marked.
  """
  by_split: dict[str, list[tuple[Run, dict[str, float | None]]]] = {}
  for run in runs:
    for name in run.evaluators(runs_lib.TOP1):
      of_split = by_split.setdefault(run.top1_title(name), [])
      of_split.append((run, run.scores(name)))
  rows = []
  for run in runs:
    if run.linear_probe:
      who = f", {run.name}" if len(runs) > 1 else ""
      name = f"linear probe, held-out images{who}"
      probe = map(share, (run.linear_probe.top1, run.linear_probe.balanced))
      rows.append([name, *probe, *["—"] * 3])
  for text, of_split in by_split.items():
    best = max(values.get("top1") or 0.0 for _, values in of_split)
    for run, values in of_split:
      top1, balanced, top5, loss, count = map(values.get, USUAL)
      texts = (
        "—" if loss is None else f"{loss:.4g}",
        "—" if count is None else f"{count:,.0f}",
      )
      mark = "*" if len(of_split) > 1 and top1 == best else ""
      who = f", {run.name}" if len(runs) > 1 else ""
      rows.append(
        [text + who, mark + share(top1), *map(share, (balanced, top5)), *texts]
      )
  if not rows:
    return ""
  head = ["", "top-1", "balanced", "top-5", "loss", "images"]
  return f"<h2>Scores</h2>\n{table('numbers', head, rows)}"


def other_scores(runs: list[Run]) -> str:
  """Returns the last metrics that no other table has, a row per evaluator.

  These are all metrics of evaluators without top-1 and shots; metrics other
  than `USUAL` of evaluators with a top-1; and few-shot accuracies with all
  examples.
  """
  rows = []
  for run in runs:
    who = f", {run.name}" if len(runs) > 1 else ""
    with_top1 = run.evaluators(runs_lib.TOP1)
    with_shots = run.evaluators(runs_lib.SHOT)
    kinds = {e.group: e.kind for e in run.evals.values()}
    kinds |= {n: e.kind for n, e in run.evals.items()}
    for name in (*run.evals, *run.groups):
      metrics = (n for n in run.names if n.startswith(f"{name}/"))
      if name in with_shots:
        metrics = (n for n in metrics if n.endswith("/all"))
      values = {m.removeprefix(f"{name}/"): run.last(m) for m in metrics}
      texts = [
        f"{what} {value:.5g}"
        for what, value in values.items()
        if value is not None and not (name in with_top1 and what in USUAL)
      ]
      if texts:
        rows.append(
          [run.split_title(name) + who, kinds[name], ", ".join(texts)]
        )
  if not rows:
    return ""
  head = ["", "evaluator", "last scores"]
  return f"<h2>Further scores</h2>\n{table('facts', head, rows)}"


def facts(runs: list[Run]) -> str:
  """Returns a table of the runs."""
  return side_by_side(runs, [run_facts(run) for run in runs])


def run_facts(run: Run) -> dict[str, str]:
  """Returns name in the table -> text: model, data, optimizer and so on."""
  config, metadata = run.config, run.metadata
  facts = {}
  if model := config.get("model"):
    more = [
      f"{key.replace('_dim', ' width').replace('num_', '')} {model[key]}"
      for key in ("width", "depth", "mlp_dim", "num_heads")
      if model.get(key) is not None
    ]
    facts["model"] = ", ".join([model.get("variant") or "", *more])
  if metadata.get("num_params"):
    facts["parameters"] = f"{metadata['num_params']:,}"
  if objective := config.get("objective"):
    texts = [objective.get("kind"), *objective.values()]
    texts = dict.fromkeys(t for t in texts if isinstance(t, str))
    facts["objective"] = ", ".join(texts).replace("_", " ")
  if config:
    facts["starts from"] = str(config.get("init") or "random weights")
  if before := (run.metadata.get(accounting.KEY) or {}).get("init"):
    facts["the run before"] = accounting.cost_text(before)
  if data := config.get("data"):
    fake = ", fake" * run.is_fake
    facts["data"] = f"{data.get('dataset')} [{data.get('split')}]{fake}"
    if metadata.get("data_given"):
      facts["data"] = run.dataset
    if metadata.get("num_examples"):
      facts["images"] = f"{metadata['num_examples']:,}"
  if size := metadata.get("image_size"):
    facts["image size"] = " × ".join(map(str, size)) + " px"
  if grid := metadata.get("grid"):
    facts["patches"] = " × ".join(map(str, grid))
  if run.rows:
    total = run.total_steps
    of = f" of {total:,}" if total and total != run.steps else ""
    facts["steps"] = f"{run.steps:,}{of}"
  if (data := config.get("data")) and data.get("batch_size"):
    facts["batch"] = f"{data['batch_size']:,}"
  if optim := config.get("optim"):
    lr = optim.get("lr")
    peak = "" if lr is None else f", peak lr {lr:g}"
    facts["optimizer"] = f"{optim.get('name')}{peak}"
  if text := changes_text(metadata.get("changes")):
    facts["changed on the way"] = text
  if metadata.get("devices"):
    facts["devices"] = str(metadata["devices"])
  return facts


def changes_text(trail: list[dict[str, Any]] | None) -> str:
  """Returns a text about the options that changed when a run resumed.

  Args:
    trail: Result of `resume_rules.trail`.

  Example:
    >>> change = {"step": 8, "key": "optim.lr", "from": 1, "to": 0.1}
    >>> changes_text([{**change, "by": "--allow_change"}])
    'step 8: optim.lr 1 to 0.1 (allowed)'
  """
  trail = trail or []
  parts = [
    f"step {x.get('step') or 0:,}: {x.get('key')} {shown(x.get('from'))} to"
    f" {shown(x.get('to'))}" + " (allowed)" * (x.get("by") == resume_rules.FLAG)
    for x in trail[:MOST_CHANGES]
  ]
  more = len(trail) - MOST_CHANGES
  return "; ".join(parts) + f"; and {more:,} more" * (more > 0)


def costs(run: Run) -> dict[str, float | None]:
  """Returns name in the table -> cost of a run.

  Rates are medians over the lines of the run. None: not measured.
  """
  of = lambda name: run.series(f"train/{name}")[1]
  median = lambda values: statistics.median(values) if values else None
  return {
    "images seen": run.last("train/images_seen"),
    "exaFLOPs": run.last("train/exaflops"),
    "device-hours": run.device_hours,
    "wall seconds": run.wall_seconds(),
    "images/s": median(of("images_per_second")),
    "MFU": median(of("mfu")),
    "peak bytes": max(of("peak_bytes"), default=None),
  }


def cost_texts(run: Run) -> dict[str, str]:
  """Returns the measured `costs` as texts."""
  texts = {
    "wall seconds": ("wall time", format_seconds),
    "MFU": ("MFU", lambda v: f"{100 * v:.1f}%"),
    "peak bytes": ("memory", lambda v: f"{v / 2**30:.2f} GiB a device"),
  }
  named = {}
  for what, value in costs(run).items():
    if value is not None:
      name, text = texts.get(what, (what, accounting.number))
      named[name] = text(value)
  return named


def side_by_side(runs: Sequence[Run], facts: Sequence[dict[str, str]]) -> str:
  """Returns a table with a column per run; with many runs, a row per run.

  Args:
    runs: The runs.
    facts: Name -> value, for each run; a missing value is shown as "—".
  """
  names = list(dict.fromkeys(name for of_run in facts for name in of_run))
  by_run = [
    [run.name, *(of_run.get(name, "—") for name in names)]
    for run, of_run in zip(runs, facts, strict=True)
  ]
  rows = [["", *names], *by_run]
  if len(runs) <= MOST_COLUMNS:
    rows = [list(column) for column in zip(*rows, strict=True)]
  return table("facts", rows[0], rows[1:])
