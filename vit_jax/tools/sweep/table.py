"""The tables of `vit-jax sweep`, made from the contents of sweep.json."""

from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]  # of one task


def task_text(name: str, result: Result) -> str:
  """Returns points, choice and score of a task, as Markdown.

  Args:
    name: Name of the task; "" for a single task.
    result: Result of `sweep.search`.
  """
  keys = list(result["grid"])
  head = [*keys, "val top-1", "val loss", "steps", ""]
  rows = []
  for point in result["points"]:
    scores, error = point["scores"], point["error"]
    remark = "**chosen**" if point["name"] == result["best"] else ""
    rows.append(
      [
        *(point["values"][k] for k in keys),
        _percent(None if error else scores.get("val/top1")),
        _number(None if error else scores.get("val/loss")),
        str(point["step"]),
        "diverged" if error else remark,
      ]
    )
  lines = [f"### {name}\n"] if name else []
  lines += [table(head, rows), ""]
  lines += [
    f"- {point['name']} diverged: {point['error']}"
    for point in result["points"]
    if point["error"]
  ]
  lines += [f"- {text}" for text in (verdict(result), *_remarks(result))]
  return "\n".join(lines) + "\n"


def verdict(result: Result) -> str:
  """Returns a text with the chosen point and its scores on the test data."""
  last, values = result["final"], _values(result)
  if result["best"] is None:
    is_over = bool(result["points"]) and all(
      p["error"] for p in result["points"]
    )
    return "All points diverged." if is_over else "The search is not finished."
  text = f"Best by `val`: {values}."
  if last is None:
    return f"{text} Its last training is not finished."
  if last["error"]:
    return f"{text} On all training data it diverged: {last['error']}"
  scores = [
    f"{key.removesuffix('/top1')} top-1 {_percent(value)} % of"
    f" {last['scores'].get(key.removesuffix('top1') + 'count', 0):,.0f} images"
    for key, value in last["scores"].items()
    if key.endswith("/top1")
  ] or [f"{k} {v:.4g}" for k, v in last["scores"].items()]
  return (
    f"{text} Trained on all training data, scored once: "
    + "; ".join(scores)
    + "."
  )


def final_top1(result: Result) -> float | None:
  """Returns the first top-1 among the scores of the last run, or None."""
  last = result["final"]
  if last is None or last["error"]:
    return None
  return next(
    (v for k, v in last["scores"].items() if k.endswith("/top1")), None
  )


def means(results: Mapping[str, Any]) -> dict[str, tuple[float, int, int]]:
  """Returns the mean test top-1 of each group, and of all tasks as "all".

  "all" is the mean over the tasks, not over the groups.

  Args:
    results: Contents of sweep.json.

  Returns:
    Group -> (mean of the tasks with a score, number of these tasks, number of
    all tasks in the group). Groups without a score are absent.
  """
  groups = dict.fromkeys(r["group"] for r in _all_tasks(results).values())
  by_group = {}
  for group in [*groups, "all"]:
    of_group = _group_scores(results, group)
    scores = [s for s in of_group.values() if s is not None]
    if scores and group:
      mean = sum(scores) / len(scores)
      by_group[group] = (mean, len(scores), len(of_group))
  return by_group


def _all_tasks(results: Mapping[str, Any]) -> dict[str, Result]:
  """Returns all tasks; left-out tasks have no points."""
  none = {"points": [], "best": None, "final": None, "splits": {}}
  left_out = {
    name: {"group": values["group"], **none}
    for name, values in results["left_out"].items()
  }
  return {**results["tasks"], **left_out}


def _group_scores(
  results: Mapping[str, Any], group: str
) -> dict[str, float | None]:
  """Returns task of a group -> its score, or None."""
  return {
    name: final_top1(result)
    for name, result in _all_tasks(results).items()
    if group in (result["group"], "all")
  }


