"""The command line: argparse, the config file, its overrides.

Only light modules are imported, so that `--help` answers at once. Commands of a
config (`parse`) report every error of their words together; the others stop at
the first, as argparse does.
"""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from vit_jax.config import config_files, help_text
from vit_jax.config.parse import build, to_dict
from vit_jax.config.schema import Config
from vit_jax.options import ConfigError, at_home, nearest

# Flags of the commands that run in several processes, see
# distributed/processes.py.
PROCESS_FLAGS = {
  "coordinator": "host:port of process 0, where processes meet (any free port)",
  "num_processes": "how many processes there are",
  "process_id": "which one this is, from 0",
}
BATCH_OF_FILES = 64  # images, of the features of a published file
NO_CONFIG = (
  "--config: got none, expected --config=NAME, as in --config=vit_b16."
)
NO_CHECKPOINT = (
  "--checkpoint: got none, expected the folder of a run, as in"
  " --checkpoint=runs/<config name>, or published weights beside"
  " --config=finetune:model=B/16."
)
_OVERRIDE = "--config."
_NO_VALUE = object()  # of a flag that was given without its value


class Args(NamedTuple):
  """A parsed command line.

  config: Options with errors have their defaults; see `errors`.
  config_name: File name of the config without its ending, e.g. "vit_l16".
  flags: Flags of this command, by name; absent ones are None.
  errors: One text each, to be raised with those found later.
  """

  config: Config
  config_name: str
  flags: dict[str, str | None]
  errors: list[str]


class _Parser(argparse.ArgumentParser):
  """Takes files before and behind flags.

  It finds the home folder in --flag=~/x, and names the known flag that is
  nearest to an unknown one.
  """

  def parse_args(self, args=None, namespace=None):
    args = sys.argv[1:] if args is None else list(args)
    if "--" in args:  # Python 3.11 forgets it where files may follow flags
      return super().parse_args(args, namespace)
    return self.parse_intermixed_args(args, namespace)

  def parse_known_args(self, args=None, namespace=None):
    args = sys.argv[1:] if args is None else list(args)
    return super().parse_known_args(at_home(args), namespace)

  def error(self, message: str) -> NoReturn:
    known = [name for a in self._actions for name in a.option_strings]
    _, _, unknown = message.partition("unrecognized arguments: ")
    flags = [w.split("=")[0] for w in unknown.split() if w.startswith("--")]
    super().error(message + "".join(nearest(flag, known) for flag in flags))


def parser(
  verb: str, description: str, example: str, usage: str | None = None
) -> argparse.ArgumentParser:
  """Returns a parser for a command without a config.

  Args:
    verb: Name of the command.
    description: What it does; its line breaks stay.
    example: Command lines as a user types them, each a line.
    usage: The first line behind the verb; None: every option.
  """
  return _Parser(
    f"vit-jax {verb}",
    usage=usage and f"vit-jax {verb} {usage}",
    description=description,
    epilog="\n".join(help_text.example_lines(example)),
    formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
      prog, max_help_position=28, width=80
    ),
  )


def local_folder(path: str) -> str:
  """Returns the folder of a flag; raises for a bucket, as argparse asks for."""
  if "://" in path:
    raise argparse.ArgumentTypeError(
      f"got {path!r}, expected a folder on this machine; copy it afterwards:"
      f" gcloud storage cp -r FOLDER {path}"
    )
  return path


def parse(
  verb: str,
  flags: Mapping[str, str],
  argv: Sequence[str],
  *,
  switches: Iterable[str] = (),
  several: Iterable[str] = (),
  alone: Iterable[str] = (),
  description: str = "",
  example: str = "",
) -> Args:
  """Parses `--config=NAME[:ARG] --config.KEY=VALUE --FLAG=VALUE`.

  Args:
    verb: Name of the command, e.g. "train", for the help text.
    flags: Further flags and what they mean.
    argv: The words after the command.
    switches: Flags that need no value, and are then "true".
    several: Flags that may be given more than once; all their values are one
      text, a line each.
    alone: Flags beside which --checkpoint=FILE needs no config: options then
      have their defaults, but for `BATCH_OF_FILES` images a batch.
    description: What the command does, for the help text.
    example: Command lines, each a line, for the help text.

  Returns:
    `Args`. Ends the process after `--help`, and, with all errors, where no
    config can be loaded.
  """
  values, overrides, errors = _split(argv, flags, switches, several)
  section, source = values.pop("help"), values.pop("config")
  if section is _NO_VALUE:
    print(help_text.screen(verb, flags, description, example))
    sys.exit(0)
  # A config or checkpoint without its value is an error already.
  is_named = _NO_VALUE in (source, values.get("checkpoint"))
  fake_data = values.pop("fake_data")
  if fake_data is not None:
    overrides["fake_data"] = "true" if fake_data is _NO_VALUE else fake_data
  source = None if source is _NO_VALUE else source
  given = {k: None if v is _NO_VALUE else v for k, v in values.items()}
  loaded = None
  try:
    if source:
      loaded = config_files.call(source)
    elif given.get("checkpoint"):
      is_alone = any(given[flag] for flag in alone)
      loaded = _of_checkpoint(given["checkpoint"], is_alone, alone)
    elif not section and not is_named:
      errors.append(NO_CHECKPOINT if "checkpoint" in flags else NO_CONFIG)
  except ValueError as e:
    errors.append(str(e))
  options = loaded or to_dict(Config())
  errors += [f"--{error}" for error in override_all(options, overrides)]
  if section:
    if errors and not loaded:
      sys.exit(str(ConfigError(errors)))
    try:
      print(help_text.section(section, options))
    except ValueError as e:
      sys.exit(str(e))
    sys.exit(0)
  config, more = build(options)
  if not loaded:  # further errors would not be those of the user's config
    sys.exit(str(ConfigError(errors + more)))
  name = pathlib.PurePath(config_files.split(source or "")[0]).stem
  return Args(config, name, given, errors + more)


