"""What a run resumes with, and what of the command that goes on differs."""

import functools
from typing import Any

from etils import epath

from vit_jax import class_names
from vit_jax.checkpointing import resume_rules
from vit_jax.distributed import agreement
from vit_jax.writers import atomic_files


class Resumed:
  """The config and the data with which a run began; of a new run, nothing.

  Args:
    run: A `experiment.Experiment`.
  """

  def __init__(self, run: Any):
    self._run = run

  @functools.cached_property
  def config(self) -> atomic_files.Read:
    """The config of config.json, or, where that is damaged or gone, of the
    checkpoint, and a text that says so; {} for a new run."""
    if not self._run.start:
      return atomic_files.Read({}, [])
    path = epath.Path(self._run.workdir) / resume_rules.CONFIG
    found = atomic_files.read_json(path)
    kept = self._run.resumed_metadata.get("config")
    if found.values or not isinstance(kept, dict):
      return found
    said = found.errors or [f"{path}: missing"]
    text = f"{said[0]}; the config in the checkpoint is taken for it"
    return atomic_files.Read(kept, [text])

  @functools.cached_property
  def changes(self) -> list[resume_rules.Change]:
    """The options that differ."""
    old = self.config.values
    return resume_rules.differences(old, self._run.config) if old else []

  @functools.cached_property
  def trail(self) -> list[dict[str, Any]]:
    """All changes that the run took, see `changes.trail`."""
    run = self._run
    if not run.start:
      return []
    return resume_rules.trail(run.workdir, run.start, self.changes)

  def errors(self) -> list[str]:
    """Returns what must not change, or a step that is past."""
    run, old = self._run, self.config.values
    found = resume_rules.flag_errors(run.allow_change, run.config, old)
    if not run.start:
      return found + run.newest[1]
    found += resume_rules.errors(self.changes, run.allow_change, run.workdir)
    if not resume_rules.is_allowed("data.dataset", run.allow_change):
      found += self._data_errors()
    if run.start > run.run_shape.total_steps:
      found.append(
        f"config.total_steps: got {run.run_shape.total_steps}, expected at"
        f" least the {run.start} steps that {run.workdir} has done; or take"
        " another --workdir."
      )
    return found

  def _data_errors(self) -> list[str]:
    """Returns how the data differ under the name that they had."""
    run, found = self._run, []
    begun = f"but the run in {run.workdir} began with"
    names = run.head.class_names
    was = tuple(run.resumed_metadata.get("class_names") or ())
    if was and names and was != names:
      found.append(
        f"config.data.dataset: got the {len(names)} classes"
        f" {class_names.shortened(names)}, {begun} the {len(was)} classes"
        f" {class_names.shortened(was)}; take another --workdir."
      )
    num, records = run.data_info.num_examples, agreement.identity(run.data_info)
    kept = run.resumed_metadata
    goes_on = (
      f"{resume_rules.FLAG}=data.dataset goes on with these; or take another"
      " --workdir."
    )
    if (was := kept.get("num_examples", num)) != num:
      found.append(
        f"config.data.dataset: got {num:,} images, {begun} {was:,}, so that"
        f" epochs have another length and order. {goes_on}"
      )
    elif records and (was := kept.get("data_identity")) and was != records:
      found.append(
        f"config.data.dataset: got {num:,} images of other names, labels or"
        f" order ({records}), {begun} as many others ({was}). {goes_on}"
      )
    return found

  def take(self) -> str | None:
    """Writes the changes into the run; returns lines on them, None for none.

    Raises:
      WriteError: They cannot be written.
    """
    resume_rules.write(self._run.workdir, self.trail)
    lines = [f"changed     {c.text} ({c.kind.why})" for c in self.changes]
    if unknown := resume_rules.unknown_options(self.config.values):
      lines.append(
        f"config      {', '.join(unknown)}: this version has no such options;"
        " those that the run began with are ignored"
      )
    lines += [f"config      {error}" for error in self.config.errors]
    return "\n".join(lines) or None