def overview(results: Mapping[str, Any], against: Mapping | None = None) -> str:
  """Returns a row per task, the means, and remarks about the splits.

  Args:
    results: Contents of sweep.json.
    against: Contents of another search's sweep.json, whose scores get a column;
      None: no such column.
  """
  head = ["task", "group", "chosen", "val", "test", "images"]
  other = against["tasks"] if against else {}
  rows = []
  for name, result in _all_tasks(results).items():
    best = _best(result)
    val = best["scores"].get("val/top1") if best else None
    row = [
      name,
      result["group"],
      _values(result),
      _percent(val),
      _percent(final_top1(result)),
      _count(result),
    ]
    if against:
      row.append(_percent(final_top1(other[name]) if name in other else None))
    rows.append(row)
  theirs = means(against) if against else {}
  for group, (mean, count, total) in means(results).items():
    of = str(total) if count == total else f"{count} of {total}"
    of_group = "" if group == "all" else group
    row = [f"mean of {of}", of_group, "", "", _percent(mean), ""]
    if against:
      ours, of_theirs = (
        {k for k, v in _group_scores(r, group).items() if v is not None}
        for r in (results, against)
      )
      row.append(_percent(theirs[group][0] if ours == of_theirs else None))
    rows.append(row)
  if against:
    head.append("against")
  lines = [table(head, rows), ""]
  for name, result in results["tasks"].items():
    prefix = f"{name}: " if name else ""
    remarks = _remarks(result)
    if name in other:
      remarks += differences(result["splits"], other[name]["splits"])
    lines += [f"- {prefix}{text}" for text in remarks]
  lines += [
    f"- {name} is left out: {values['reason']}"
    for name, values in results["left_out"].items()
  ]
  return "\n".join(lines) + "\n"


def markdown(results: Mapping[str, Any], against: Mapping | None = None) -> str:
  """Returns all tables as one page."""
  parts = [overview(results, against)]
  parts += [task_text(k, v) for k, v in results["tasks"].items()]
  return "\n".join(parts)


def differences(
  ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[str]:
  """Returns a sentence for each split with other records in another search.

  Args:
    ours: Result of `points.records_of`.
    theirs: The same for the other search.
  """
  return [
    f"`{name}` has other records than in the other search."
    for name in dict.fromkeys([*ours, *theirs])
    if _contents(ours.get(name)) != _contents(theirs.get(name))
  ]


def _contents(split: Mapping[str, Any] | None) -> tuple[Any, ...]:
  return tuple((split or {}).get(key) for key in ("records", "identity"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  r"""Returns a Markdown table with aligned columns.

  Example:
    >>> print(table(["a", "b"], [["1", "two|parts"]]))
    | a | b          |
    | - | ---------- |
    | 1 | two\|parts |
  """
  rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
  every = [head, ["-" * max(1, w) for w in widths], *rows]
  return "\n".join(
    "| "
    + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True))
    + " |"
    for row in every
  )


def _remarks(result: Result) -> list[str]:
  is_fake = result.get("fake_data")
  text = "The data are fake (fake_data): the scores mean nothing."
  return [text] if is_fake else []


def _best(result: Result) -> Mapping[str, Any] | None:
  """Returns the best point; None before the choice, or if all diverged."""
  points = (p for p in result["points"] if p["name"] == result["best"])
  return next(points, None)


def _values(result: Result) -> str:
  best = _best(result)
  values = best["values"] if best else {}
  return ", ".join(f"{k}={v}" for k, v in values.items())


def _count(result: Result) -> str:
  scores = result["final"]["scores"] if result["final"] else {}
  counts = (v for k, v in scores.items() if k.endswith("/count"))
  return f"{next(counts, 0):,.0f}" if scores else ""


def _percent(share: float | None) -> str:
  return "" if share is None else f"{100 * share:.2f}"


def _number(value: float | None) -> str:
  return "" if value is None else f"{value:.4f}"
