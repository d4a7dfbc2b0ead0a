"""The layers hold: who may import whom, and what is heavy."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "vit_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lower layers first; a module may import its own layer and those below.
LAYERS = (
  "options batch devices paths",
  "families objectives evaluators",
  "config",
  "losses metrics models optim ridge",
  "sharding collectives",
  "step weights checkpointing distributed writers callbacks experiment"
  " inference planning train_batches missing_data malloc matmul_peak",
  "commands train benchmark reporting scoring sweep __main__",
)
LAYER = {m: i for i, layer in enumerate(LAYERS) for m in layer.split()}
# Packages of which every file is one choice, with the options that it has.
# config imports them all, so they import nothing heavy but in their functions.
KINDS = ("families", "objectives", "evaluators")
INPUT_MAY_USE = [*" ".join(LAYERS[:3]).split(), "data"]


def _imports(path, also_in_functions=True):
  """Yields the dotted names that a file imports."""
  tree = ast.parse(path.read_text())
  for node in ast.walk(tree) if also_in_functions else tree.body:
    if isinstance(node, ast.Import):
      yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      yield node.module
      yield from (f"{node.module}.{a.name}" for a in node.names)


def _rooms(path):
  """Yields the top-level modules of the package that a file imports.

  What is a kind of something (see `KINDS`) imports in its functions whatever
  they need.
  """
  is_kind = _room(path) in KINDS
  for name in _imports(path, also_in_functions=not is_kind):
    parts = name.split(".")
    if parts[0] == "vit_jax" and len(parts) > 1:
      yield parts[1]


def _room(path):
  return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(_room(p)))
def test_imports_only_from_layers_below(path):
  room = _room(path)
  known = {*LAYER, "data"}
  used = set(_rooms(path)) & known
  if room == "data":
    assert used <= set(INPUT_MAY_USE)
  elif room != "__init__":
    assert room in LAYER, f"give {room} a layer"
    if LAYER[room] < LAYER["step"] or room in ("step", "weights"):
      assert "data" not in used
    above = {m for m in used - {"data"} if LAYER[m] > LAYER[room]}
    assert not above


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(_room(p)))
def test_no_heavy_import_where_it_does_not_belong(path):
  room = _room(path)
  packages = {n.split(".")[0] for n in _imports(path, room not in KINDS)}
  if room == "data":
    assert not packages & {"jax", "flax", "optax"}
  else:
    assert not packages & {"tensorflow", "tensorflow_datasets"}
  if LAYER.get(room, 9) <= LAYER["config"]:
    assert not packages & {"jax", "flax", "optax", "orbax"}


def _modules_after(code):
  code += "; import sys; print(*sys.modules)"
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  return set(out.stdout.split())


def test_needs_no_tensorflow():
  """One process imports all, and tells which of them loads it."""
  names = (
    "losses models step weights sharding checkpointing.checkpointer"
    " commands.report benchmark"
  )
  code = (
    "import importlib, sys\n"
    f"for name in {names.split()}:\n"
    "  importlib.import_module(f'vit_jax.{name}')\n"
    "  assert 'tensorflow' not in sys.modules, name\n"
  )
  code += "assert not {'tensorflow', 'tensorflow_datasets'} & {*sys.modules}"
  done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE)
  assert done.returncode == 0, done.stderr.decode()


def test_words_need_nothing_heavy():
  modules = _modules_after(
    "import vit_jax.config.cli, vit_jax.config.recipes, vit_jax.models,"
    " vit_jax.distributed.signals"
  )
  assert not modules & {"jax", "flax", "tensorflow", "optax"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(_room(p)))
def test_only_weights_compare_names_of_families(path):
  """What differs between families is asked of config.model."""
  if _room(path) in ("weights", "families"):
    return
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Compare):
      text = ast.unparse(node)
      assert "model.name" not in text, f"{path}: {text}"
