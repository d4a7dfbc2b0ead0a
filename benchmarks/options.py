"""Writes docs/options.md and docs/commands.md from the code.

Run: python benchmarks/options.py
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# ruff: noqa: E402
from tables import with_tables

from vit_jax.commands import COMMANDS
from vit_jax.config import UNIONS, Config, help_text
from vit_jax.evaluators import EVALUATORS, EvaluatorConfig
from vit_jax.options import type_name

DOCS = pathlib.Path(__file__).parents[1] / "docs"
OPTIONS = DOCS / "options.md"
PAGE = DOCS / "commands.md"
COLUMNS = (
  "<!-- source: the code, whose defaults these are -->",
  "",
  "| option | default | meaning |",
  "|---|---|---|",
)


def shown(value) -> str:
  """Returns a value as the command line has it, in code."""
  if isinstance(value, bool):
    text = str(value).lower()
  elif isinstance(value, tuple):
    text = ",".join(map(str, value)) or "()"
  else:
    text = str(value)
  return "`" + text.replace("|", r"\|") + "`"


def sentence(text: str) -> str:
  """Returns a meaning as a cell; `|` would end it, `<...>` be a tag."""
  for plain, safe in (("|", r"\|"), ("<", "&lt;"), ("*", r"\*")):
    text = text.replace(plain, safe)
  return text


def meaning(doc: str, choices: dict[str, str], kind: str = "") -> str:
  """Returns the meaning of an option, and its type or its choices, a line each.

  Args:
    doc: What it means.
    choices: Value -> what it means; {}: any value of the type.
    kind: Name of its type; "": none is printed.
  """
  lines = (
    f"`{name}`: {sentence(what)}" if what else f"`{name}`"
    for name, what in choices.items()
  )
  head = sentence(doc) + (f" *({kind})*" if kind else "")
  return "<br>".join([head, *lines])


def _kind(field: dataclasses.Field) -> str:
  """Returns the name of an option's type; "": the text needs none."""
  name = type_name(field.type).replace("true/false", "true or false")
  is_clear = field.metadata["choices"] or name.startswith("text or")
  return "" if name == "text" or is_clear else name


def row(name: str, default: str, text: str) -> str:
  """Returns a line of a table."""
  return f"| `{name}` | {default} | {text} |"


def table(fields: Iterable[dataclasses.Field], where: str) -> list[str]:
  """Returns the lines of a table of options, without its end."""
  return [
    *COLUMNS,
    *(
      row(
        f"{where}{field.name}",
        shown(field.default),
        meaning(field.metadata["doc"], field.metadata["choices"], _kind(field)),
      )
      for field in fields
      if field.metadata
    ),
  ]


def _differing(cls, other) -> list[dataclasses.Field]:
  """Returns the options of a class that another lacks or has otherwise."""
  facts = lambda f: (f.name, f.default, str(dict(f.metadata)))
  known = {facts(f) for f in dataclasses.fields(other)}
  return [f for f in dataclasses.fields(cls) if facts(f) not in known]


def kinds(
  where: str, selector: str, base, classes: dict, default: str
) -> Iterator[str]:
  """Yields the lines of a section whose options depend on a kind."""
  choices = {name: help_text.summary(cls) for name, cls in classes.items()}
  _, *every = table(dataclasses.fields(base), where)[len(COLUMNS) - 1 :]
  chosen = row(
    f"{where}{selector}",
    default,
    meaning("which kind; the options of each are below", choices),
  )
  yield from ("", *COLUMNS, chosen, *every)
  for name, cls in classes.items():
    yield from ("", f"### `{where}{selector}={name}`", "")
    parents = [k for k, c in classes.items() if c in cls.__mro__[1:]]
    own = _differing(cls, classes[parents[0]] if parents else base)
    own = [f for f in own if f.metadata]
    text = sentence(help_text.summary(cls)) + "."
    if parents:
      text += f" As `{parents[0]}`{', but for' if own else ''}"
      text += ":" if own else "."
    elif not own:
      text += " It has no options of its own."
    yield text
    if own:
      yield from ("", *table(own, where))


def options() -> str:
  """Returns docs/options.md with its tables made anew."""
  return with_tables(OPTIONS.read_text(), {"options": sections})


def sections() -> str:
  """Returns the tables of all sections, after links to them."""
  names = [n for n in help_text.sections() if n != help_text.ALL]
  links = ", ".join(f"[{n}](#{n})" for n in names)
  lines = [f"Sections: {links}.", "", f"## {help_text.RUN}", ""]
  fields = dataclasses.fields(Config)
  lines += table(fields, "")
  for field in fields:
    if field.metadata:
      continue
    lines += ["", f"## {field.name}"]
    where = f"{field.name}."
    if field.name in UNIONS:
      selector, classes = UNIONS[field.name]
      default = shown(next(iter(classes)))
      lines += kinds(where, selector, field.type, classes, default)
    elif field.name == help_text.EVALS:
      where = f"{field.name}.NAME."
      lines += [
        "",
        "You choose NAME, with which the names of the metrics begin."
        " [Evaluators](evaluators.md) says what each kind measures.",
      ]
      lines += kinds(where, "kind", EvaluatorConfig, EVALUATORS, "none")
    else:
      about = sentence(help_text.summary(field.type))
      lines += [
        "",
        f"{about}.",
        "",
        *table(dataclasses.fields(field.type), where),
      ]
  return "\n".join(lines)


def block(verb: str, screen: str) -> str:
  """Returns the part of docs/commands.md on a verb, given what it prints."""
  return f"## {verb}\n\n```text\n{screen.rstrip()}\n```\n"


def _screen(verb: str) -> str:
  done = subprocess.run(
    [sys.executable, "-m", "vit_jax", verb, "--help"],
    capture_output=True,
    text=True,
    check=True,
    env={**os.environ, "COLUMNS": "80"},
  )
  return done.stdout


def commands() -> str:
  """Returns docs/commands.md with its screens made anew."""
  return with_tables(PAGE.read_text(), {"commands": screens})


def screens() -> str:
  """Returns the table of all verbs, then what each prints."""
  rows = [
    f"| [`{v}`](#{v}) | {command.about} |" for v, command in COMMANDS.items()
  ]
  table_lines = ["| verb | what it does |", "|---|---|", *rows]
  parts = [block(verb, _screen(verb)) for verb in COMMANDS]
  return "\n".join([*table_lines, "", *parts]).rstrip()


if __name__ == "__main__":
  OPTIONS.write_text(options())
  PAGE.write_text(commands())
