"""Short names of a table, and import paths."""

import sys

import pytest

from vit_jax import names

TABLE = {"int": int, "text": str}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "own_a.py").write_text(
    "class Number(int):\n  class Inner(int):\n    pass\nvalue = 3\n"
  )
  (tmp_path / "own_broken.py").write_text("x = 1\ny = x.missing\n")
  (tmp_path / "own_wrong.py").write_text("x = (\n")
  (tmp_path / "own_needs.py").write_text("import absent_library\n")
  yield
  for name in [n for n in sys.modules if n.startswith("own_")]:
    del sys.modules[name]


def test_table_and_paths():
  assert names.resolve("int", TABLE, "config.x") is int
  number = names.resolve("own_a:Number", TABLE, "config.x", int)
  assert number(4) == 4 and number.__module__ == "own_a"
  inner = names.resolve("own_a:Number.Inner", {}, "config.x")
  assert inner.__qualname__ == "Number.Inner"


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("itn", ["'itn'", "expected one of int, text."]),
    ("absent_lab.a:B", ["no module 'absent_lab'", "PYTHONPATH"]),
    ("own_a.b:B", ["own_a"]),
    ("own_needs:B", ["'absent_library'"]),
    ("own_a:Nubmer", ["own_a has no Nubmer. Did you mean 'Number'?"]),
    ("own_a:Number(a=1)", ["'own_a:Number(a=1)'", "package.module:Class"]),
    ("own_a:value", ["subclass of builtins.int"]),
    ("own_broken:B", ["own_broken.py, line 2", "AttributeError"]),
    ("own_wrong:B", ["own_wrong.py, line 1", "SyntaxError"]),
  ],
)
def test_one_sentence_says_what_is_wrong(name, words):
  with pytest.raises(ValueError) as error:
    names.resolve(name, TABLE, "config.x.kind", int)
  text = str(error.value)
  assert text.startswith("config.x.kind: ")
  assert all(word in text for word in words), text
