"""Receipts of measured numbers: adds one, and compares the documents with them.

Run: python benchmarks/receipts.py NAME RUN --command="python -m vit_jax..."
adds a line to docs/receipts.jsonl for a run: its last scores and its cost, with
config, commit and versions as the run recorded them, and this machine.
python benchmarks/receipts.py: every number of the tables against its receipt.

A table with numbers has, on the line above it or before a blank line, a comment
that says where they are from, one of:

  <!-- receipt: NAME, NAME -->   lines of docs/receipts.jsonl with the numbers
  <!-- receipt: study.jsonl -->  a file of docs/ whose lines are receipts
  <!-- source: TEXT -->          published by others, or read in their code
  <!-- estimate: TEXT -->        of the planner, for example
  <!-- arithmetic: TEXT -->      follows from formulas or sizes
  <!-- tests: TEXT -->           held by tests

The values of a receipt are lists of numbers by the first cell of a row, and the
numbers of that row must be among them in the same order; columns headed
"expected" are predictions, and need none. Above a text or a block instead of a
table, every value of the receipt must be in the text up to the next heading.
The result in a config's docstring, "Result (jax ...", has a receipt with that
config.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "docs" / "receipts.jsonl"
FIELDS = (
  "name",
  "command",
  "config",
  "commit",
  "versions",
  "machine",
  "values",
)
OF_A_LINE = ("commit", "versions", "machine")  # of files that are receipts
MARK = re.compile(
  r"<!-- (?P<kind>receipt|source|estimate|arithmetic|tests): (?P<text>.+?) -->",
  re.DOTALL,
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
NUMERIC = re.compile(r"[`*~<>=+-]*\d")  # how a cell with a number begins
RESULT = re.compile(r"Result \(jax(?:(?!\n\n|\(Paper).)*", re.DOTALL)


def read(path: pathlib.Path = FILE) -> dict[str, dict[str, Any]]:
  """Returns the receipts by name.

  Raises:
    ValueError: A line lacks a field, or two have one name.
  """
  found: dict[str, dict[str, Any]] = {}
  for number, text in enumerate(path.read_text().splitlines(), 1):
    line = json.loads(text)
    if lacking := [f for f in FIELDS if f not in line]:
      raise ValueError(f"{path.name}:{number}: has no {', '.join(lacking)}.")
    if line["name"] in found:
      raise ValueError(f"{path.name}:{number}: a second {line['name']!r}.")
    found[line["name"]] = line
  return found


def numbers(text: str) -> list[float]:
  """Returns the numbers in a text.

  Example:
    >>> numbers("1,002 and 94.7 % in v5e of 2e-5")
    [1002.0, 94.7, 2e-05]
  """
  return [float(n.replace(",", "")) for n in NUMBER.findall(text)]


def tables(text: str) -> Iterator[tuple[int, list[list[str]]]]:
  """Yields the tables of a Markdown text: place of the first row, and rows."""
  lines, place, rows, start = text.splitlines(keepends=True), 0, [], 0
  for line in [*lines, ""]:
    if line.startswith("|"):
      start = start if rows else place
      cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
      rows.append([cell.strip() for cell in cells])
    elif rows:
      yield start, rows
      rows = []
    place += len(line)


def table_faults(text: str, receipts: dict[str, dict[str, Any]]) -> list[str]:
  """Returns the numbers of a Markdown text's tables that have no receipt."""
  faults, marked = [], {}
  for mark in MARK.finditer(text):
    blank = re.match(r"\s*", text[mark.end() :])
    marked[mark.end() + blank.end()] = mark
  for start, (head, _, *rows) in tables(text):
    rows = [row for row in rows if any(map(NUMERIC.match, row[1:]))]
    mark = marked.pop(start, None)
    if not rows or mark and mark["kind"] != "receipt":
      continue
    where = f"line {text[:start].count(chr(10)) + 1}"
    if mark is None:
      faults.append(
        f"{where}: a table with numbers, and no comment above it that says"
        " where they are from (see benchmarks/receipts.py)."
      )
      continue
    known, more = _values(mark["text"], receipts)
    faults += [f"{where}: {fault}" for fault in more]
    for row in rows if known is not None else ():
      faults += [f"{where}: {f}" for f in _row_faults(head, row, known)]
  for place, mark in marked.items():
    if mark["kind"] != "receipt":
      continue
    where = f"line {text[:place].count(chr(10)) + 1}"
    known, more = _values(mark["text"], receipts)
    faults += [f"{where}: {fault}" for fault in more]
    there = numbers(re.split(r"^#", text[place:], flags=re.MULTILINE)[0])
    absent = [
      f"{name} {v:g}"
      for name, values in (known or {}).items()
      for v in values
      if v not in there
    ]
    if absent:
      faults.append(f"{where}: the text lacks {', '.join(absent)}.")
  return faults


