"""Versions, commit and parameter table of a run, and its JSON files."""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from clu import parameter_overview

from vit_jax.families import ModelConfig
from vit_jax.param_groups import path_of
from vit_jax.paths import run_path
from vit_jax.version import __version__
from vit_jax.writers import atomic_files

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
  """Returns the versions on which a result depends."""
  packages = {p: importlib.metadata.version(p) for p in PACKAGES}
  return {
    "python": platform.python_version(),
    "vit_jax": __version__,
    **packages,
  }


def commit() -> str | None:
  """Returns the commit of a checkout, with "+" if the code was changed.

  None if the package is not in a checkout of its own.
  """
  checkout = pathlib.Path(__file__).parents[2]

  def git(*arguments: str) -> str | None:
    try:
      done = subprocess.run(
        ["git", "-C", str(checkout), *arguments],
        capture_output=True,
        text=True,
      )
    except OSError:  # git is not installed
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


@dataclasses.dataclass
class _Row:
  """A row of the table of parameters; the fields are its columns."""

  name: str
  shape: tuple[int, ...]
  dtype: str
  blocks: int
  size: int  # parameters of all blocks together


@dataclasses.dataclass
class _RowWithRate(_Row):
  """The same, for parameters with different learning rates."""

  rate: str  # by what it is multiplied, and the layer of its decay


def parameter_table(
  params,
  model: ModelConfig,
  rates: Mapping[str, tuple[np.ndarray, np.ndarray] | None] | None = None,
) -> str:
  """Returns clu's table of parameters; equal blocks share a row.

  Args:
    params: Nested dict of arrays or shapes.
    model: The model of the parameters.
    rates: The result of `optim.rates`; parameters that it lacks are frozen.
      None if all are trained at one rate.
  """
  rows: dict[tuple, _Row] = {}
  of_row: dict[tuple, list] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = model.any_block(path_of(path))
    shape, dtype = tuple(leaf.shape), str(leaf.dtype)
    rate = None if rates is None else rates.get(path_of(path))
    key = name, shape, rate is None
    row = rows.setdefault(key, _Row(name, shape, dtype, 0, 0))
    row.blocks += 1
    row.size += int(np.prod(shape))
    of_row.setdefault(key, []).append(rate)
  if rates is not None:
    rows = {
      key: _RowWithRate(**dataclasses.asdict(row), rate=_rate_text(of_row[key]))
      for key, row in rows.items()
    }
  return parameter_overview.make_table(list(rows.values()))


def _rate_text(rates: list[tuple[np.ndarray, np.ndarray] | None]) -> str:
  """Returns "0.3 (layer 0)", "0.4 to 0.7 (layers 1 to 3)" or "frozen"."""
  if None in rates:
    return "frozen"
  layers, factors = map(np.concatenate, zip(*rates, strict=True))
  ends = lambda x: dict.fromkeys(f"{end:.3g}" for end in (x.min(), x.max()))
  plural = "s" * bool(layers.min() != layers.max())
  return (
    f"{' to '.join(ends(factors))} (layer{plural} {' to '.join(ends(layers))})"
  )


def write_json(
  workdir: str,
  name: str,
  values: dict[str, Any],
  note: Callable[[str], None] | None = None,
) -> None:
  """Writes one file of a run; only in process 0.

  Args:
    workdir: Folder of the run.
    name: Name of the file.
    values: Contents, for JSON.
    note: Prints an error as a line; None to raise the error.

  Raises:
    WriteError: It cannot be written; an existing file is unchanged.
  """
  if jax.process_index() != 0:
    return
  text = json.dumps(values, indent=2, ensure_ascii=False)
  try:
    atomic_files.replace(run_path(workdir) / name, text + "\n")
  except atomic_files.WriteError as e:
    if note is None:
      raise
    note(f"file        {e} The run goes on.")
