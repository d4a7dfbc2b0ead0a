"""The examples in docstrings of all modules."""

import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = [
  path.relative_to(ROOT).with_suffix("")
  for path in sorted((ROOT / "vit_jax").rglob("*.py"))
  if ">>> " in path.read_text()
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_examples(file):
  name = ".".join(file.parts).removesuffix(".__init__")
  failed, attempted = doctest.testmod(importlib.import_module(name))
  assert attempted and not failed
