"""Reading and writing `.safetensors`, in one file or in several."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vit_jax.weights.safetensors_file import INDEX, open_safetensors, write


def make(dtype=np.float32):
  rng = np.random.default_rng(0)
  return {
    "a.weight": rng.standard_normal((4, 3)).astype(dtype),
    "b.bias": rng.standard_normal(5).astype(dtype),
  }


def assert_same(got, expected):
  assert got.keys() == expected.keys()
  for name, array in expected.items():
    assert got[name].shape == array.shape and got[name].dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(got[name]), array, name)


@pytest.mark.parametrize(
  "dtype", [np.float64, np.float32, np.float16, jnp.bfloat16]
)
def test_what_is_written_is_read_as_it_was(tmp_path, dtype):
  path = tmp_path / "x.safetensors"
  write(path, make(dtype), {"vit_jax": {"names": ["α", "b"]}})
  arrays, metadata = open_safetensors(path)
  assert_same(arrays, make(dtype))
  # PyTorch's loaders ask for the format.
  assert metadata == {"format": "pt", "vit_jax": '{"names": ["α", "b"]}'}
  assert load_file(path).keys() == make().keys()


def test_what_is_not_contiguous_is_written_by_value(tmp_path):
  array = np.arange(12, dtype=np.float32).reshape(3, 4)
  write(tmp_path / "x.safetensors", {"a": array.T}, {})
  assert_same(open_safetensors(tmp_path / "x.safetensors")[0], {"a": array.T})


def test_every_look_reads_again(tmp_path):
  path = tmp_path / "x.safetensors"
  write(path, make(), {})
  found = open_safetensors(path)[0]["b.bias"]
  first = np.asarray(found)
  first[:] = 0  # a copy of its own
  np.testing.assert_array_equal(np.asarray(found), make()["b.bias"])


def test_several_files_and_their_index(tmp_path):
  expected = make()
  names = {}
  for i, (name, array) in enumerate(expected.items()):
    names[name] = f"model-{i}.safetensors"
    write(tmp_path / names[name], {name: array}, {})
  index = tmp_path / INDEX
  index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
  arrays, metadata = open_safetensors(index)
  assert_same(arrays, expected)
  assert metadata == {}

  (tmp_path / "model-1.safetensors").unlink()
  with pytest.raises(ValueError) as e:
    open_safetensors(index)
  assert str(e.value) == (
    f"got '{index}' without model-1.safetensors, expected all 2 files that it"
    " names."
  )
  for text in ("{", "{}", "[1]", '{"weight_map": 3}', '{"weight_map": [1]}'):
    index.write_text(text)
    with pytest.raises(
      ValueError, match="cannot be read as an index of .safetensors .*copy it"
    ):
      open_safetensors(index)


def test_other_types_are_refused(tmp_path):
  path = tmp_path / "x.safetensors"
  save_file({"a": np.arange(3)}, path)
  with pytest.raises(ValueError) as e:
    open_safetensors(path)
  assert str(e.value) == (
    f"{path}: got type I64 in 'a', expected one of F64, F32, F16, BF16."
  )


@pytest.mark.parametrize("length", [4, 8, 9, 60, -40, -1])
def test_a_cut_file_is_refused(tmp_path, length):
  path = tmp_path / "x.safetensors"
  write(path, make(), {})
  path.write_bytes(path.read_bytes()[:length])
  with pytest.raises(
    ValueError,
    match=f"got '{re.escape(str(path))}', which cannot be read as .safetensors"
    r" \(.*\); expected a whole file: copy it again, and compare its size.",
  ):
    open_safetensors(path)
