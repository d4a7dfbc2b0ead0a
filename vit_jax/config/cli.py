"""The command line: flags, the config file, overrides of its options.

Only light modules are imported, so that `--help` is fast. Commands with a
config (`parse`) report all errors together; the others (`parser`) stop at the
first, as argparse does.
"""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from vit_jax.config import config_files, help_text, json_file
from vit_jax.config.parse import build, without_defaults
from vit_jax.config.schema import UNIONS, Config
from vit_jax.options import ConfigError, at_home, nearest

# Flags of the commands that run in several processes.
PROCESS_FLAGS = {
  "coordinator": "host:port of process 0; any free port will do",
  "num_processes": "number of processes",
  "process_id": "number of this process, from 0",
}
BATCH_OF_FILES = 64  # images per batch for features of a published file
NO_CONFIG = (
  "--config: got none, expected --config=NAME, as in --config=vit_b16."
)
NO_CHECKPOINT = (
  "--checkpoint: got none, expected the folder of a run, as in"
  " --checkpoint=runs/<config name>, or published weights beside"
  " --config=finetune:model=B/16."
)
_OVERRIDE = "--config."


class Args(NamedTuple):
  """A parsed command line.

  config: Config; an option with an error has its default value.
  config_name: File name of the config without its ending, e.g. "vit_l16".
  flags: Name of a flag -> its value; None if it was not given.
  errors: One text for each error. The caller raises them with its own errors.
  source: The config file, a colon and its argument.
  overrides: Paths of the options that the command line sets, such as
    "optim.lr".
  """

  config: Config
  config_name: str
  flags: dict[str, str | None]
  errors: list[str]
  source: str = ""
  overrides: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
  """A parser that takes files before and after flags.

  It expands the home folder in --flag=~/x, and suggests the nearest flag for an
  unknown one.
  """

  def parse_args(self, args, namespace=None):
    return self.parse_intermixed_args(at_home(list(args)), namespace)

  def error(self, message: str) -> NoReturn:
    known = [n[2:] for a in self._actions for n in a.option_strings]
    _, _, unknown = message.partition("unrecognized arguments: ")
    flags = [w[2:].split("=")[0] for w in unknown.split() if w[:2] == "--"]
    near = "".join(nearest(flag, filter(None, known)) for flag in flags)
    super().error(message + near.replace("mean '", "mean '--"))


def parser(
  verb: str, description: str, example: str, usage: str | None = None
) -> argparse.ArgumentParser:
  """Returns a parser for a command without a config.

  Args:
    verb: Name of the command.
    description: What the command does; line breaks are kept.
    example: Command lines as a user types them, one per line.
    usage: The usage line after the verb; None: argparse writes it.
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
  """Returns the folder that a flag names; for `type=` of argparse.

  Raises:
    ArgumentTypeError: The path is in a bucket.
  """
  if "://" in path:
    expected = "a folder on this machine; copy it afterwards"
    raise argparse.ArgumentTypeError(f"got {path!r}, expected {expected}.")
  return path


def positive(text: str) -> int:
  """Returns the number of a flag; for `type=` of argparse.

  Raises:
    ArgumentTypeError: The text is not a whole number from 1.
  """
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 1.")
  return int(text)


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
    flags: Name of a further flag -> its help text.
    argv: The arguments after the verb.
    switches: Flags that need no value; without one the value is "true".
    several: Flags that may be given more than once; their values are joined
      with line breaks.
    alone: Flags with which --checkpoint=FILE needs no config. The options then
      have their defaults, and a batch has `BATCH_OF_FILES` images.
    description: What the command does, for the help text.
    example: Command lines, one per line, for the help text.

  Returns:
    `Args`. The process ends after `--help`, or with all errors if there is no
    config.
  """
  values, overrides, errors = _split(argv, flags, switches, several)
  section, source = values.pop("help"), values.pop("config")
  if section == "":
    print(help_text.screen(verb, flags, description, example))
    sys.exit(0)
  if fake_data := values.pop("fake_data"):
    overrides["fake_data"] = fake_data
  checkpoint, options = values.get("checkpoint"), None
  try:
    if source:
      options = config_files.call(source)
    elif checkpoint:
      is_alone = any(values[flag] for flag in alone)
      options = _checkpoint_config(checkpoint, is_alone, alone)
    elif section:
      options = {}
    elif "" not in (source, checkpoint):  # "": reported already
      errors.append(NO_CHECKPOINT if "checkpoint" in flags else NO_CONFIG)
  except ValueError as e:
    errors.append(str(e))
  if options is None:  # without a config further checks mean nothing
    sys.exit(str(ConfigError(errors)))
  errors += [f"--{error}" for error in override_all(options, overrides)]
  if section:
    try:
      print(help_text.section(section, options))
    except ValueError as e:
      sys.exit(str(e))
    sys.exit(0)
  config, more = build(options)
  name = pathlib.PurePath(config_files.split(source or "")[0]).stem
  flag_values = {flag: value or None for flag, value in values.items()}
  return Args(
    config, name, flag_values, errors + more, source or "", (*overrides,)
  )


