"""Writes the signatures of the public names into docs/api.md.

Run: python benchmarks/api.py
"""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from tables import with_tables

PAGE = ROOT / "docs/api.md"
WIDTH = 88
# Name of a block in the page -> module, names. A class is shown with all its
# public members.
BLOCKS = {
  "load": ("vit_jax", ("load", "build")),
  "pretrained": (
    "vit_jax.inference.pretrained",
    ("Pretrained", "Prediction", "Value", "Answer", "FeatureRow"),
  ),
  "images": ("vit_jax.inference.streaming", ("find", "Named")),
  "convert": ("vit_jax.tools.exporting.convert", ("convert",)),
  "network": ("vit_jax.models", ("build",)),
  "configs": (
    "vit_jax.config",
    ("defaults", "recipe", "freeze", "ConfigError"),
  ),
  "train": ("vit_jax.train", ("train_and_evaluate",)),
  "evaluate": ("vit_jax.evaluate", ("evaluate",)),
  "arguments": (
    "vit_jax.config",
    ("arguments", "check_choices", "number", "whole_number", "fewshot_evals"),
  ),
  "records": ("vit_jax.data.records", ("Records",)),
  "sources": ("vit_jax.data.sources", ("open_source",)),
  "batches": ("vit_jax.data.pipeline", ("train_batches", "eval_batches")),
  "batch": (
    "vit_jax.batch",
    ("DataInfo", "Data", "Batch", "View", "normalise"),
  ),
  "callbacks": ("vit_jax.callbacks", ("Callback", "Stop")),
}
SHOWN = ("__call__", "__len__", "__getitem__")
# Interfaces of what a config names by an import path.
BASES = (
  ("vit_jax.options", "option"),
  ("vit_jax.families", "ModelConfig"),
  ("vit_jax.models.posemb", "LearnedOn"),
  ("vit_jax.objectives.objective", "Objective"),
  ("vit_jax.objectives.objective", "Learner"),
  ("vit_jax.objectives.objective", "Targets"),
  ("vit_jax.objectives.objective", "Average"),
  ("vit_jax.objectives.objective", "Frozen"),
  ("vit_jax.evaluators.evaluator", "EvaluatorConfig"),
  ("vit_jax.evaluators.evaluator", "Evaluator"),
  ("vit_jax.evaluators.evaluator", "Context"),
  ("vit_jax.data.operation", "Operation"),
  ("vit_jax.writers.trackers", "Tracker"),
)
# Names of types in signatures -> what they stand for.
ALIASES = {
  "normalisation.Statement": "str | float | Sequence[float] | None",
  "records.Given": "Mapping[str, Mapping[str, Records]]",
  "Given": "Mapping[str, Mapping[str, Records]]",
}


def definition(module: str, name: str) -> tuple[ast.stmt, pathlib.Path]:
  """Returns the definition of a public name, and its file."""
  thing = getattr(importlib.import_module(module), name)
  file = pathlib.Path(inspect.getsourcefile(sys.modules[thing.__module__]))
  for node in ast.parse(file.read_text()).body:
    if getattr(node, "name", None) == name:
      return node, file
  raise ValueError(f"{file} has no {name}.")


def sentence(node: ast.stmt) -> str:
  """Returns the first sentence of a docstring."""
  text = (ast.get_docstring(node) or "").partition("\n\n")[0]
  return " ".join(text.split())


def signature(node: ast.FunctionDef, indent: str = "") -> Iterator[str]:
  """Yields a function's signature with its types, and its meaning above."""
  if text := sentence(node):
    yield f"{indent}# {text}"
  if any("property" in ast.unparse(d) for d in node.decorator_list):
    yield f"{indent}{node.name}: {annotation(node.returns)}"
    return
  result = f" -> {annotation(node.returns)}" if node.returns else ""
  line = f"{indent}def {node.name}({', '.join(arguments(node.args))}){result}"
  if len(line) <= WIDTH:
    yield line
    return
  yield f"{indent}def {node.name}("
  for argument in arguments(node.args):
    yield f"{indent}  {argument},"
  yield f"{indent}){result}"


def annotation(node: ast.expr) -> str:
  """Returns a type; one that is a text, without its quotes."""
  is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
  text = node.value if is_text else ast.unparse(node)
  for alias, meaning in ALIASES.items():
    text = re.sub(rf"(?<![\w.]){alias}\b", meaning, text)
  return text


def arguments(node: ast.arguments) -> Iterator[str]:
  """Yields the arguments of a signature, each with its type and default."""
  plain = [*node.posonlyargs, *node.args]
  defaults = [None] * (len(plain) - len(node.defaults)) + node.defaults
  keywords = [*zip(node.kwonlyargs, node.kw_defaults, strict=True)]
  for argument, default in [*zip(plain, defaults, strict=True), *keywords]:
    if keywords and argument is keywords[0][0] and not node.vararg:
      yield "*"
    equals = " = " if argument.annotation else "="
    value = f"{equals}{ast.unparse(default)}" if default is not None else ""
    kind = f": {annotation(argument.annotation)}" if argument.annotation else ""
    yield f"{argument.arg}{kind}{value}"
  if node.kwarg:
    yield f"**{ast.unparse(node.kwarg)}"


def members(node: ast.ClassDef) -> Iterator[str]:
  """Yields a class with its public fields and methods."""
  yield f"# {sentence(node)}"
  bases = ", ".join(map(ast.unparse, node.bases))
  yield f"class {node.name}" + (f"({bases}):" if bases else ":")
  for i, item in enumerate(node.body):
    if isinstance(item, ast.AnnAssign) and item.target.id[0] != "_":
      yield f"  {ast.unparse(item)}"
    elif isinstance(item, ast.FunctionDef):
      if item.name[0] != "_" or item.name in SHOWN:
        if i > 1:  # the first is the docstring
          yield ""
        yield from signature(item, "  ")


def code(module: str, names: tuple[str, ...]) -> str:
  """Returns the block of a module's names; it is shown, and not run."""
  blocks = []
  for name in names:
    node, _ = definition(module, name)
    is_class = isinstance(node, ast.ClassDef)
    blocks.append("\n".join(members(node) if is_class else signature(node)))
  text = "\n\n".join(blocks)
  return f"```py\n# {module}\n\n{text}\n```"


def interfaces() -> str:
  """Returns the table of `BASES`."""
  rows = ["| name | meaning |", "|---|---|"]
  for module, name in BASES:
    node, file = definition(module, name)
    link = f"../{file.relative_to(ROOT)}"
    rows.append(f"| [`{module}.{name}`]({link}) | {sentence(node)} |")
  return "\n".join(rows)


def page() -> str:
  """Returns docs/api.md with its blocks made anew."""
  made = {
    name: functools.partial(code, module, names)
    for name, (module, names) in BLOCKS.items()
  }
  return with_tables(PAGE.read_text(), {**made, "interfaces": interfaces})


if __name__ == "__main__":
  PAGE.write_text(page())
