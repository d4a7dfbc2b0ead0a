"""The run that a workdir has, and how the command that resumes it differs."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.batch import DataInfo
from vit_jax.checkpointing import resume_rules
from vit_jax.config import Config, json_file
from vit_jax.distributed import agreement
from vit_jax.options import shown, unexpected
from vit_jax.paths import run_path
from vit_jax.step import RunShape


class OldConfig(NamedTuple):
  """The config with which a run began, as JSON.

  values: Its options; {} if unknown.
  error: Why config.json was not used, or None.
  """

  values: dict[str, Any]
  error: str | None = None


@dataclasses.dataclass(frozen=True)
class Resumed:
  """A run that is resumed.

  Attributes:
    workdir: Its folder.
    config: The config of the command that resumes it.
    allow_change: Options and sections that may differ.
    start: Step of the checkpoint.
    metadata: Metadata of the checkpoint.
  """

  workdir: str
  config: Config
  allow_change: Sequence[str]
  start: int
  metadata: Mapping[str, Any]

  @functools.cached_property
  def old_config(self) -> OldConfig:
    """The config in config.json.

    If that file is damaged or missing, it is the config in the checkpoint.
    """
    path = run_path(self.workdir) / resume_rules.CONFIG
    error = f"{path}: missing"
    try:
      if values := json_file.read(path):
        return OldConfig(values)
    except ValueError as e:
      error = str(e)
    saved = self.metadata.get("config")
    if not isinstance(saved, dict):
      return OldConfig({}, error)
    return OldConfig(saved, f"{error}; the checkpoint's config is used")

  @functools.cached_property
  def changes(self) -> list[resume_rules.Change]:
    """The options that differ."""
    old = self.old_config.values
    return resume_rules.differences(old, self.config) if old else []

  def errors(
    self,
    run_shape: RunShape,
    data: DataInfo,
    classes: Sequence[str] | None,
  ) -> list[str]:
    """Returns an error for everything that must not differ.

    Args:
      run_shape: Sizes of the present run.
      data: Its training data, or their source.
      classes: Its class names; None if unknown.
    """
    errors = resume_rules.errors(self.changes, self.allow_change, self.workdir)
    if not resume_rules.is_allowed("data.dataset", self.allow_change):
      errors += self._data_errors(data, classes)
    if self.start > run_shape.total_steps:
      done = f"at least the {self.start} that are done"
      errors.append(
        unexpected("config.total_steps", run_shape.total_steps, done)
      )
    return errors

  def _data_errors(
    self, data: DataInfo, classes: Sequence[str] | None
  ) -> list[str]:
    """Returns how the data differ although their name is the same."""
    old, identity = self.metadata, agreement.identity(data)
    advice = f"{resume_rules.FLAG}=data.dataset continues with the new data."
    return [
      unexpected(
        "config.data.dataset",
        f"{what} {shown(now)}",
        f"{shown(was)}, with which the run in {self.workdir} began",
        advice,
      )
      for what, was, now in (
        ("classes", tuple(old.get("class_names") or ()), classes),
        ("number of images", old.get("num_examples"), data.num_examples),
        ("names, labels, order of images", old.get("data_identity"), identity),
      )
      if was and now and was != now
    ]

  def notes(self) -> list[str]:
    """Returns a line for each change, and for ignored options."""
    lines = [f"changed     {c.text} ({c.rule.why})" for c in self.changes]
    if unknown := resume_rules.unknown_options(self.old_config.values):
      lines.append(f"config      {', '.join(unknown)}: unknown, ignored")
    error = self.old_config.error
    return lines + ([f"config      {error}"] if error else [])
