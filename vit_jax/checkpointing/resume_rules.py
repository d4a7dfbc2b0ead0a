"""Which options may change in a run that resumes, and which have changed.

`RULES` says for every option whether a change makes another run. Such a change
is an error unless `--allow_change` names it; any other change is accepted.
Accepted changes are written to `changes.jsonl` and to the checkpoints.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vit_jax.config import Config, build, flat, options_of, to_dict
from vit_jax.options import nearest, unexpected
from vit_jax.paths import run_path, with_absolute_folder
from vit_jax.writers import atomic_files

FILE = "changes.jsonl"
FLAG = "--allow_change"
CONFIG = "config.json"


class Rule(NamedTuple):
  """Whether a change of an option makes another run, and the reason."""

  makes_another_run: bool
  why: str


# By option or section; the longest that matches counts.
RULES = {
  "seed": Rule(True, "other batches and draws from here on"),
  "total_steps": Rule(True, "the learning rate follows the length of the run"),
  "total_epochs": Rule(True, "the learning rate follows the length of the run"),
  "num_classes": Rule(True, "another head"),
  "init": Rule(True, "used only before the first step"),
  "init_head": Rule(True, "used before the first step and after the last"),
  "init_mean": Rule(True, "used only before the first step"),
  "fake_data": Rule(True, "other images"),
  "model": Rule(True, "another function of the same parameters, or others"),
  "model.head_bias": Rule(True, "used only before the first step"),
  "model.scan": Rule(False, "the same sums, compiled in another form"),
  "model.remat": Rule(False, "the same sums, computed again"),
  "objective": Rule(True, "another loss"),
  "data": Rule(True, "other batches from here on"),
  "data.data_dir": Rule(False, "the same records in another place"),
  "optim": Rule(True, "other updates"),
  "lora": Rule(True, "other adapters"),
  "optim.microbatch": Rule(False, "the same sum of gradients, in other parts"),
  "mesh": Rule(False, "the same sums on other devices"),
  "log_steps": Rule(False, "what is logged"),
  "trackers": Rule(False, "what is logged"),
  "callbacks": Rule(False, "what happens around the steps"),
  "fewshot": Rule(False, "what is scored, not what is trained"),
  "evals": Rule(False, "what is scored, not what is trained"),
  "checkpoint": Rule(False, "what is stored"),
  "watchdog_seconds": Rule(False, "when a run that hangs is ended"),
  "heartbeat_timeout_seconds": Rule(False, "when a run that hangs is ended"),
  "on_nonfinite": Rule(False, "what happens at a step that is not finite"),
}
# Schedules whose rate at a step does not depend on the length of the run.
WITHOUT_LENGTH = ("constant", "rsqrt")
LENGTH = ("total_steps", "total_epochs")


class Change(NamedTuple):
  """An option that differs.

  key: Its path without "config.".
  was, now: Its values as JSON; None if the option does not exist.
  rule: Whether it may differ.
  """

  key: str
  was: Any
  now: Any
  rule: Rule

  @property
  def text(self) -> str:
    return f"config.{self.key} was {self.was!r}, is now {self.now!r}"


def rule_of(key: str) -> Rule:
  """Returns the rule of an option; an unknown option makes another run.

  Example:
    >>> [rule_of(k).makes_another_run for k in ("data.ops", "data.data_dir")]
    [True, False]
  """
  parts = key.split(".")
  for size in range(len(parts), 0, -1):
    if rule := RULES.get(".".join(parts[:size])):
      return rule
  return Rule(True, "an option that this version does not know")


def differences(old: dict[str, Any], config: Config) -> list[Change]:
  """Returns the options in which a config differs from an older one.

  Args:
    old: Config with which the run began, from `to_dict` of any version.
    config: The present config.
  """
  was, now = options_of(old), flat(to_dict(config))
  changes = []
  for key in sorted((was.keys() | now.keys()) - set(unknown_options(old))):
    if with_absolute_folder(was.get(key)) == with_absolute_folder(now.get(key)):
      continue
    rule = rule_of(key)
    schedules = {was.get("optim.schedule"), now.get("optim.schedule")}
    if key.startswith("objective.") and is_model_of(config, now.get(key)):
      rule = Rule(False, "the digest of the file is checked")
    decays = {was.get("optim.weight_decay_end"), now["optim.weight_decay_end"]}
    has_length = config.objective.follows_length or decays != {None}
    if key in LENGTH and schedules <= {*WITHOUT_LENGTH} and not has_length:
      rule = Rule(False, "this schedule does not depend on the length")
    changes.append(Change(key, was.get(key), now.get(key), rule))
  return changes


def is_model_of(config: Config, value: Any) -> bool:
  """Whether a value is the address of a further model of the objective."""
  return isinstance(value, str) and value in config.objective.models().values()


def unknown_options(old: dict[str, Any]) -> list[str]:
  """Returns the options of an older config that this version does not have.

  Example:
    >>> unknown_options({"seed": 1, "max_skipped": 10, "checks": {"replay": 0}})
    ['checks.replay', 'max_skipped']
  """
  return sorted(options_of(old).keys() - flat(to_dict(build(old)[0])).keys())


def names_of(flag: str | None) -> tuple[str, ...]:
  """Returns the options and sections that the flag names.

  Example:
    >>> names_of("config.optim.lr, data")
    ('optim.lr', 'data')
  """
  parts = re.split(r"[,\n]", flag or "")  # a line for each time it is given
  names = (part.strip().removeprefix("config.") for part in parts)
  return tuple(name for name in names if name)


def flag_errors(names: Iterable[str], config: Config, old: dict) -> list[str]:
  """Returns an error for each name that is not an option or a section."""
  keys = {*flat(to_dict(config)), *(options_of(old) if old else ())}
  known = set()
  for key in keys:
    parts = key.split(".")
    known |= {".".join(parts[: i + 1]) for i in range(len(parts))}
  expected = "an option or a section of the config"
  return [
    unexpected(FLAG, repr(name), expected, nearest(name, known).strip())
    for name in names
    if name not in known
  ]


def is_allowed(key: str, names: Iterable[str]) -> bool:
  """Whether one of the names is the option, or a section that contains it."""
  return any(f"{key}.".startswith(f"{name}.") for name in names)


def errors(
  changes: Sequence[Change], names: Iterable[str], workdir: str
) -> list[str]:
  """Returns an error for each change that is not allowed.

  The last error says what to do.
  """
  refused = [
    c
    for c in changes
    if c.rule.makes_another_run and not is_allowed(c.key, names)
  ]
  texts = [f"{c.text} ({c.rule.why})" for c in refused]
  if texts:
    keys = ",".join(c.key for c in refused)
    texts[-1] += (
      f"; {FLAG}={keys} continues the run in {workdir} with the changes."
    )
  return texts


def trail(
  workdir: str, step: int, changes: Sequence[Change]
) -> list[dict[str, Any]]:
  """Returns all accepted changes of a run, the oldest first.

  Args:
    workdir: Folder of the run, whose file has the earlier changes.
    step: Step from which it resumes.
    changes: The present changes. A change that was already accepted at this
      step is not repeated.

  Returns:
    For each change its step, time (seconds since the epoch), key, from, to, and
    by: "--allow_change" or "harmless".

  Raises:
    WriteError: The file cannot be read.
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
      "by": FLAG if c.rule.makes_another_run else "harmless",
    }
    for c in changes
    if (step, c.key, json.dumps(c.now)) not in same
  ]


def read(workdir: str) -> list[dict[str, Any]]:
  """Returns the lines of `changes.jsonl`; damaged lines are left out.

  Raises:
    WriteError: It cannot be read, see `atomic_files.contents`.
  """
  rows = []
  for line in atomic_files.contents(run_path(workdir) / FILE).split(b"\n"):
    try:
      row = json.loads(line.decode())
      row["step"], row["from"], row["to"], row["by"] = (
        int(row["step"]),
        row["from"],
        row["to"],
        str(row["by"]),
      )
      rows.append({**row, "key": str(row["key"])})
    except (ValueError, KeyError, TypeError, RecursionError):
      continue
  return rows


def write(workdir: str, rows: Sequence[dict[str, Any]]) -> None:
  """Writes `changes.jsonl`; only in process 0.

  Raises:
    WriteError: It cannot be written.
  """
  import jax  # readers do not need jax

  if rows and jax.process_index() == 0:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    atomic_files.replace(run_path(workdir) / FILE, text)
