"""Files that others wrote are read within limits, or refused in words."""

import ast
import json
import pathlib
import pickle
import random

import hostile
import hostile_attacks
import hostile_readers
import pytest

from vit_jax.config import json_file

PACKAGE = pathlib.Path(__file__).parents[1] / "vit_jax"
# What runs code from a file, or writes its members where they say.
FORBIDDEN = {
  *("pickle.load", "pickle.loads", "pickle.Unpickler", "dill", "joblib.load"),
  *("shelve", "marshal", "torch.load", "np.load", "numpy.load", "eval"),
  *("extractall", "unpack_archive", "read_pickle"),
  *("xml", "yaml.load", "yaml.unsafe_load", "cloudpickle"),
}
# Quick ones; the trial has them all, and more of each.
QUICK = {
  **{"npz": 25, "npz_big_vision": 5, "npy": 10, "timm": 25, "timm_config": 10},
  **{"hf": 30, "index": 20, "torch_zip": 10, "torch_pickle": 10, "onnx": 10},
  **{"checkpoint": 10, "orbax": 5, "webdataset": 40, "webdataset_gz": 20},
  **{"parquet": 30, "classes": 20, "run": 40, "config": 30},
}


def _names(path):
  """Yields what a file calls and imports, with dots."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call):
      name = ast.unparse(node.func)
      yield name
      yield name.rpartition(".")[2]
      for keyword in node.keywords:
        if keyword.arg == "allow_pickle":
          yield f"allow_pickle={ast.unparse(keyword.value)}"
    elif isinstance(node, ast.Import):
      yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{a.name}" for a in node.names)


def test_nothing_is_unpickled_or_extracted():
  forbidden = FORBIDDEN | {"pickle", "allow_pickle=True"}
  for path in sorted(PACKAGE.rglob("*.py")):
    names = set(_names(path))
    assert not forbidden & names, path
    if names & {"tarfile", "zipfile"}:
      assert "extract" not in names, path


def test_pillow_is_told_which_formats_to_open():
  for path in sorted(PACKAGE.rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == "Image.open":
        told = ast.unparse(node)
        assert "formats" in {k.arg for k in node.keywords}, f"{path}: {told}"


def test_the_search_finds_what_it_looks_for(tmp_path):
  path = tmp_path / "x.py"
  for text, found in (
    ("import pickle", "pickle"),
    ("np.load(x)", "np.load"),
    ("np.lib.format.read_array(f, allow_pickle=True)", "allow_pickle=True"),
    ("tar.extractall('/')", "extractall"),
    ("from torch import load", "torch.load"),
  ):
    path.write_text(text)
    assert found in set(_names(path)), text


@pytest.mark.slow
def test_damaged_files_end_in_words(tmp_path):
  seed = random.SystemRandom().randrange(10**6)
  found = hostile.run(tmp_path, QUICK, seed, 300)
  told = "\n".join(found["faults"])
  assert not found["faults"], f"seed {seed}:\n{told}"
  of = found["readers"]
  assert of.keys() == QUICK.keys()
  for name, count in QUICK.items():
    assert of[name].get("read", 0) + of[name].get("refused", 0) == count


@pytest.mark.slow
def test_attacks_end_in_words_and_leave_no_trace(tmp_path):
  counts = dict.fromkeys(hostile_readers.READERS, 0)
  found = hostile.run(tmp_path, counts, 0, 900)
  assert not found["faults"], "\n".join(found["faults"])
  trace = tmp_path / hostile_attacks.TRACE
  assert not trace.exists()
  pickle.loads(pickle.dumps(hostile_attacks.Touch(trace)))
  assert trace.exists()  # it would have been there


# The few that are quick, in this process.
@pytest.mark.parametrize(
  "text, said",
  [
    (hostile_attacks.DEEP, "more than 100 levels"),
    (b'{"a":' * 1000 + b"1" + b"}" * 1000, "more than 100 levels"),
    (b"[" * 101 + b"]" * 101, "more than 100 levels"),
    (hostile_attacks.MANY, "about 600,001 values, expected 500,000"),
    (hostile_attacks.LONG, "got more than 16,777,216 bytes"),
    (b'{"a": 1, "b": {"c": 1, "c": 2}}', "two values of the name 'c'"),
    (b'{"a": -1%s}' % (b"0" * 39), "a whole number beyond 128 bits"),
    (b"9" * 5000, "got no JSON"),
    (b'"\\ud800"', "surrogates not allowed"),
    (b"\xff\xfe", "can't decode"),
    (b"{", "Expecting property name"),
  ],
)
def test_json_beyond_its_limits(text, said):
  with pytest.raises(ValueError) as e:
    json_file.parse(text, "a.json")
  assert type(e.value) is ValueError
  assert str(e.value).startswith("a.json: got ") and said in str(e.value)


def test_json_within_its_limits():
  deep = b"[" * 100 + b"]" * 100
  assert json_file.parse(deep, "a.json")
  names = {str(i): f"class, {i}" for i in range(43_000)}
  assert json_file.parse(json.dumps(names), "a.json") == names
  assert json_file.parse(b"[NaN, 1e400, 9223372036854775807]", "a.json")


@pytest.mark.parametrize(
  "value, shape, faults",
  [
    ({"a": 1, "b": "x"}, {"a": int, "b": str}, []),
    ({"a": None, "z": []}, {"a": int}, []),
    ({"a": -1}, {"a": int}, ["a: got -1, expected a whole number from 0."]),
    ({"a": True}, {"a": int}, ["a: got True, expected a whole number from 0."]),
    (
      {"a": float("nan")},
      {"a": float},
      ["a: got nan, expected a finite number."],
    ),
    ([], {"a": int}, [": got [], expected options by name."]),
    ({"a": [1, None]}, {"a": [int]}, ["a[1]: got None, expected a value."]),
    ({"a": [1]}, {"a": (int, int)}, ["a: got [1], expected 2 values."]),
    ({"a": 3}, {"a": [int]}, ["a: got 3, expected a list."]),
    ({"a": {"b": 1}}, {str: {str: str}}, ["a.b: got 1, expected text."]),
    (
      {"a": {"b": None}},
      {"a": {str: str}},
      ["a.b: got None, expected a value."],
    ),
    (
      {"a": 0, "b": 2**16},
      {"a": json_file.SIDE, "b": json_file.SIDE},
      ["a: got 0, expected a whole number from 1."],
    ),
  ],
)
def test_shapes(value, shape, faults):
  assert list(json_file.faults(value, shape, "")) == faults


def test_lines_that_are_none_are_counted(tmp_path):
  path = tmp_path / "x.jsonl"
  path.write_bytes(
    b'{"a": 1}\n\n[1]\n{"a"\n\xff\n' + b"{" * 10**5 + b'\n{"b":NaN}'
  )
  numbers, rows = zip(*json_file.lines(path), strict=True)
  assert numbers == (1, 3, 4, 5, 6, 7)
  assert rows[:5] == ({"a": 1}, None, None, None, None)
  assert rows[5]["b"] != rows[5]["b"] and len(rows) == 6
