"""The tables of the report, in words and numbers."""

from vit_jax.reporting import facts as facts_lib
from vit_jax.reporting import runs as runs_lib
from vit_jax.reporting.comparison import MOST_COLUMNS, beside
from vit_jax.reporting.page import share, table
from vit_jax.reporting.runs import Run


def headlines(run: Run) -> list[tuple[float | None, str, str]]:
  """Returns share, name and remark for each score of a run.

  A held-out part of the split that was trained on is no headline beside another
  split: a run is chosen by it.
  """
  names = run.evaluators(runs_lib.TOP1)
  tests = [n for n in names if not run.is_of_training(n)]
  found = [
    (run.scores(n).get("top1"), f"{run.of_top1(n)}, top-1", "")
    for n in tests or names
  ]
  for name in run.fewshot_names():
    by_l2 = run.fewshot(name)
    if not by_l2:
      continue
    first, *others = by_l2
    shots = "10" if "10" in by_l2[first] else list(by_l2[first])[-1]
    what = f"{run.scored(name)}, {shots}-shot, L2 {first}"
    more = [f"L2 {w}: {share(by_l2[w].get(shots))}" for w in others]
    found.append((by_l2[first].get(shots), what, ", ".join(more)))
  return found


def scores(runs: list[Run]) -> str:
  """Returns the scores of all runs' evaluators with a top-1, a row each.

  Those of one kind and one split follow each other; the best is marked.
  """
  by_split: dict[str, list[tuple[Run, dict[str, float | None]]]] = {}
  for run in runs:
    for name in run.evaluators(runs_lib.TOP1):
      found = by_split.setdefault(run.of_top1(name), [])
      found.append((run, run.scores(name)))
  rows = []
  for text, found in by_split.items():
    best = max(values.get("top1") or 0.0 for _, values in found)
    for run, values in found:
      top1, top5, loss, count = map(
        values.get, ("top1", "top5", "loss", "count")
      )
      texts = (
        "—" if loss is None else f"{loss:.4g}",
        "—" if count is None else f"{count:,.0f}",
      )
      mark = "*" if len(found) > 1 and top1 == best else ""
      who = f", {run.label}" if len(runs) > 1 else ""
      rows.append([text + who, mark + share(top1), share(top5), *texts])
  if not rows:
    return ""
  head = ["", "top-1", "top-5", "loss", "images"]
  return f"<h2>Scores</h2>\n{table('numbers', head, rows)}"


def others(runs: list[Run]) -> str:
  """Returns the last metrics that no other table has, an evaluator a row.

  All of those with neither a top-1 nor shots; what one with a top-1 has beside
  it, its top-5, loss and count; and of few-shot evaluators what was learned
  from all examples, which has no place among numbers of shots.
  """
  usual = ("top1", "top5", "loss", "count")
  rows = []
  for run in runs:
    who = f", {run.label}" if len(runs) > 1 else ""
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
        if value is not None and not (name in with_top1 and what in usual)
      ]
      if texts:
        rows.append([run.scored(name) + who, kinds[name], ", ".join(texts)])
  if not rows:
    return ""
  head = ["", "evaluator", "last scores"]
  return f"<h2>Further scores</h2>\n{table('facts', head, rows)}"


def facts(runs: list[Run]) -> str:
  """Returns facts by run, a column each; facts equal in many runs only once."""
  labels, found = [r.label for r in runs], [facts_lib.facts(r) for r in runs]
  names = dict.fromkeys(k for facts in found for k in facts)
  values = {n: [facts.get(n, "—") for facts in found] for n in names}
  if len(runs) <= MOST_COLUMNS:
    return table("facts", ["", *labels], [[n, *v] for n, v in values.items()])
  same = {n: v[0] for n, v in values.items() if len({*v}) == 1}
  differ = [n for n in values if n not in same]
  parts = []
  if same:
    parts.append(
      table("facts", ["", "all runs"], list(map(list, same.items())))
    )
  if differ:
    parts.append(beside("", labels, {n: values[n] for n in differ}))
  return "<br>".join(parts)


def fewshot_sets(run: Run, name: str) -> str:
  """Returns the accuracies that a mean is of, a row each; "" for no mean."""
  members = run.groups.get(name, ())
  found = {n: next(iter(run.fewshot(n).values()), {}) for n in members}
  if not found:
    return ""
  shots = sorted({k for v in found.values() for k in v}, key=int)
  rows = [
    [run.scored(n), *(share(v.get(k)) for k in shots)] for n, v in found.items()
  ]
  return table("numbers", ["data set", *shots], rows)


def fewshot_text(run: Run, name: str, weights: list[str]) -> str:
  """Returns what the numbers of a few-shot evaluator mean."""
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
