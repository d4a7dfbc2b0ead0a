"""docs/options.md and docs/commands.md are what the code says."""

import dataclasses
import itertools
import re

import options
import pytest

from vit_jax.commands import COMMANDS
from vit_jax.config import Config, help_text


def test_the_page_of_options_is_up_to_date():
  text = options.OPTIONS.read_text()
  assert text == options.options(), "python benchmarks/options.py writes it"


def test_every_option_of_help_is_on_it():
  """Each row begins with a name; those of --help do so in another way."""
  rows = re.findall(r"^\| `([\w.]+)` \|", options.OPTIONS.read_text(), re.M)
  text = help_text.section("all", {"model": {"name": "bit"}})
  text += help_text.section("all", {"objective": {"kind": "masked_patch"}})
  named = re.findall(r"^  config\.(\S+) = ", text, re.M)
  named = {n.replace("<name>", "NAME") for n in named}
  assert "evals.NAME.l2" in named and "model.root_pad" in named
  assert named <= {*rows}


def test_every_table_has_its_head():
  lines = options.OPTIONS.read_text().splitlines()
  for before, line in itertools.pairwise(lines):
    assert not line.startswith("| `") or before.startswith("|"), line
    assert line.count(" | ") in (0, 2)


@pytest.mark.parametrize(
  "value, text",
  [
    (None, "`None`"),
    (False, "`false`"),
    ((1, 5), "`1,5`"),
    ((), "`()`"),
    (1e-6, "`1e-06`"),
    ("a|b", "`a\\|b`"),
  ],
)
def test_a_value_is_written_as_on_the_command_line(value, text):
  assert options.shown(value) == text


def test_choices_are_lines_of_the_meaning():
  (field,) = [f for f in dataclasses.fields(Config) if f.name == "fewshot"]
  lines = options.table([field], "")
  assert lines[-1].count("<br>`") == 2 and lines[-1].endswith(" |")


def test_the_page_of_commands_has_every_verb():
  """What each prints is compared where it is run: commands/test_commands.py."""
  text = options.PAGE.read_text()
  assert re.findall(r"^## (\w+)$", text, re.M) == list(COMMANDS)
  for verb, command in COMMANDS.items():
    assert f"| [`{verb}`](#{verb}) | {command.about} |\n" in text
