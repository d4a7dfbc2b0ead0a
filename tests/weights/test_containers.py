"""`.npz` and `.safetensors`: one array at a time, nothing unpickled."""

import io
import json
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from weight_files import assert_same

from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.safetensors_file import INDEX, open_safetensors, write

ARRAYS = {
  "a/b": np.arange(15, dtype="f").reshape(3, 5),
  "columns": np.asfortranarray(np.arange(8.0).reshape(4, 2)),
  "half": np.random.default_rng(0).standard_normal(9000).astype("e"),
}


def test_bfloat16_is_recovered(tmp_path):
  array = jnp.asarray([1.0, -2.5, 3e38], jnp.bfloat16)
  np.savez(tmp_path / "x.npz", cls=np.asarray(array))
  got = open_npz(tmp_path / "x.npz")["cls"]
  assert got.dtype == jnp.bfloat16 and np.asarray(got).dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, array)


def test_opening_reads_headers_alone_and_each_use_reads_again(tmp_path):
  np.savez(file := tmp_path / "x.npz", **ARRAYS)  # not compressed
  got = open_npz(file)
  assert_same(got, ARRAYS)
  for name, array in ARRAYS.items():
    assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype)
  whole = bytearray(file.read_bytes())
  whole[whole.index(ARRAYS["half"].tobytes()) + 10_000] ^= 1
  file.write_bytes(whole)
  arrays = open_npz(file)
  changed = arrays["a/b"].then((15,), np.ravel)  # as lazy as before
  assert changed.shape == (15,)
  np.asarray(changed)[:] = 0
  assert np.asarray(changed).any()
  for _ in range(2):
    with pytest.raises(ValueError, match="half.npy"):
      np.asarray(arrays["half"])


def _table_of_contents(offset, value):
  """Returns what changes bytes of the first record of the central directory."""

  def change(whole):
    at = whole.index(b"PK\x01\x02") + offset
    whole[at : at + len(value)] = value
    return whole

  return change


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda whole: whole[: len(whole) // 99], "not a zip file"),
    (lambda whole: whole[:-1], "not a zip file"),
    (_table_of_contents(0, b"XX"), "central directory"),
    (_table_of_contents(10, b"\x63"), "compression method"),
    (_table_of_contents(46, b"X"), "differ"),  # the name
  ],
)
def test_a_damaged_npz_is_refused(tmp_path, change, message):
  np.savez(file := tmp_path / "x.npz", **ARRAYS)
  file.write_bytes(change(bytearray(file.read_bytes())))
  with pytest.raises(ValueError) as e:
    {k: np.asarray(v) for k, v in open_npz(file).items()}
  assert f"'{file}'" in str(e.value) and message in str(e.value)


def _npy(shape, data):
  stream = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    stream, {"descr": "<f4", "fortran_order": False, "shape": shape}
  )
  return stream.getvalue() + data


@pytest.mark.parametrize(
  "content, message",
  [
    (_npy((3, 5), bytes(60)).replace(b"'<f4'", b"'<f9'"), "a/b"),
    (_npy((3, 5), bytes(60)).replace(b", 5), }", b", 5,   "), "a/b"),
    (_npy((9, 5), bytes(60)), "a/b"),  # more than there is
    (_npy((10**6, 10**6), bytes(64)), "192 bytes"),  # and no memory is taken
  ],
)
def test_a_broken_header_is_refused(tmp_path, content, message):
  path = tmp_path / "x.npz"
  with zipfile.ZipFile(path, "w") as archive:  # checksums are right
    archive.writestr("a/b.npy", content)
  with pytest.raises(ValueError) as e:
    open_npz(path)
  assert f"'{path}'" in str(e.value) and message in str(e.value)


def _tensors(dtype=np.float32):
  return {
    "a.weight": np.arange(12).reshape(4, 3).astype(dtype).T,
    "b.bias": np.linspace(0, 1, 5).astype(dtype),
  }


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_safetensors(tmp_path, dtype):
  path = tmp_path / "x.safetensors"
  write(path, _tensors(dtype), {"vit_jax": {"names": ["α", "b"]}})
  arrays, metadata = open_safetensors(path)
  for _ in range(2):  # every use reads again
    assert_same(arrays, _tensors(dtype))
    np.asarray(arrays["b.bias"])[...] = 0
  assert {a.dtype for a in arrays.values()} == {np.dtype(dtype)}
  # PyTorch's loaders ask for the format.
  assert metadata == {"format": "pt", "vit_jax": '{"names": ["α", "b"]}'}
  assert load_file(path).keys() == _tensors().keys()


def test_several_files_and_their_index(tmp_path):
  names = {}
  for i, (name, array) in enumerate(_tensors().items()):
    names[name] = f"model-{i}.safetensors"
    write(tmp_path / names[name], {name: array}, {})
  index = tmp_path / INDEX
  index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
  arrays, metadata = open_safetensors(index)
  assert_same(arrays, _tensors())
  assert metadata == {}
  (tmp_path / "model-1.safetensors").unlink()
  with pytest.raises(ValueError, match="model-1.safetensors"):
    open_safetensors(index)
  for text in ("{", '{"weight_map": [1]}'):
    index.write_text(text)
    with pytest.raises(ValueError, match=INDEX):
      open_safetensors(index)


def _oversized(path):
  header = {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 8]}}
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))


def _cut(size):
  def write_part(path):
    write(path, _tensors(), {})
    path.write_bytes(path.read_bytes()[:size])

  return write_part


@pytest.mark.parametrize(
  "damage, message",
  [
    *((_cut(size), "whole .safetensors") for size in (4, 60, -1)),
    (_oversized, "whole .safetensors"),
    (lambda path: save_file({"a": np.arange(3, dtype="H")}, path), "type U16"),
  ],
)
def test_a_damaged_safetensors_is_refused(tmp_path, damage, message):
  damage(path := tmp_path / "x.safetensors")
  with pytest.raises(ValueError) as e:
    open_safetensors(path)
  assert str(path) in str(e.value) and message in str(e.value)