def parse_tasks(
  verb: str, flags: Mapping[str, str], argv: Sequence[str], **options: Any
) -> dict[str, tuple[str, str, Args]]:
  """Parses a command line for each task of a config file that has several.

  Such a file has a function `get_tasks(argument)` beside `get_config`, which
  returns task -> (group, argument of `get_config`), or {} where the argument
  stands for one run alone.

  Args:
    verb, flags, argv, **options: As for `parse`.

  Returns:
    Task -> (group, config file with argument, what `parse` returns); the only
    task of other config files has the name and the group "".
  """
  values, _, _ = _split(argv, flags, (), ())
  source = values["config"]
  source = source if isinstance(source, str) else ""
  tasks = {"": ("", source)}
  file, _ = config_files.split(source)
  with contextlib.suppress(ValueError):  # no such file: `parse` reports it
    config_files.find(file)
    several = ask(source, "get_tasks") or {}
    tasks = {k: (g, f"{file}:{a}") for k, (g, a) in several.items()} or tasks
  parsed = {}
  for name, (group, task) in tasks.items():
    last = [f"--config={task}"] if source else []  # the last one counts
    parsed[name] = group, task, parse(verb, flags, [*argv, *last], **options)
  return parsed


def ask(source: str, name: str) -> Any:
  """Returns what a function of a config file beside `get_config` returns.

  Args:
    source: Config file, and after a colon the argument.
    name: The function.

  Returns:
    None if the file has no such function. Ends the process, with an
    explanation, where the function fails.
  """
  try:
    return config_files.call(source, name)
  except ValueError as e:
    sys.exit(str(ConfigError([str(e)])))


def _split(
  argv: Sequence[str],
  flags: Iterable[str],
  switches: Iterable[str],
  several: Iterable[str],
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
  """Returns values of the flags, overrides of the config, and errors.

  A flag that is absent has None; one without its value has `_NO_VALUE`, and an
  error unless it needs none.
  """
  errors: list[str] = []
  rest, overrides = _overrides(at_home(list(argv)), errors)
  known = ["config", "fake_data", "help", *flags]
  words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  for name in known:
    words.add_argument(
      *(("-h",) if name == "help" else ()),
      f"--{name}",
      nargs="?",
      const="true" if name in switches else _NO_VALUE,
      action="append",
      default=[],
    )
  parsed, unknown = words.parse_known_args(rest)
  values: dict[str, Any] = {}
  for name, texts in vars(parsed).items():
    if _NO_VALUE in texts and name not in ("fake_data", "help"):
      errors.append(f"--{name}: got no value, expected --{name}=VALUE.")
    elif name in several and texts:
      texts = ["\n".join(texts)]
    values[name] = texts[-1] if texts else None
  is_value = False  # of an unknown flag
  for word in unknown:
    name, equals, _ = word.lstrip("-").partition("=")
    if word.startswith("-"):
      errors.append(f"--{name}: no such flag.{nearest(name, known)}")
    elif not is_value:
      errors.append(f"{word!r}: got a bare word, expected --flag=value.")
    is_value = word.startswith("-") and not equals
  return values, overrides, errors


def _overrides(
  argv: list[str], errors: list[str]
) -> tuple[list[str], dict[str, str]]:
  """Takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of the words.

  argparse could not: the keys depend on the config.
  """
  rest, overrides = [], {}
  words = list(reversed(argv))
  while words:
    word = words.pop()
    if not word.startswith(_OVERRIDE):
      rest.append(word)
      continue
    key, equals, value = word.removeprefix(_OVERRIDE).partition("=")
    if equals:
      overrides[key] = value
    elif words and not words[-1].startswith("--"):
      overrides[key] = words.pop()
    else:
      errors.append(f"{word}: got no value, expected {word}=VALUE.")
  return rest, overrides


def _of_checkpoint(path: str, is_alone: bool, alone: Iterable[str]) -> dict:
  """Returns the config of a checkpoint's run, or that of a published file.

  Raises:
    ValueError: There is none; the message is for the user.
  """
  try:
    values = config_files.config_of_run(path)
  except ValueError as e:  # of a damaged config.json
    raise ValueError(f"--checkpoint: {e}") from None
  if values is None and is_alone:
    values = to_dict(Config())
    override(values, "data.batch_size", str(BATCH_OF_FILES))
  if values is not None:
    return values
  lacks = "with no config.json of a run in it or above it"
  if "://" not in path and not pathlib.Path(path).exists():
    lacks = "which does not exist"
  beside = ", ".join(f"--{flag}" for flag in alone)
  raise ValueError(
    f"--checkpoint: got {path!r}, {lacks}; expected the folder of a run; or"
    f" published weights, and --config=NAME{beside and ' or one of '}{beside}"
    " beside them."
  )


def override_all(values: dict, overrides: Mapping[str, str]) -> list[str]:
  """Sets options by their paths; `build` checks them afterwards.

  A length in epochs takes the place of one in steps that the values have, which
  would otherwise decide silently.

  Returns:
    An error where both lengths are given; [] otherwise.
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
