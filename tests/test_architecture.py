"""Who may import whom: the layers of the rooms, and what is heavy."""

import ast
import gc
import graphlib
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "vit_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lower layers first. A room, which is a folder or a module of vit_jax, imports
# its own layer and those below, in functions, too.
LAYERS = (
  "version options names bucket paths class_names batch devices",
  "families",
  "losses metrics ridge malloc models",
  "objectives evaluators",
  "data",
  "config",
  "param_groups schedules microbatch",
  "optim",
  "optim_checks",
  "sharding collectives digests",
  "trainable step_checks",
  "step",
  "distributed writers",
  "checkpointing",
  "weights",
  "inference",
  "missing_data eval_context experiment run_checks",
  "run_summary inputs",
  "callbacks",
  "__init__",
  "train evaluate",
  "finetune",
  "self_supervised",
  "zoo",
  "tools",
  "commands",
  "__main__",
)
LAYER = {room: i for i, layer in enumerate(LAYERS) for room in layer.split()}

# The wings, which a reader of the paper's codebase can skip; and the tables of
# that codebase that name what is in them.
WINGS = ("finetune", "self_supervised", "zoo", "tools")
TABLES = (
  "callbacks/defaults",
  "data/download_and_prepare",
  "data/sources",
  "families/__init__",
  "inputs",
  "models/__init__",
  "trainable",
  "weights/reading",
)

TENSORFLOW = {"tensorflow", "tensorflow_datasets"}
JAX = {"jax", "flax", "optax", "orbax"}
LIGHT = (
  "names",
  "options",
  "paths",
  "class_names",
  "families",
  "objectives",
  "evaluators",
  "config",
)


def _module(path):
  """Returns the name of a file's module; that of a package is its folder's."""
  parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
  return ".".join(parts).removesuffix(".__init__")


MODULES = {_module(path) for path in FILES}


def _room(path):
  return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.fixture(scope="module")
def trees():
  gc.disable()  # within `ast.parse`, Python 3.11 may fail by a collection
  try:
    return {path: ast.parse(path.read_text()) for path in FILES}
  finally:
    gc.enable()


def _imports(tree):
  """Yields (module, whether it is imported with the file).

  Lines under `if __name__ == "__main__"` are a program, not the module.
  """
  tree.body = [
    node
    for node in tree.body
    if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
  ]
  at_once = {*tree.body}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((a.name, node in at_once) for a in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"relative import of {node.module}"
      for alias in node.names:
        name = f"{node.module}.{alias.name}"
        yield name if name in MODULES else node.module, node in at_once


def _forbidden(where, package, at_once):
  """Whether a file may not import a library."""
  room = where.parts[0]
  if package == "orbax":  # its version 1.0 moves its names
    return str(where) != "checkpointing/orbax_files.py"
  if "data" in where.parts[:2]:
    return package in JAX
  return package in TENSORFLOW or (room in LIGHT and at_once and package in JAX)


def test_imports(trees):
  """One pass over all files: layers, circles, heavy libraries.

  And whether families are compared by name: what differs between them is asked
  of config.model.
  """
  errors = []
  files, rooms = graphlib.TopologicalSorter(), graphlib.TopologicalSorter()
  for path, tree in trees.items():
    room, where = _room(path), path.relative_to(PACKAGE)
    if room not in ("weights", "families", "zoo"):
      compared = (x for x in ast.walk(tree) if isinstance(x, ast.Compare))
      if any("model.name" in ast.unparse(x) for x in compared):
        errors.append(f"{where} compares a model's name")
    if room not in LAYER:
      errors.append(f"{where}: {room} has no layer")
      continue
    if room == "__init__":  # `vit_jax` names its modules for type checkers
      tree.body = [x for x in tree.body if not isinstance(x, ast.If)]
    for name, at_once in _imports(tree):
      package, *rest = name.split(".")
      if _forbidden(where, package, at_once):
        errors.append(f"{where} imports {name}")
      if package != "vit_jax":
        continue
      other = rest[0] if rest else "__init__"
      files.add(_module(path), name)
      if other in WINGS and str(where.with_suffix("")) in TABLES:
        continue
      if other != room:
        rooms.add(room, other)
      if LAYER[other] > LAYER[room]:
        errors.append(f"{where} imports {name}, which is above")
  assert not errors, "\n".join(errors)
  for graph in (files, rooms):
    graph.prepare()  # raises CycleError, which names the circle


def _after(module, at_once):
  """Returns the modules of vit_jax that are imported with one, and itself."""
  found, new = set(), {module}
  while new:
    found |= new
    parents = {name.rpartition(".")[0] for name in new} - {""}
    new = parents.union(*(at_once[name] for name in new)) & MODULES - found
  return found


def test_what_is_imported_with_a_module(trees):
  """A run from scratch has, of the wings, what the tables of kinds need."""
  at_once = {
    _module(path): {name for name, with_file in _imports(tree) if with_file}
    for path, tree in trees.items()
  }

  def heavy(room):
    modules = _after(f"vit_jax.{room}", at_once)
    names = set().union(*(at_once[module] for module in modules))
    return {n.partition(".")[0] for n in names} & (TENSORFLOW | JAX)

  for room in ("models", "distributed.signals"):
    assert not heavy(room)
  rooms = "losses step weights sharding checkpointing train"
  for room in [*rooms.split(), "tools.reporting.report"]:
    assert not heavy(room) & TENSORFLOW, room
  run = _after("vit_jax.train", at_once) | _after("vit_jax.weights", at_once)
  wings = tuple(f"vit_jax.{wing}." for wing in WINGS)
  assert {name for name in run if name.startswith(wings)} == {
    "vit_jax.zoo.families",
    "vit_jax.zoo.families.modern",
  }


HELP = """
import contextlib, io, sys
from vit_jax.commands import COMMANDS
with contextlib.redirect_stdout(io.StringIO()):
  for verb in COMMANDS:
    with contextlib.suppress(SystemExit):
      COMMANDS[verb].main(["--help"])
print(*sys.modules)
"""


def test_what_help_loads():
  """Whoever asks for help waits for no library that takes long to import."""
  done = subprocess.run(
    [sys.executable, "-c", HELP], stdout=subprocess.PIPE, text=True, check=True
  )
  packages = {name.partition(".")[0] for name in done.stdout.split()}
  assert packages >= {"numpy"}
  others = "jaxtyping etils PIL matplotlib scipy sklearn pandas torch einops"
  assert not packages & (TENSORFLOW | JAX | {*others.split()})
