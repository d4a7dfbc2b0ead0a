"""The run that a workdir has, and how the command that resumes it differs."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax import class_names
from vit_jax.batch import DataInfo
from vit_jax.checkpointing import resume_rules
from vit_jax.config import Config, json_file
from vit_jax.distributed import agreement
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
    return OldConfig(
      saved, f"{error}; the config in the checkpoint is used instead"
    )

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
      errors.append(
        f"config.total_steps: got {run_shape.total_steps}, expected at least"
        f" the {self.start} steps that {self.workdir} has done."
      )
    return errors

  def _data_errors(
    self, data: DataInfo, classes: Sequence[str] | None
  ) -> list[str]:
    """Returns how the data differ although their name is the same."""
    errors = []
    began = f"but the run in {self.workdir} began with"
    old_classes = tuple(self.metadata.get("class_names") or ())
    if old_classes and classes and old_classes != classes:
      errors.append(
        f"config.data.dataset: got the {len(classes)} classes"
        f" {class_names.shortened(classes)}, {began} the {len(old_classes)}"
        f" classes {class_names.shortened(old_classes)}."
      )
    number, identity = data.num_examples, agreement.identity(data)
    old_number = self.metadata.get("num_examples", number)
    old_identity = self.metadata.get("data_identity")
    advice = f"{resume_rules.FLAG}=data.dataset continues with the new data."
    if old_number != number:
      errors.append(
        f"config.data.dataset: got {number:,} images, {began} {old_number:,}."
        f" {advice}"
      )
    elif identity and old_identity and old_identity != identity:
      errors.append(
        f"config.data.dataset: got {number:,} images of other names, labels or"
        f" order ({identity}), {began} as many others ({old_identity})."
        f" {advice}"
      )
    return errors

  def notes(self) -> list[str]:
    """Returns a line for each change, and for ignored options."""
    lines = [f"changed     {c.text} ({c.rule.why})" for c in self.changes]
    if unknown := resume_rules.unknown_options(self.old_config.values):
      lines.append(
        f"config      {', '.join(unknown)}: this version has no such options,"
        " and ignores them"
      )
    error = self.old_config.error
    return lines + ([f"config      {error}"] if error else [])
