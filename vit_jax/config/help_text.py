"""What `--help` and `--help=SECTION` of a command with a config print."""

import dataclasses
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping

from vit_jax import names
from vit_jax.config import config_files
from vit_jax.config.parse import kind_of
from vit_jax.config.schema import UNIONS, Config
from vit_jax.evaluators import EVALUATORS, EvaluatorConfig
from vit_jax.options import check_choice

WIDTH = 80
RUN, EVALS, ALL = "run", "evals", "all"


def sections() -> dict[str, str]:
  """Returns section of the options -> what it is about."""
  fields = dataclasses.fields(Config)
  listed = {RUN: ", ".join(f.name for f in fields if f.metadata)}
  for field in fields:
    if not field.metadata:
      (cls, *_) = typing.get_args(field.type) or (field.type,)
      doc = re.split("[:;]", summary(cls))[0]
      listed[field.name] = doc[0].lower() + doc[1:]
  return {**listed, ALL: "every option"}


def screen(
  verb: str,
  flags: Mapping[str, str],
  description: str,
  example: str,
) -> str:
  """Returns usage, flags, sections of the options, configs and an example.

  Args:
    verb: Name of the command.
    flags: Name of a flag other than --config -> its meaning.
    description: What the command does, in a sentence or two.
    example: Command lines as a user types them, one per line.
  """
  config = "--config=NAME[:ARGUMENT]"
  if "checkpoint" in flags:
    config = f"--checkpoint=RUN [{config}]"
  usage = f"usage: vit-jax {verb} {config} [--config.OPTION=VALUE ...]"
  every_flag = {
    "config": "name or file of a config; its argument follows a colon",
    "fake_data": "use fake records made in memory (config.fake_data)",
    **flags,
  }
  described = {f"--{name}": doc for name, doc in every_flag.items()}
  listed = f"configs: {', '.join(config_files.known())}"
  parts = [
    textwrap.wrap(usage, WIDTH, subsequent_indent=" " * 8),
    textwrap.wrap(description, WIDTH),
    _columns(described),
    [
      "options (--config.OPTION=VALUE), described by --help=SECTION or"
      f" --help={ALL}:",
      *_columns({k: v for k, v in sections().items() if k != ALL}),
    ],
    textwrap.wrap(listed, WIDTH, subsequent_indent=" " * 9),
    example_lines(example),
  ]
  return "\n\n".join("\n".join(lines) for lines in parts if lines)


def section(name: str, values: Mapping) -> str:
  """Returns every option of a section with its value, unit and choices.

  Args:
    name: A key of `sections`.
    values: The config, as a dict; absent options have their defaults.

  Raises:
    ValueError: There is no such section, and the message has the nearest name;
      or a kind is an import path that cannot be imported.
  """
  check_choice(name, sections(), "--help")
  lines = [f"options of {name!r} (--config.OPTION=VALUE), with their values:"]
  if name == ALL:
    lines[0] = "options (--config.OPTION=VALUE), with their values:"
  for field in dataclasses.fields(Config):
    wanted = RUN if field.metadata else field.name
    if name not in (wanted, ALL) or field.name == EVALS:
      continue
    if field.metadata:
      lines += _field_lines(field, values, "config")
    else:
      lines += _nested_lines(field, values.get(field.name), name == ALL)
  if name in (EVALS, ALL):
    for kind, cls in _evaluators(values.get(EVALS)).items():
      lines += [
        "",
        f"options of an evaluator of kind {kind!r} ({summary(cls)}):",
      ]
      for field in shown(cls, {}):
        lines += _field_lines(field, {}, "config.evals.<name>")
  return "\n".join(lines)


def _evaluators(values) -> dict[str, type[EvaluatorConfig]]:
  """Returns kind -> class, with those that a config imports at the end."""
  kinds = dict(EVALUATORS)
  for name, options in (values if isinstance(values, Mapping) else {}).items():
    kind = options.get("kind") if isinstance(options, Mapping) else None
    if names.is_path(str(kind)):
      where = f"config.evals.{name}.kind"
      kinds[kind] = names.resolve(kind, EVALUATORS, where, EvaluatorConfig)
  return kinds


def example_lines(example: str) -> list[str]:
  """Returns the lines of the examples, with which a help text ends.

  Args:
    example: Command lines as a user types them, one per line.
  """
  lines = example.splitlines()
  head = "example:" if len(lines) == 1 else "examples:"
  return [head, *(f"  {line}" for line in lines)]


def summary(cls) -> str:
  """Returns the first line of a class's docstring, without its period."""
  return cls.__doc__.split("\n")[0].removesuffix(".")


def shown(cls, values: Mapping) -> list[dataclasses.Field]:
  """Returns the options of a class that are used with these values."""
  unread = getattr(cls, "unread", lambda options: ())(values)
  fields = dataclasses.fields(cls)
  return [f for f in fields if f.metadata and f.name not in unread]


def _nested_lines(
  field, values: Mapping | None, with_rare: bool
) -> Iterator[str]:
  """Yields the lines of a section; for `UNIONS` those of the chosen kind."""
  values = values if isinstance(values, Mapping) else {}
  where, cls = f"config.{field.name}", field.type
  if field.name in UNIONS:
    selector, kinds = UNIONS[field.name]
    kind = str(values.get(selector, next(iter(kinds))))
    cls = kind_of(field.name, kind)
    yield f"  {where}.{selector} = {kind!r}"
    every = {**kinds, kind: cls}
    yield from _columns({k: summary(c) for k, c in every.items()}, indent=8)
  options = shown(cls, values)
  if not with_rare:
    options = [f for f in options if not f.metadata["is_rare"]]
  for option in options:
    yield from _field_lines(option, values, where)


def _field_lines(field, values: Mapping, where: str) -> Iterator[str]:
  value = values.get(field.name, field.default)
  yield f"  {where}.{field.name} = {value!r}"
  indent = " " * 6
  yield from textwrap.wrap(
    field.metadata["doc"],
    WIDTH,
    initial_indent=indent,
    subsequent_indent=indent,
    break_on_hyphens=False,
  )
  yield from _columns(field.metadata["choices"], indent=8)


def _columns(rows: Mapping[str, str], indent: int = 2) -> list[str]:
  """Returns lines with two columns: names, and their wrapped meanings."""
  width = max(map(len, rows), default=0) + 2
  return [
    line.rstrip()
    for name, doc in rows.items()
    for line in textwrap.wrap(
      doc or " ",
      WIDTH,
      initial_indent=" " * indent + name.ljust(width),
      subsequent_indent=" " * (indent + width),
      drop_whitespace=bool(doc),
      break_on_hyphens=False,
    )
  ]