def config_faults(
  name: str, docstring: str, receipts: dict[str, dict[str, Any]]
) -> list[str]:
  """Returns measured numbers of a config's docstring that have no receipt."""
  stated = [v for r in RESULT.findall(docstring) for v in _shares(r)]
  known = [
    v
    for receipt in receipts.values()
    if (receipt["config"] or "").startswith(name)
    for values in receipt["values"].values()
    for v in values
  ]
  absent = [f"{v:g} %" for v in stated if v not in known]
  return [f"{name}: no receipt has {', '.join(absent)}."] if absent else []


def _shares(text: str) -> list[float]:
  """Returns the numbers before a percent sign."""
  return [float(n) for n in re.findall(r"(\d+(?:\.\d+)?) %", text)]


def _values(
  text: str, receipts: dict[str, dict[str, Any]]
) -> tuple[dict[str, list[float]] | None, list[str]]:
  """Returns the values of named receipts, None for a file; and faults."""
  known, faults = {}, []
  for name in re.split(r",\s*", text.strip()):
    if name.endswith(".jsonl"):
      faults += _file_faults(name)
      return None, faults
    if name in receipts:
      known |= receipts[name]["values"]
    else:
      faults.append(f"docs/receipts.jsonl has no {name!r}.")
  return known, faults


def _file_faults(name: str) -> list[str]:
  path = FILE.parent / name
  if not path.exists():
    return [f"docs/ has no {name}."]
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lacking = {f for line in lines for f in OF_A_LINE if not line.get(f)}
  return [f"{name}: lines without {', '.join(lacking)}."] if lacking else []


def _row_faults(
  head: list[str], row: list[str], known: dict[str, list[float]]
) -> Iterator[str]:
  """Yields why the numbers of a row are not those of the receipts."""
  cells = [
    cell
    for title, cell in zip(head[1:], row[1:], strict=True)
    if NUMERIC.match(cell) and title != "expected"
  ]
  printed = [v for cell in cells for v in numbers(cell)]
  if row[0] not in known:
    if printed:
      yield f"no receipt has a row {row[0]!r}."
    return
  rest = iter(known[row[0]])
  if not all(value in rest for value in printed):  # in their order
    yield f"{row[0]!r} has {printed}, its receipt {known[row[0]]}."


def faults() -> list[str]:
  """Returns the faults of README.md, docs/*.md and configs/*.py."""
  receipts, found = read(), []
  for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
    text = path.read_text()
    found += [f"{path.name}, {f}" for f in table_faults(text, receipts)]
  for path in sorted((ROOT / "configs").glob("*.py")):
    docstring = path.read_text().split('"""')[1]
    found += config_faults(f"configs/{path.name}", docstring, receipts)
  return found


def machine() -> str:
  """Returns the processor of this machine, and its number of cores."""
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [l.split(":")[1].strip() for l in lines if l.startswith("model name")]
  name = names[0] if names else platform.processor()
  return f"{name}, {os.cpu_count()} cores"


def of_run(name: str, folder: str, command: str, kind: str) -> dict[str, Any]:
  """Returns the receipt of a run: its last scores, and what it cost.

  Args:
    name: Name of the receipt.
    folder: The workdir of the run.
    command: The command that made it.
    kind: The machine; its devices are added as the run recorded them.

  Raises:
    ValueError: It is no run, or recorded no commit.
  """
  base = pathlib.Path(folder)
  if not (base / "metadata.json").exists():
    raise ValueError(f"got {folder!r}, which has no metadata.json of a run.")
  metadata = json.loads((base / "metadata.json").read_text())
  if not metadata.get("commit"):
    raise ValueError(f"{folder}: recorded no commit; run it from a checkout.")
  last: dict[str, float] = {}
  for text in (base / "metrics.jsonl").read_text().splitlines():
    last |= json.loads(text)
  costs = {f"train/{k}" for k in ("images_seen", "exaflops", "device_hours")}
  values = {
    k: [v]
    for k, v in last.items()
    if k in costs or "/" in k and not k.startswith("train/")
  }
  config = re.search(r"--config=(\S+)", command)
  return {
    "name": name,
    "command": command,
    "config": config[1] if config else None,
    "commit": metadata["commit"],
    "versions": metadata["versions"],
    "machine": f"{kind}; {metadata['devices']}",
    "values": values,
  }


def main(argv: list[str] | None = None) -> None:
  """Adds a receipt, or lists what is wrong."""
  parser = argparse.ArgumentParser("python benchmarks/receipts.py")
  parser.add_argument("name", nargs="?", help="name of the new receipt")
  parser.add_argument("run", nargs="?", help="workdir of the run")
  parser.add_argument("--command", help="the command that made the run")
  parser.add_argument("--machine", default=machine(), help="its machine")
  args = parser.parse_args(argv)
  try:
    if args.name is None:
      sys.exit("\n".join(faults()) or 0)
    if not (args.run and args.command):
      raise ValueError("expected NAME RUN --command='...'.")
    line = of_run(args.name, args.run, args.command, args.machine)
    if line["name"] in read():
      raise ValueError(f"{FILE} has a receipt {line['name']!r} already.")
  except ValueError as e:
    sys.exit(str(e))
  with FILE.open("a") as f:
    f.write(json.dumps(line, ensure_ascii=False) + "\n")
  print(f"added {line['name']!r} to {FILE}")


if __name__ == "__main__":
  main()
