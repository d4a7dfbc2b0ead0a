"""How a config differs from the one that a run resumes with, and what may.

`CLASSES` says of every option whether a change of it makes another run. Such a
change is refused unless `--allow_change` names it; any other one is taken. What
was taken stays in the run, in `changes.jsonl` and in its checkpoints.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax.config import Config, build, flat, options_of, to_dict
from vit_jax.options import nearest
from vit_jax.writers import atomic_files

FILE = "changes.jsonl"
FLAG = "--allow_change"
CONFIG = "config.json"


class Kind(NamedTuple):
  """Whether a change of an option makes another run, and why, or why not."""

  is_meaning: bool
  why: str


# The longest beginning of an option's path counts.
CLASSES = {
  "seed": Kind(True, "other batches and draws from here on"),
  "total_steps": Kind(True, "the learning rate follows the length of the run"),
  "total_epochs": Kind(True, "the learning rate follows the length of the run"),
  "num_classes": Kind(True, "another head"),
  "init": Kind(True, "read at the start alone, which is past"),
  "fake_data": Kind(True, "other images"),
  "model": Kind(True, "another function of the same parameters, or others"),
  "model.head_bias": Kind(True, "read at the start alone, which is past"),
  "model.scan": Kind(False, "the same sums, compiled in another form"),
  "model.remat": Kind(False, "the same sums, computed again"),
  "objective": Kind(True, "another loss"),
  "data": Kind(True, "other batches from here on"),
  "data.data_dir": Kind(False, "the same records in another place"),
  "optim": Kind(True, "other updates"),
  "optim.microbatch": Kind(False, "the same sum of gradients, in other parts"),
  "mesh": Kind(False, "the same sums on other devices"),
  "log_steps": Kind(False, "what is told"),
  "trackers": Kind(False, "what is told"),
  "fewshot": Kind(False, "what is scored, not what is trained"),
  "evals": Kind(False, "what is scored, not what is trained"),
  "checkpoint": Kind(False, "what is kept"),
  "watchdog_seconds": Kind(False, "when a run that hangs is ended"),
  "heartbeat_timeout_seconds": Kind(False, "when a run that hangs is ended"),
  "on_nonfinite": Kind(False, "what becomes of steps that cannot be taken"),
}
# Schedules whose rate at a step does not depend on the length of the run.
LENGTHLESS = ("constant", "rsqrt")
LENGTH = ("total_steps", "total_epochs")


class Change(NamedTuple):
  """An option that differs.

  key: Its path without "config.".
  was, now: Its values, as JSON has them; None where there is no such option.
  kind: Whether it may differ.
  """

  key: str
  was: Any
  now: Any
  kind: Kind

  @property
  def text(self) -> str:
    return f"config.{self.key} was {self.was!r}, is now {self.now!r}"


def kind_of(key: str) -> Kind:
  """Returns the class of an option; of an unknown one that it may not change.

  Example:
    >>> kind_of("data.ops").is_meaning, kind_of("data.data_dir").is_meaning
    (True, False)
  """
  parts = key.split(".")
  for size in range(len(parts), 0, -1):
    if found := CLASSES.get(".".join(parts[:size])):
      return found
  return Kind(True, "an option that this version does not know")


def differences(old: dict[str, Any], config: Config) -> list[Change]:
  """Returns in which options a config differs from an older one.

  Args:
    old: That which a run resumes with, as `to_dict` made it, of any version.
    config: That of now.
  """
  was, now = options_of(old), flat(to_dict(config))
  found = []
  for key in sorted((was.keys() | now.keys()) - set(unknown_options(old))):
    if was.get(key) == now.get(key):
      continue
    kind = kind_of(key)
    schedules = {was.get("optim.schedule"), now.get("optim.schedule")}
    if key in LENGTH and schedules <= {*LENGTHLESS}:
      kind = Kind(False, "this schedule does not depend on the length")
    found.append(Change(key, was.get(key), now.get(key), kind))
  return found


def unknown_options(old: dict[str, Any]) -> list[str]:
  """Returns the options of an older config that this version does not have.

  Example:
    >>> unknown_options({"seed": 1, "max_skipped": 10, "checks": {"replay": 0}})
    ['checks.replay', 'max_skipped']
  """
  return sorted(options_of(old).keys() - flat(to_dict(build(old)[0])).keys())


def names_of(flag: str | None) -> tuple[str, ...]:
  """Returns the options and sections that the flag's values name.

  Example:
    >>> names_of("config.optim.lr, data")
    ('optim.lr', 'data')
  """
  parts = re.split(r"[,\n]", flag or "")  # a line for each time it is given
  words = (part.strip().removeprefix("config.") for part in parts)
  return tuple(w for w in words if w)


def flag_errors(names: Iterable[str], config: Config, old: dict) -> list[str]:
  """Returns a fault for each name that is no option and no section."""
  keys = {*flat(to_dict(config)), *(options_of(old) if old else ())}
  known = set()
  for key in keys:
    parts = key.split(".")
    known |= {".".join(parts[: i + 1]) for i in range(len(parts))}
  return [
    f"{FLAG}: got {name!r}, expected an option or a section of the config, such"
    f" as optim.lr or data, comma-separated.{nearest(name, known)}"
    for name in names
    if name not in known
  ]


def is_allowed(key: str, names: Iterable[str]) -> bool:
  """Whether one of the names is the option, or a section that it is in."""
  return any(f"{key}.".startswith(f"{name}.") for name in names)


def errors(
  found: Sequence[Change], names: Iterable[str], workdir: str
) -> list[str]:
  """Returns a fault for each refused change; the last says what to do."""
  refused = [
    c for c in found if c.kind.is_meaning and not is_allowed(c.key, names)
  ]
  texts = [f"{c.text} ({c.kind.why})" for c in refused]
  if texts:
    values = "value" if len(texts) == 1 else "values"
    texts[-1] += (
      f": the run in {workdir} resumes as it began."
      f" {FLAG}={','.join(c.key for c in refused)} takes the new {values} from"
      " here on; or use another --workdir."
    )
  return texts


def trail(
  workdir: str, step: int, found: Sequence[Change]
) -> list[dict[str, Any]]:
  """Returns all changes that a run took, those of now included, oldest first.

  Args:
    workdir: Folder of the run.
    step: From which it resumes.
    found: The changes of now; one that was taken there before is one.

  Returns:
    For each its step, time (seconds since the epoch), key, from, to, and by:
    "--allow_change" or "harmless".

  Raises:
    WriteError: Those of before cannot be read.
  """
  before = read(workdir)
  same = {(x["step"], x["key"], json.dumps(x["to"])) for x in before}
  return before + [
    {
      "step": step,
      "time": round(time.time(), 3),
      "key": c.key,
      "from": c.was,
      "to": c.now,
      "by": FLAG if c.kind.is_meaning else "harmless",
    }
    for c in found
    if (step, c.key, json.dumps(c.now)) not in same
  ]


def read(workdir: str) -> list[dict[str, Any]]:
  """Returns the lines of `changes.jsonl`; odd ones are left out.

  Raises:
    WriteError: It cannot be read, see `files.contents`.
  """
  found = []
  for line in atomic_files.contents(epath.Path(workdir) / FILE).split(b"\n"):
    try:
      row = json.loads(line.decode())
      row["step"], row["from"], row["to"], row["by"] = (
        int(row["step"]),
        row["from"],
        row["to"],
        str(row["by"]),
      )
      found.append({**row, "key": str(row["key"])})
    except (ValueError, KeyError, TypeError, RecursionError):
      continue
  return found


def write(workdir: str, rows: Sequence[dict[str, Any]]) -> None:
  """Writes the trail; only process 0 does.

  Raises:
    WriteError: It cannot be written.
  """
  import jax  # readers need it not

  if rows and jax.process_index() == 0:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    atomic_files.replace(epath.Path(workdir) / FILE, text)
