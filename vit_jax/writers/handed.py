"""Which lines of metrics.jsonl a tracker was handed, in trackers/NAME.json.

Lines are counted in the order of the file. Steps are not in order: scores are
written when they are known, behind lines of later steps.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.writers import atomic_files

BESIDE = {"step", "time"}  # of a line; all else are metrics


class Handed:
  """The lines that a tracker was handed.

  Args:
    id: The tracker's id of its run; None: a new one.
    lines: Number of lines that it was handed.
    lacks: The numbers of those that it refused, from 0.
    ahead: (step, metric) that it has of lines that were cut off, and are to be
      written again.
  """

  def __init__(
    self,
    id: str | None = None,
    lines: int = 0,
    lacks: Iterable[int] = (),
    ahead: Iterable[tuple[int, str]] = (),
  ):
    self.id, self.lines, self.lacks = id, lines, set(lacks)
    self.ahead = set(ahead)

  def has(self, number: int) -> bool:
    """Whether the line arrived."""
    return number < self.lines and number not in self.lacks

  def left(self, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of a line that the tracker does not have."""
    at = row["step"]
    return {
      k: v
      for k, v in row.items()
      if k not in BESIDE and (at, k) not in self.ahead
    }

  def note(self, number: int, row: Mapping[str, Any], arrived: bool) -> None:
    """Notes a line as handed over."""
    self.lines = max(self.lines, number + 1)
    (self.lacks.discard if arrived else self.lacks.add)(number)
    if arrived:
      self.ahead -= {(row["step"], key) for key in row}

  def cut(
    self, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]]
  ) -> "Handed":
    """Returns it for a file of which only some lines stay, in this order.

    Args:
      numbers: Of those that stay.
      rows: All lines.
    """
    lines = sum(n < self.lines for n in numbers)
    lacks = [new for new, old in enumerate(numbers) if old in self.lacks]
    gone = {*range(len(rows))} - {*numbers}
    ahead = {
      (rows[n]["step"], key)
      for n in gone
      if self.has(n)
      for key in rows[n].keys() - BESIDE
    }
    return Handed(self.id, lines, lacks, self.ahead | ahead)


def read(path: epath.Path, rows: Sequence[Mapping[str, Any]]) -> Handed:
  """Returns what a file holds; where there is none, that of a new run.

  Args:
    path: The file.
    rows: All lines, which a file without a number, of an earlier version, says
      were handed over.

  Raises:
    OSError, ValueError, KeyError, TypeError: It cannot be read.
  """
  if not path.exists():
    return Handed()
  found = json.loads(path.read_text())
  name = found["id"]
  lines, lacks = found.get("lines", len(rows)), found.get("lacks", ())
  steps = dict(found.get("ahead", {}))
  ahead = {(step, key) for key, some in steps.items() for step in some}
  numbers = (lines, *lacks, *(step for step, _ in ahead))
  if {type(name), *map(type, numbers)} != {str, int}:
    raise TypeError("expected a text, and numbers of lines and steps")
  return Handed(name, lines, lacks, ahead)


def write(path: epath.Path, handed: Handed) -> None:
  """Writes the file; removes it as long as the tracker has no run.

  Raises:
    OSError: It cannot be written.
  """
  if handed.id is None:
    if path.exists():
      path.unlink()
    return
  ahead: dict[str, list[int]] = {}
  for step, key in sorted(handed.ahead):
    ahead.setdefault(key, []).append(step)
  values = {
    "id": handed.id,
    "lines": handed.lines,
    "lacks": sorted(handed.lacks),
    "ahead": ahead,
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  atomic_files.replace_text(path, json.dumps(values) + "\n")
