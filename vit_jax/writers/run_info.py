"""What a run reports of itself, on the screen and in its files."""

import importlib.metadata
import json
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

import vit_jax
from vit_jax import sharding
from vit_jax.callbacks.accounting import KEY
from vit_jax.config import Config, to_dict
from vit_jax.devices import unknown_peak
from vit_jax.distributed import agreement
from vit_jax.evaluators import groups
from vit_jax.models import attention_by_chip
from vit_jax.sharding import path_of
from vit_jax.writers import atomic_files

# What metadata.json has of the newest checkpoint.
FROM_CHECKPOINT = ("step", KEY, "counts")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
  """Returns the versions that a result depends on."""
  found = {p: importlib.metadata.version(p) for p in PACKAGES}
  return {
    "python": platform.python_version(),
    "vit_jax": vit_jax.__version__,
    **found,
  }


def commit() -> str | None:
  """Returns the commit of a checkout, with "+" if its code differs from it.

  None where the package is not in a checkout of its own.
  """
  package = pathlib.Path(vit_jax.__file__).parent

  def git(*words: str) -> str | None:
    try:
      done = subprocess.run(
        ["git", "-C", str(package.parent), *words],
        capture_output=True,
        text=True,
      )
    except OSError:  # there is no git
      return None
    return None if done.returncode else done.stdout.strip()

  if git("ls-files", "vit_jax/__init__.py") != "vit_jax/__init__.py":
    return None
  head = git("rev-parse", "HEAD")
  changed = git("status", "--porcelain", "--", "vit_jax", "configs")
  return head and head + "+" * bool(changed)


def num_params(params) -> int:
  """Returns the number of elements in a tree of arrays or shapes."""
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


def metadata(run, params) -> dict[str, Any]:
  """Returns the JSON that must stay with the weights.

  Args:
    run: A `prepare.Run`.
    params: Arrays or shapes.
  """
  config, size = run.config, run.facts.image_size
  names = run.head.class_names
  return {
    "config": to_dict(config),
    "image_size": list(size),
    "grid": list(config.model.grid(size)),
    "has_cls_row": config.model.has_cls_row,
    "preprocessing": {
      "ops": eval_ops(config),
      "value_range": [-1.0, 1.0],
    },
    "num_classes": run.head.num_classes,
    "class_names": list(names) if names else None,
    "num_params": num_params(params),
    "num_examples": run.data.num_examples,
    "data_identity": agreement.identity(run.data),
    # Then config.data.dataset is not what was trained on.
    "data_given": None if run.given is None else type(run.given).__name__,
    "total_steps": run.facts.total_steps,
    "averages": averaged(run),
    "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "processes": jax.process_count(),
    "mesh": sharding.shape_here(config.mesh),
    "versions": versions(),
    "commit": commit(),
    "changes": run.resumed.trail,
    # Of the checkpoint that a run resumes from, until it has a newer one.
    **{k: v for k, v in run.resumed_metadata.items() if k in FROM_CHECKPOINT},
  }


def averaged(run) -> dict[str, list[str]]:
  """Returns the data sets over which each group's mean is taken."""
  return {
    group: [e.dataset for e in members]
    for group, members in groups(run.evals).items()
  }


def sets_text(run) -> str:
  """Returns lines on the means of groups, and what is left out, or ""."""
  lines = [
    f"{group:<11} mean of {len(names)} data set{'s' * (len(names) > 1)}:"
    f" {', '.join(names)}"
    for group, names in averaged(run).items()
  ]
  if run.left_out:
    names = ", ".join(e.dataset for e in run.left_out)
    keys = {"=".join(e.LEFT_OUT_BY) for e in run.left_out}
    lines.append(
      f"left out    {names}: not on disk (config.{', config.'.join(keys)})"
    )
  if run.start:
    was = run.resumed_metadata.get("averages")
    lines += [
      f"changed     the mean {group!r} was of {', '.join(names)}; earlier and"
      " later means do not compare"
      for group, names in (was or {}).items()
      if names != averaged(run).get(group)
    ]
  return "\n".join(lines)


