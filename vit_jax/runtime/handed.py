"""Which lines of metrics.jsonl a tracker was handed, in trackers/NAME.json.

Lines are counted in the order of the file. Steps are not in order: scores are
written when they are known, behind lines of later steps.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.runtime import files


class Handed:
  """The lines that a tracker was handed.

  Args:
    id: The tracker's id of its run; None: a new one.
    lines: Number of lines that it was handed.
    lacks: The numbers of those that it refused, from 0.
  """

  def __init__(
    self, id: str | None = None, lines: int = 0, lacks: Iterable[int] = ()
  ):
    self.id, self.lines, self.lacks = id, lines, set(lacks)

  def has(self, number: int) -> bool:
    """Whether the line arrived."""
    return number < self.lines and number not in self.lacks

  def note(self, number: int, arrived: bool) -> None:
    """Notes a line as handed over."""
    self.lines = max(self.lines, number + 1)
    (self.lacks.discard if arrived else self.lacks.add)(number)

  def of(self, numbers: Sequence[int]) -> "Handed":
    """Returns it for a file that has these lines alone, in this order."""
    lines = sum(n < self.lines for n in numbers)
    lacks = [new for new, old in enumerate(numbers) if old in self.lacks]
    return Handed(self.id, lines, lacks)


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
  if {type(name), type(lines), *map(type, lacks)} != {str, int}:
    raise TypeError("expected a text, and numbers of lines")
  return Handed(name, lines, lacks)


def write(path: epath.Path, handed: Handed) -> None:
  """Writes the file.

  Raises:
    OSError: It cannot be written.
  """
  values = {
    "id": handed.id,
    "lines": handed.lines,
    "lacks": sorted(handed.lacks),
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  files.replace_text(path, json.dumps(values) + "\n")
