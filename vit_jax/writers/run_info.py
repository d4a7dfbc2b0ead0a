"""Versions and commit of a run, and its JSON files."""

import importlib.metadata
import json
import pathlib
import platform
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

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