def eval_ops(config: Config) -> str:
  """Returns the preprocessing of images to be scored, that of training if no
  evaluator says another."""
  of_head = [e.ops for e in config.evals if e.scores_head]
  return [*of_head, *(e.ops for e in config.evals), config.data.ops][0]


def parameter_table(params) -> str:
  """Returns one line per parameter; those of equal blocks share a line.

  Args:
    params: Nested dict of arrays or shapes.
  """
  rows: dict[tuple, int] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = re.sub(r"encoderblock_\d+", "encoderblock_*", path_of(path))
    key = (name, tuple(leaf.shape))
    rows[key] = rows.get(key, 0) + 1
  cells = [("parameter", "shape", "times", "numbers")]
  for (name, shape), times in rows.items():
    sizes = " ".join(map(str, shape)) or "scalar"
    numbers = times * int(np.prod(shape))
    cells.append((name, sizes, str(times), f"{numbers:,}"))
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return "\n".join(
    f"{name:<{widths[0]}}  {shape:<{widths[1]}}"
    f"  {times:>{widths[2]}}  {numbers:>{widths[3]}}"
    for name, shape, times, numbers in cells
  )


def write_json(
  workdir: str,
  name: str,
  values: dict[str, Any],
  note: Callable[[str], None] | None = None,
) -> None:
  """Writes one file of a run; only process 0 does.

  Args:
    workdir: Folder of the run.
    name: Of the file.
    values: For JSON.
    note: Prints a line in place of an error.

  Raises:
    WriteError: It cannot be written; the file of before is as it was.
  """
  if jax.process_index() != 0:
    return
  text = json.dumps(values, indent=2, ensure_ascii=False)
  try:
    atomic_files.replace(epath.Path(workdir) / name, text + "\n")
  except atomic_files.WriteError as e:
    if note is None:
      raise
    note(f"file        {e} The run goes on.")


def text(run, mesh: Mesh, params) -> str:
  """Returns the lines shown before the first step.

  Args:
    run: A `prepare.Run`.
    mesh: Mesh of the run.
    params: Arrays or shapes.
  """
  config, data = run.config, run.data
  total_steps, batch = run.facts.total_steps, config.data.batch_size
  epochs = total_steps * batch / data.num_examples
  axes = " x ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
  lines = [
    parameter_table(params),
    f"devices     {jax.device_count()} x {jax.devices()[0].device_kind},"
    f" {jax.process_count()} process(es); mesh {axes};"
    f" {sharding.describe(config, params, mesh)}",
    f"model       {config.model.variant} ({config.model.name}),"
    f" {num_params(params):,} parameters, {config.model.dtype}",
    f"data        {run.data_name}: {data.num_examples:,} images,"
    f" {data.num_classes:,} classes",
    f"length      {total_steps:,} steps of {batch:,} images,"
    f" {epochs:,.2f} epochs",
    f"files       {run.workdir}: checkpoints/, metrics.jsonl, tensorboard/",
  ]
  platform = mesh.devices.flat[0].platform
  size = run.facts.image_size
  if attention := attention_by_chip.choice(config.model, size, platform):
    lines.insert(3, f"attention   {attention}")
  if config.optim.ema_decay is not None:
    average = _average(config.optim.ema_decay, total_steps)
    lines.insert(-1, f"average     {average}")
  if sets := sets_text(run):
    lines.append(sets)
  if run.data_note:
    lines.append(f"note        {run.data_note}")
  if fault := unknown_peak(mesh.devices.flat[0].device_kind):
    lines.append(f"MFU         not shown: {fault}")
  return "\n".join(lines)


def _average(decay: float, total_steps: int) -> str:
  """Returns how many steps the averaged parameters cover at the end."""
  # `optim.ema_weight` of the last step, without a program for it.
  weight = max(1.0 - decay, 9.0 / (9.0 + total_steps))
  text = f"of the parameters of about the last {1 / weight:,.0f} steps"
  if weight > 1.0 - decay:
    text += (
      f"; config.optim.ema_decay={decay:g} is for runs of"
      f" {(10 * decay - 1) / (1 - decay):,.0f} steps or more, and rises to"
      f" {1 - weight:.4f} in this one"
    )
  return text
