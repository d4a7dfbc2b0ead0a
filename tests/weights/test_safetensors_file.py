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
    "a.weight": rng.standard_normal((4, 3)).astype(dtype).T,
    "b.bias": rng.standard_normal(5).astype(dtype),
  }


def assert_same(got, expected):
  assert got.keys() == expected.keys()
  for name, array in expected.items():
    assert got[name].shape == array.shape and got[name].dtype == array.dtype
    for _ in range(2):  # every use reads again
      copy = np.asarray(got[name])
      np.testing.assert_array_equal(copy, array, name)
      copy[...] = 0


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


def test_several_files_and_their_index(tmp_path):
  names = {}
  for i, (name, array) in enumerate(make().items()):
    names[name] = f"model-{i}.safetensors"
    write(tmp_path / names[name], {name: array}, {})
  index = tmp_path / INDEX
  index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
  arrays, metadata = open_safetensors(index)
  assert_same(arrays, make())
  assert metadata == {}
  (tmp_path / "model-1.safetensors").unlink()
  with pytest.raises(ValueError, match="without model-1.safetensors"):
    open_safetensors(index)
  for text in ("{", '{"weight_map": [1]}'):
    index.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(index))}.* got"):
      open_safetensors(index)


def test_other_types_are_refused(tmp_path):
  path = tmp_path / "x.safetensors"
  save_file({"a": np.arange(3, dtype=np.uint16)}, path)
  with pytest.raises(ValueError) as e:
    open_safetensors(path)
  assert f"{path}: 'a': got type U16" in str(e.value)


def oversized(path):
  header = {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 8]}}
  text = json.dumps(header).encode()
  return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
  "change",
  [
    *(lambda path, n=n: path.read_bytes()[:n] for n in (4, 60, -1)),
    oversized,
  ],
)
def test_a_damaged_file_is_refused(tmp_path, change):
  path = tmp_path / "x.safetensors"
  write(path, make(), {})
  path.write_bytes(change(path))
  with pytest.raises(
    ValueError,
    match=f"got '{re.escape(str(path))}', expected a whole .safetensors file"
    r" \(.*\)",
  ):
    open_safetensors(path)
