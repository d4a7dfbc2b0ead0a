"""docs/options.md and docs/commands.md have every option and command."""

import re

import options

from vit_jax.commands import COMMANDS
from vit_jax.config import help_text


def test_every_option_of_help_is_on_it():
  """Each row begins with a name; those of --help do so in another way."""
  rows = re.findall(r"^\| `([\w.]+)` \|", options.OPTIONS.read_text(), re.M)
  text = help_text.section("all", {"model": {"name": "bit"}})
  text += help_text.section("all", {"objective": {"kind": "masked_patch"}})
  named = re.findall(r"^  config\.(\S+) = ", text, re.M)
  named = {n.replace("<name>", "NAME") for n in named}
  assert "evals.NAME.l2" in named and "model.root_pad" in named
  assert named <= {*rows}


def test_the_page_of_commands_has_every_verb():
  """What each prints is compared where it is run: commands/test_commands.py."""
  text = options.PAGE.read_text()
  assert re.findall(r"^## (\w+)$", text, re.M) == list(COMMANDS)
  for verb, command in COMMANDS.items():
    assert f"| [`{verb}`](#{verb}) | {command.about} |\n" in text
