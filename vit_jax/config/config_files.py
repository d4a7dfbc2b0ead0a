"""Config files, by path or by name: `configs/mine.py:x=1`, `vit_b16:x=1`."""

import importlib.util
import inspect
import pathlib
import traceback
import types
from typing import TYPE_CHECKING, Any

from vit_jax.config import json_file
from vit_jax.options import (
  NOT_LEAN,
  check_choice,
  nearest,
  shown,
  unexpected,
)

if TYPE_CHECKING:
  from etils import epath

_PACKAGE = pathlib.Path(__file__).parents[1]


def known_folder() -> pathlib.Path:
  """Returns the folder of the project's own config files.

  It is `configs/` in the repository, and in the package in a wheel.
  """
  installed = _PACKAGE / "configs"
  return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def known() -> tuple[str, ...]:
  """Returns the names of the project's own configs, such as "vit_b16"."""
  return tuple(sorted(path.stem for path in known_folder().glob("*.py")))


def split(source: str) -> tuple[str, str]:
  """Splits the value of --config into file or name, and argument.

  Args:
    source: "vit_b16", "vit_b16:imagenet21k" or "configs/a.py:x=gs://b". Folder
      names in the path may contain a colon.

  Returns:
    The file or name, and the argument ("" without a colon).
  """
  head, _, argument = source.partition(":")
  if "/" not in head or ".py" not in source:
    return head, argument
  stem, ending, argument = source.partition(".py:")
  return (stem + ".py", argument) if ending else (source, "")


def find(file: str) -> pathlib.Path:
  """Returns the path of a config file.

  Args:
    file: A path; or a name, with or without .py. A name is searched in the
      current folder, in its `configs/`, then in the project's own configs,
      where `configs/<name>.py` works, too.

  Raises:
    ValueError: There is no such file; the message has the nearest name.
  """
  path = pathlib.Path(file)
  path = path if path.suffix == ".py" else path.parent / f"{path.name}.py"
  candidates = [path]
  if path.parent == pathlib.Path():
    candidates.append("configs" / path)
  if path.parent in (pathlib.Path(), pathlib.Path("configs")):
    candidates.append(known_folder() / path.name)
  for candidate in candidates:
    if candidate.is_file():
      return candidate
  names = [p.name for p in path.parent.glob("*.py")]
  names += known() if len(candidates) > 1 else ()
  name = pathlib.PurePath(file)
  near = nearest(name.name, names) or nearest(f"{name.stem}.py", names)
  expected = f"a Python file, or one of {', '.join(known())}"
  raise ValueError(unexpected("--config", repr(file), expected, near.strip()))


def recipe(source: str) -> Any:
  """Returns the config of one of the project's own files; it may be changed.

  Args:
    source: Name and argument, such as "vit:B/16,imagenet21k".

  Raises:
    ValueError: There is no such file, or it refuses the argument.
  """
  name, argument = split(source)
  name = pathlib.PurePath(name).stem
  check_choice(name, known(), "recipe")
  module = _module(known_folder() / f"{name}.py")
  return module.get_config(argument) if argument else module.get_config()


def _module(path: pathlib.Path) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def call(source: str, name: str = "get_config") -> Any:
  """Calls a function of a config file with the argument after the colon.

  Args:
    source: The file, a colon and the argument; or only the file.
    name: Name of the function. The file must have get_config; others are
      optional.

  Returns:
    The result of the function; None if the function is missing.

  Raises:
    ValueError: There is no such file, or the function fails, or get_config
      returns no config.
  """
  file, argument = split(source)
  path = find(file)
  try:
    module = _module(path)
    if name != "get_config" and name not in vars(module):
      return None
    function = getattr(module, name)
    if argument and not inspect.signature(function).parameters:
      raise ValueError(f"{name} takes no argument.")
    result = function(argument) if argument else function()
    if name != "get_config":
      return result
    if hasattr(result, "to_dict"):  # an ml_collections.ConfigDict
      result = result.to_dict()
    if not isinstance(result, dict):
      raise ValueError(unexpected("get_config", shown(result), "a config"))
    return result
  except ValueError as e:
    raise ValueError(f"--config={source}: {e}") from None
  except Exception as e:  # a user's file may raise anything
    if isinstance(e, ModuleNotFoundError) and e.name in NOT_LEAN:
      raise  # `vit_jax.__main__` says what to install
    frames = traceback.extract_tb(e.__traceback__)
    own = [f for f in frames if pathlib.Path(f.filename).name == path.name]
    line = getattr(e, "lineno", None) or (own or frames)[-1].lineno
    text = f"{type(e).__name__}: {e}".replace("\\n", " ")
    raise ValueError(f"--config={source}, line {line}: {text}") from None


def run_of(checkpoint: str) -> "epath.Path | None":
  """Returns the folder of the run of a checkpoint; None if it has no run.

  Raises:
    ValueError: The config.json of the run is damaged.
  """
  from vit_jax.paths import run_path  # --help does not wait for it

  folder = run_path(checkpoint)
  for parent in (folder, folder.parent, folder.parent.parent):
    file = parent / "config.json"
    # A config.json without an optimizer was written by another program.
    if file.is_file() and "optim" in json_file.read(file):
      return parent
  return None
