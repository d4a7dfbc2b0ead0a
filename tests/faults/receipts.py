"""Receipts of the trials: lines of docs/reliability.jsonl, and their table.

The table is in benchmarks/notes/reliability_trials.md.
"""

import datetime
import hashlib
import importlib
import importlib.metadata
import json
import pathlib
import platform
import subprocess
from typing import Any

import tables
from machine import machine

import faults
from faults.trial import TRIALS, Trial

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = ROOT / "docs" / "reliability.jsonl"
PAGE = ROOT / "benchmarks" / "notes" / "reliability_trials.md"
PACKAGES = ("jax", "orbax-checkpoint", "tensorflow-cpu", "numpy")
FOLDERS = ("vit_jax", "configs", "tests/faults")  # of the code that runs


def all_trials() -> dict[str, Trial]:
  """Returns the trials by name, in the order of the page."""
  for name in faults.MODULES:
    importlib.import_module(f"faults.{name}")
  return TRIALS


def code() -> str:
  """Returns a digest of all code that the trials run."""
  digest = hashlib.blake2b(digest_size=8)
  for folder in FOLDERS:
    for path in sorted((ROOT / folder).rglob("*.py")):
      digest.update(path.relative_to(ROOT).as_posix().encode())
      digest.update(path.read_bytes())
  return digest.hexdigest()


def versions() -> dict[str, str]:
  installed = {"python": platform.python_version()}
  for package in PACKAGES:
    try:
      installed[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return installed


def read() -> list[dict[str, Any]]:
  """Returns the lines, oldest first; one that was cut off is left out."""
  lines = []
  for text in LINES.read_text().splitlines() if LINES.exists() else []:
    try:
      lines.append(json.loads(text))
    except json.JSONDecodeError:
      continue
  return lines


def is_done(name: str) -> bool:
  """Returns whether a line has a trial of this code and these versions."""
  want = {"name": name, "code": code(), "versions": versions()}
  return any(want.items() <= line.items() for line in read())


def commit() -> str:
  git = ["git", "-C", str(ROOT)]
  head = subprocess.run(
    [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
  )
  changed = subprocess.run(
    [*git, "status", "--porcelain", "--", *FOLDERS],
    capture_output=True,
    text=True,
  )
  return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def append(name: str, figure: str, seconds: float, seed: int) -> None:
  """Appends the line of a trial that passed."""
  line = {
    "name": name,
    "figure": figure,
    "seconds": round(seconds, 1),
    "seed": seed,
    "date": datetime.date.today().isoformat(),
    "commit": commit(),
    "versions": versions(),
    "machine": machine(),
    "code": code(),
  }
  with LINES.open("a") as file:
    file.write(json.dumps(line) + "\n")


def write_page() -> None:
  """Writes the table: the newest line of every trial."""
  newest = {line["name"]: line for line in read()}
  rows = [
    "| guarantee | figure | trial | seconds | versions |",
    "|" + "---|" * 5,
  ]
  by_guarantee: dict[str, list[str]] = {}
  for name, trial in all_trials().items():
    by_guarantee.setdefault(trial.guarantee, []).append(name)
  for guarantee, parts in by_guarantee.items():
    lines = [newest[name] for name in parts if name in newest]
    first, *others = parts
    name = first.rpartition(".")[0] if others else first
    figures = [line["figure"] for line in lines]
    figures += ["not yet run"] * (len(lines) < len(parts))
    cells = "", ""
    if lines:
      known, seconds = lines[-1]["versions"], sum(l["seconds"] for l in lines)
      commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
      cells = (
        f"{seconds:.0f}",
        f"Python {known['python']}, jax {known['jax']}, Orbax"
        f" {known['orbax-checkpoint']}; {commits}; {lines[-1]['date']}",
      )
    row = guarantee, "<br>".join(figures), f"`{name}`", *cells
    rows.append("| " + " | ".join(row) + " |")
  text = "\n".join(["<!-- receipt: reliability.jsonl -->", *rows])
  page = tables.with_tables(PAGE.read_text(), {"trials": lambda: text})
  PAGE.write_text(page)
