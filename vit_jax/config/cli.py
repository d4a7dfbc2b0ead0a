"""The command line: flags, the config file, its overrides.

Only light modules are imported, so that `--help` answers at once.
"""

import contextlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax import config as config_lib
from vit_jax.config import files, help_text, json_file
from vit_jax.config.commands import NOT_LEAN
from vit_jax.options import at_home, nearest

# Flags of the commands that run in several processes, see
# distributed/processes.py.
PROCESS_FLAGS = {
  "coordinator": "host:port of process 0, where processes meet (any free port)",
  "num_processes": "how many processes there are",
  "process_id": "which one this is, from 0",
}


# Those of a training run.
TRAIN_FLAGS = {
  "workdir": "folder of the run (default: runs/<config name>)",
  "profile": "step after which a trace of five steps is written for"
  " TensorBoard's profiler (default: none)",
  "allow_change": "options and sections, comma-separated, that may differ from"
  " those with which the run began, such as optim.lr,data",
  **PROCESS_FLAGS,
}
BATCH_OF_FILES = 64  # images, of the features of a published file
NO_CHECKPOINT = (
  "--checkpoint: got none, expected the folder of a run, as in"
  " --checkpoint=runs/<config name>, or published weights beside"
  " --config=finetune:model=B/16."
)


class Args(NamedTuple):
  """A parsed command line.

  config: Faulty options have their defaults; see `faults`.
  config_name: File name of the config without its ending, e.g. "vit_l16".
  flags: Flags of this command, by name; absent ones are None.
  faults: One text per fault, to be raised with those found later.
  """

  config: config_lib.Config
  config_name: str
  flags: dict[str, str | None]
  faults: list[str]


def parse(
  verb: str,
  flags: dict[str, str],
  argv: list[str] | None = None,
  switches: tuple[str, ...] = (),
  several: tuple[str, ...] = (),
  alone: tuple[str, ...] = (),
  description: str = "",
  example: str = "",
):
  """Parses `--config=NAME[:ARG] --config.KEY=VALUE --FLAG=VALUE`.

  Args:
    verb: Name of the command, e.g. "train", for the help text.
    flags: Further flags and what they mean.
    argv: Words after the command; None: those of this process.
    switches: Flags that need no value, and are then "true".
    several: Flags that may be given more than once; all their values are one
      text, a line each.
    alone: Flags beside which --checkpoint=FILE needs no config: options then
      have their defaults, but for `BATCH_OF_FILES` images a batch.
    description: What the command does, for the help text.
    example: Command lines, each a line, for the help text.

  Returns:
    `Args`. Ends the process after `--help`, and, with an explanation, where no
    config can be loaded.
  """
  argv = sys.argv[1:] if argv is None else argv
  words, faults = _split(argv)
  given: dict[str, str | None] = dict.fromkeys(flags)
  overrides, source, section = {}, None, None
  for key, value in words:
    if key in ("help", "h"):
      if value is None:
        print(help_text.screen(verb, flags, description, example))
        sys.exit(0)
      section = value
    elif key == "config":
      source = value
    elif key == "fake_data":
      overrides["fake_data"] = "true" if value is None else value
    elif key.startswith("config."):
      if value is not None:
        overrides[key.removeprefix("config.")] = value
    elif key in several and given[key] and value:
      given[key] += f"\n{value}"
    elif key in given:
      given[key] = "true" if value is None and key in switches else value
    else:
      known = ["config", "fake_data", "help", *flags]
      faults.append(f"--{key}: no such flag.{nearest(key, known)}")
      continue
    if value is None and key not in ("help", "h", "fake_data", *switches):
      faults.append(f"--{key}: got no value, expected --{key}=VALUE.")
  values = config_lib.to_dict(config_lib.Config())
  loaded = None
  if source:
    loaded = _load(source, faults)
  elif given.get("checkpoint"):
    path = given["checkpoint"]
    try:
      if any(given[key] for key in alone) and not run_of(path):
        override(values, "data.batch_size", str(BATCH_OF_FILES))
        loaded = values
      else:
        loaded = _config_of(path, faults, alone)
    except ValueError as e:  # of a damaged config.json
      faults.append(f"--checkpoint: {e}")
  elif not section and not {("config", None), ("checkpoint", None)} & {*words}:
    faults.append(
      NO_CHECKPOINT
      if "checkpoint" in flags
      else "--config: got none, expected --config=NAME, as in --config=vit_b16."
    )
  values = loaded or values
  faults += [f"--{fault}" for fault in override_all(values, overrides)]
  if section:
    _print_section(section, values, [] if loaded else faults)
  config, more = config_lib.build(values)
  if not loaded:  # further faults would not be those of the user's config
    sys.exit(str(config_lib.ConfigError(faults + more)))
  name = pathlib.PurePath(files.split(source or "")[0]).stem
  return Args(config, name, given, faults + more)


def parse_tasks(
  verb: str, flags: dict[str, str], argv: list[str] | None = None, **options
) -> dict[str, tuple[str, str, Args]]:
  """Does as `parse`, for each task of a config file that has several.

  Such a file has a function `get_tasks(argument)` beside `get_config`, which
  returns task -> (group, argument of `get_config`), or {} where the argument
  stands for one run alone.

  Args:
    verb: As for `parse`.
    flags: As for `parse`.
    argv: As for `parse`.
    **options: Of `parse`.

  Returns:
    Task -> (group, config file with argument, what `parse` returns); the only
    task of other config files has the name and the group "".
  """
  argv = sys.argv[1:] if argv is None else argv
  source = dict(_split(argv)[0]).get("config") or ""
  file, _ = files.split(source)
  tasks = {"": ("", source)}
  with contextlib.suppress(ValueError):  # no such file: `parse` says so
    files.find(file)
    found = ask(source, "get_tasks") or {}
    tasks = {k: (g, f"{file}:{a}") for k, (g, a) in found.items()} or tasks
  parsed = {}
  for name, (group, of_task) in tasks.items():
    words = [f"--config={of_task}"] if source else []  # the last one counts
    args = parse(verb, flags, [*argv, *words], **options)
    parsed[name] = group, of_task, args
  return parsed