def parse_tasks(
  verb: str, flags: Mapping[str, str], argv: Sequence[str], **options: Any
) -> dict[str, tuple[str, str, Args]]:
  """Parses a command line for each task of a config file.

  A config file with several tasks has a function `get_tasks(argument)`, which
  returns task -> (group, argument of `get_config`), or {} if the argument means
  one run.

  Args:
    verb, flags, argv, **options: See `parse`.

  Returns:
    Task -> (group, config file with argument, result of `parse`). A config file
    without tasks has one, whose name and group are "".
  """
  values, _, _ = _split(argv, flags, (), ())
  source = values["config"] or ""
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
  """Calls a function of a config file other than `get_config`.

  If the function fails, the process ends with its error.

  Args:
    source: The config file, a colon and the argument.
    name: Name of the function.

  Returns:
    The result of the function; None if the file has no such function.
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
) -> tuple[dict[str, str | None], dict[str, str], list[str]]:
  """Returns values of the flags, overrides of the config, and errors.

  The value of an absent flag is None. The value of a flag without a value is
  "true" for a switch and "" for others, which is an error except for --help.
  """
  errors: list[str] = []
  rest, overrides = _overrides(at_home(list(argv)), errors)
  known = ["config", "fake_data", "help", *flags]
  flag_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  for name in known:
    flag_parser.add_argument(
      *(("-h",) if name == "help" else ()),
      f"--{name}",
      nargs="?",
      const="true" if name in (*switches, "fake_data") else "",
      action="append",
      default=[],
    )
  parsed, unknown = flag_parser.parse_known_args(rest)
  values: dict[str, str | None] = {}
  for name, texts in vars(parsed).items():
    if "" in texts and name != "help":
      errors.append(f"--{name}: got no value, expected --{name}=VALUE.")
    elif name in several and texts:
      texts = ["\n".join(texts)]
    values[name] = texts[-1] if texts else None
  for text in unknown:
    if text.startswith("-"):
      name = text.lstrip("-").partition("=")[0]
      errors.append(f"--{name}: no such flag.{nearest(name, known)}")
    else:
      errors.append(f"{text!r}: got a word without a flag.")
  return values, overrides, errors


def _overrides(
  argv: list[str], errors: list[str]
) -> tuple[list[str], dict[str, str]]:
  """Takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of the arguments.

  argparse cannot do that, because the keys depend on the config.
  """
  rest, overrides = [], {}
  remaining = [*reversed(argv)]
  while remaining:
    text = remaining.pop()
    if not text.startswith(_OVERRIDE):
      rest.append(text)
      continue
    key, equals, value = text.removeprefix(_OVERRIDE).partition("=")
    if equals:
      overrides[key] = value
    elif remaining and not remaining[-1].startswith("--"):
      overrides[key] = remaining.pop()
    else:
      errors.append(f"{text}: got no value, expected {text}=VALUE.")
  return rest, overrides


def _checkpoint_config(
  path: str, is_alone: bool, alone: Iterable[str]
) -> dict[str, Any]:
  """Returns the config of a checkpoint's run, or defaults for published files.

  Raises:
    ValueError: The run has no config.json, or it is damaged.
  """
  try:
    if run := config_files.run_of(path):
      return json_file.read(run / "config.json")
  except ValueError as e:  # a damaged config.json
    raise ValueError(f"--checkpoint: {e}") from None
  if is_alone:
    return {"data": {"batch_size": BATCH_OF_FILES}}
  lacks = "without the config.json of a run in it or above it"
  if "://" not in path and not pathlib.Path(path).exists():
    lacks = "which does not exist"
  beside = " or ".join(["--config=NAME", *(f"--{flag}" for flag in alone)])
  expected = f"the folder of a run, or published weights beside {beside}"
  raise ValueError(f"--checkpoint: got {path!r}, {lacks}; expected {expected}.")


def override_all(values: dict, overrides: Mapping[str, str]) -> list[str]:
  """Sets options by their paths; `build` checks them afterwards.

  An override of total_epochs sets total_steps to None, because total_steps of
  the config file would win otherwise. If an override chooses another kind,
  options with the defaults of the former kind get those of the new one.

  Returns:
    An error if the overrides have both lengths, else [].
  """
  for name, (selector, _) in UNIONS.items():
    options = values.get(name)
    if f"{name}.{selector}" in overrides and isinstance(options, dict):
      values[name] = without_defaults(name, options)
  for path, value in overrides.items():
    override(values, path, value)
  if (overrides.get("total_epochs") or "none").lower() == "none":
    return []
  if "total_steps" in overrides:
    return ["config.total_epochs: got both total_epochs and total_steps."]
  override(values, "total_steps", None)
  return []


def override(values: dict, path: str, value: Any) -> None:
  """Sets values[a][b] for path "a.b"; `build` checks it afterwards."""
  *parents, leaf = path.split(".")
  for parent in parents:
    if not isinstance(values.get(parent), dict):
      values[parent] = {}
    values = values[parent]
  values[leaf] = value
