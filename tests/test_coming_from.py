"""docs/coming_from.md: every name of ours in its tables exists."""

import dataclasses
import importlib
import pathlib
import re

from vit_jax.commands.convert import FORMATS
from vit_jax.config import parse
from vit_jax.config.commands import COMMANDS
from vit_jax.config.preprocessing import SHAPE_FNS, parse_ops
from vit_jax.config.schema import UNIONS, Config
from vit_jax.evaluators import EVALUATORS
from vit_jax.families import by_variant

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "coming_from.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| (.*?) \|$", TEXT.replace("\\|", "¦"), re.M)
OURS = [
  name.replace("¦", "|")
  for there, here in ROWS
  if there != "there"
  for name in re.findall(r"`([^`]+)`", here)
]


def fields(path):
  """Returns the options at a path such as ("optim", "lr"); None: none."""
  classes = [Config]
  if path[0] == "evals":
    path, classes = path[2:], list(EVALUATORS.values())
  for i, name in enumerate(path):
    found = [
      f for c in classes for f in dataclasses.fields(c) if f.name == name
    ]
    if not found:
      return None
    if i == 0 and name in UNIONS:
      classes = list(UNIONS[name][1].values())
    else:
      classes = [f.type for f in found if dataclasses.is_dataclass(f.type)]
  return found


def test_there_are_three_tables():
  assert TEXT.count("| there | here |") == 3
  assert len(ROWS) > 120 and len(set(ROWS)) > 120
  assert fields(("optim", "lr")) and not fields(("optim", "wd"))
  assert fields(("evals", "val", "ops")) and not fields(("evals", "val", "pp"))
  assert fields(("model", "dropout")) and not fields(("pp",))


def test_options_exist():
  names = [n for n in OURS if re.fullmatch(r"config(\.\w+)+", n)]
  names = [n for n in names if n != "config.json"]  # a file
  assert len(names) > 60
  for name in names:
    assert fields(name.split(".")[1:]), name


def test_files_exist():
  for path in re.findall(r"\b((?:vit_jax|docs)/[\w/]+\.(?:py|md))", str(OURS)):
    assert (ROOT / path).exists(), path
  for path in re.findall(r"`(docs/\w+\.md)`", TEXT):
    assert (ROOT / path).exists(), path


def test_configs_take_these_arguments():
  configs = [
    re.match(r"(?:--config=)?configs/(\w+)\.py(?::(.*))?$", n) for n in OURS
  ]
  configs = [m for m in configs if m]
  assert len(configs) > 6
  for match in configs:
    module = importlib.import_module(f"configs.{match[1]}")
    text = match[2] or ""
    if "..." in text or "init=" in text or "path=" in text:
      known = set(module.ARGUMENTS)
      given = {part.partition("=")[0] for part in text.split(",")}
      assert given - {"..."} <= known, match[0]
    elif match[2]:
      parse.freeze(module.get_config(text))


def test_commands_and_formats_exist():
  verbs = re.findall(r"vit-jax (\w+)", str(OURS))
  assert len(verbs) > 8 and set(verbs) <= COMMANDS.keys()
  formats = re.findall(r"--to=(\w+)", TEXT)
  assert formats and set(formats) <= set(FORMATS)


def test_models_and_operations_exist():
  models = [n for n in OURS if re.fullmatch(r"[A-Z]\w*(\+\w+)?/\d+|R\d+x\d", n)]
  assert len(models) > 8
  for name in models:
    assert by_variant(name), name
  ops = [n for n in OURS if re.match(r"\w+(\(.*\))?(\|\w+(\(.*\))?)*$", n)]
  ops = [n for n in ops if n.partition("(")[0].partition("|")[0] in SHAPE_FNS]
  assert len(ops) > 4
  for text in ops:
    parse_ops(text)


def test_choices_exist():
  """`config.model.pool`: `token`, `gap` - choices of that option."""
  pairs = re.findall(r"`config\.([\w.]+)`: ((?:`\w+`(?:, )?)+)", TEXT)
  ours = {n.removeprefix("config.") for n in OURS}
  seen = 0
  for path, names in pairs:
    found = fields(path.split("."))
    if path not in ours or not found:
      continue  # theirs
    choices = {c for f in found for c in f.metadata.get("choices") or ()}
    seen += 1
    assert set(re.findall(r"`(\w+)`", names)) <= choices or not choices, path
  assert seen > 6