def ask(source: str, name: str) -> Any:
  """Returns what a function of a config file beside `get_config` answers.

  Args:
    source: Config file, and after a colon the argument.
    name: The function.

  Returns:
    Its answer; None if the file has no such function. Ends the process, with an
    explanation, where the function fails.
  """
  faults: list[str] = []
  answer = _call(source, faults, name)
  if faults:
    sys.exit(str(config_lib.ConfigError(faults)))
  return answer


def _print_section(name: str, values: dict, faults: list[str]) -> None:
  """Ends the process with the options of a section, or with what is wrong."""
  if faults:
    sys.exit(str(config_lib.ConfigError(faults)))
  try:
    print(help_text.section(name, values))
  except ValueError as e:
    sys.exit(str(e))
  sys.exit(0)


def _split(argv: list[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
  """Words -> (key, value) pairs; accepts `--key=value` and `--key value`."""
  pairs, faults, rest = [], [], at_home(argv)
  while rest:
    word = rest.pop(0)
    if not word.startswith("-"):
      faults.append(f"{word!r}: got a bare word, expected --flag=value.")
      continue
    key, equals, value = word.lstrip("-").partition("=")
    if equals:
      pairs.append((key, value))
    elif (
      key != "fake_data"
      and rest[:1]
      and not rest[0].startswith("-" if key in ("help", "h") else "--")
    ):
      pairs.append((key, rest.pop(0)))
    else:
      pairs.append((key, None))
  return pairs, faults


def _load(source: str, faults: list[str]) -> dict | None:
  """Returns what `get_config(argument)` of a config file does, as a dict."""
  return _call(source, faults, "get_config", lambda config: config.to_dict())


def _call(
  source: str,
  faults: list[str],
  name: str,
  then: Callable[[Any], Any] = lambda answer: answer,
) -> Any:
  """Calls a function of a config file with the argument after the colon.

  Args:
    source: The file, a colon and the argument, or the file alone.
    faults: Gets a text if there is no such file, or the function fails.
    name: The function; one other than get_config may be missing.
    then: Applied to what it returns.
  """
  file, argument = files.split(source)
  try:
    path = files.find(file)
  except ValueError as e:
    faults.append(str(e))
    return None
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    function = module.get_config
    if name != "get_config":
      function = vars(module).get(name, lambda *_: None)
    if argument and not inspect.signature(function).parameters:
      raise ValueError(f"got the argument {argument!r}, but it takes none.")
    return then(function(argument) if argument else function())
  except ValueError as e:
    faults.append(f"--config={source}: {e}")
  except Exception as e:  # a user's file may raise anything
    if isinstance(e, ModuleNotFoundError) and e.name in NOT_LEAN:
      raise  # `vit_jax.__main__` says what to install
    frames = traceback.extract_tb(e.__traceback__)
    own = [f for f in frames if pathlib.Path(f.filename).name == path.name]
    line = getattr(e, "lineno", None) or (own or frames)[-1].lineno
    text = f"{type(e).__name__}: {e}".replace("\\n", " ")
    faults.append(f"--config={source}, line {line}: {text}")
  return None


def run_of(checkpoint: str) -> epath.Path | None:
  """Returns the folder of the run that a checkpoint or step is of, if any."""
  folder = epath.Path(checkpoint)
  for parent in (folder, folder.parent, folder.parent.parent):
    if _config_in(parent):
      return parent
  return None


def _config_in(folder: epath.Path) -> dict | None:
  file = folder / "config.json"
  values = json_file.read(file) if file.is_file() else {}
  if "optim" not in values:
    return None  # that of another program
  return values


def _config_of(
  checkpoint: str, faults: list[str], alone: tuple[str, ...]
) -> dict | None:
  """Returns the config that a run, or one of its steps, was made with."""
  if run := run_of(checkpoint):
    return _config_in(run)
  lacks = "with no config.json of a run in it or above it"
  if "://" not in checkpoint and not epath.Path(checkpoint).exists():
    lacks = "which does not exist"
  beside = ", ".join(f"--{flag}" for flag in alone)
  faults.append(
    f"--checkpoint: got {checkpoint!r}, {lacks}; expected the folder of a run;"
    f" or published weights, and --config=NAME{beside and ' or one of '}"
    f"{beside} beside them."
  )
  return None


def override_all(values: dict, overrides: Mapping[str, str]) -> list[str]:
  """Sets options by their paths; `build` checks them afterwards.

  A length in epochs takes the place of one in steps that the values have; else
  that would count, unsaid.

  Returns:
    A fault where both lengths are given; [] otherwise.
  """
  for path, value in overrides.items():
    override(values, path, value)
  if (overrides.get("total_epochs") or "none").lower() == "none":
    return []
  if "total_steps" in overrides:
    return [
      "config.total_epochs: got it beside config.total_steps, expected one of"
      " them."
    ]
  override(values, "total_steps", None)
  return []


def override(values: dict, path: str, value: str | None) -> None:
  """Sets values[a][b] for path "a.b"; `build` checks it afterwards."""
  *parents, leaf = path.split(".")
  for parent in parents:
    inner = values.get(parent)
    if not isinstance(inner, dict):
      inner = values[parent] = {}
    values = inner
  values[leaf] = value
