"""Short names of a table, and import paths."""

import sys

import pytest

from vit_jax import names

TABLE = {"int": int, "text": str}
FILES = {
  "own_a.py": "class Number(int):\n  class Inner(int):\n    pass\nvalue = 3\n",
  "own_broken.py": "x = 1\ny = x.missing\n",
  "own_needs.py": "import absent_library\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path))
  for name, text in FILES.items():
    (tmp_path / name).write_text(text)
  yield
  for name in [n for n in sys.modules if n.startswith("own_")]:
    del sys.modules[name]


def test_table_and_paths():
  assert names.resolve("int", TABLE, "config.x") is int
  number = names.resolve("own_a:Number", TABLE, "config.x", int)
  assert number(4) == 4 and number.__module__ == "own_a"
  inner = names.resolve("own_a:Number.Inner", {}, "config.x")
  assert inner.__qualname__ == "Number.Inner"


# What is wrong, and key words of its error.
WRONG = {
  "itn": "int, text",
  "absent_lab.a:B": "PYTHONPATH",
  "own_a.b:B": "own_a",
  "own_needs:B": "'absent_library'",
  "own_a:Nubmer": "'Number'",
  "own_a:value": "builtins.int",
  "own_broken:B": "own_broken.py, line 2",
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_option_and_the_cause(name):
  with pytest.raises(ValueError, match="^config.x.kind: ") as error:
    names.resolve(name, TABLE, "config.x.kind", int)
  assert WRONG[name] in str(error.value)
