"""Reading `.npz`: one array at a time, nothing unpickled, no bombs."""

import gc
import io
import pathlib
import warnings
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.weights import limits, npz_file
from vit_jax.weights.npz_file import open_npz


@pytest.fixture
def file(tmp_path):
  """Three arrays, not compressed, so that bytes can be found in it."""
  rng = np.random.default_rng(0)
  path = tmp_path / "x.npz"
  np.savez(
    path,
    **{
      "a/b": rng.standard_normal((3, 5), np.float32),
      "columns": np.asfortranarray(rng.standard_normal((4, 2))),
      "half": rng.standard_normal(9000).astype(np.float16),
    },
  )
  return path


def read_all(path):
  return {k: np.asarray(v) for k, v in open_npz(path).items()}


def test_shapes_and_values(file):
  got = open_npz(file)
  with np.load(file) as expected:
    assert got.keys() == set(expected.files)
    for name, array in got.items():
      assert array.shape == expected[name].shape
      assert array.dtype == expected[name].dtype
      assert array.size == expected[name].size
      np.testing.assert_array_equal(array, expected[name])


def test_each_look_reads_once_and_opening_reads_nothing(file, monkeypatch):
  looked = []
  read = npz_file._read

  def counted(path, archive, info, lock):
    looked.append(info.filename)
    return read(path, archive, info, lock)

  monkeypatch.setattr(npz_file, "_read", counted)
  arrays = open_npz(file)
  assert not looked
  np.asarray(arrays["half"])
  assert looked == ["half.npy"]
  changed = arrays["a/b"].then((15,), np.ravel)  # as lazy as before
  assert looked == ["half.npy"] and changed.shape == (15,)
  np.asarray(changed)
  np.asarray(changed, np.float64)
  assert looked == ["half.npy", "a/b.npy", "a/b.npy"]


def test_bfloat16_is_recovered(tmp_path):
  array = jnp.asarray([1.0, -2.5, 3e38], jnp.bfloat16)
  np.savez(tmp_path / "x.npz", cls=np.asarray(array))
  got = open_npz(tmp_path / "x.npz")["cls"]
  assert got.dtype == jnp.bfloat16 and np.asarray(got).dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, array)


class _Touch:
  """Makes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


def test_pickles_are_refused_and_never_run(tmp_path):
  trace = tmp_path / "was_here"
  np.savez(tmp_path / "x.npz", cls=np.array([_Touch(trace), 1], object))
  with pytest.raises(ValueError) as e:
    open_npz(tmp_path / "x.npz")
  assert str(e.value) == (
    f"{tmp_path}/x.npz: got pickled objects in 'cls', expected numbers; these"
    " are not loaded, since a pickle may run any code."
  )
  assert not trace.exists()
  np.load(tmp_path / "x.npz", allow_pickle=True)["cls"]
  assert trace.exists()  # it would have run


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 0.999])
def test_a_cut_file_is_refused(file, share):
  whole = file.read_bytes()
  file.write_bytes(whole[: int(share * len(whole))])
  with pytest.raises(ValueError) as e:
    read_all(file)
  assert str(e.value) == (
    f"got '{file}', which cannot be read as a .npz (File is not a zip file);"
    " expected a whole file of arrays: copy it again, and compare its size."
  )


def test_a_changed_number_is_noticed(file):
  whole = bytearray(file.read_bytes())
  with np.load(file) as arrays:
    at = whole.index(arrays["half"].tobytes()) + 10_000
  whole[at] ^= 1
  file.write_bytes(whole)
  arrays = open_npz(file)  # nothing is read here
  np.asarray(arrays["a/b"])
  with pytest.raises(ValueError, match="Bad CRC-32 for file 'half.npy'"):
    np.asarray(arrays["half"])


def _set(file, offset, value, whence=b"PK\x01\x02"):
  """Changes bytes behind the first record of the table of contents."""
  whole = bytearray(file.read_bytes())
  at = whole.index(whence) + offset
  whole[at : at + len(value)] = value
  file.write_bytes(whole)


@pytest.mark.parametrize(
  "offset, value, message",
  [
    (0, b"XX", "Bad magic number for central directory"),
    (8, b"\x20", "compressed patched data"),  # flag bit 5
    (8, b"\x01", "is encrypted"),
    (10, b"\x63", "compression method is not supported"),
    (46, b"X", "differ"),  # the name
  ],
)
def test_a_damaged_table_of_contents(file, offset, value, message):
  _set(file, offset, value)
  with pytest.raises(ValueError, match=f"cannot be read as a .npz .*{message}"):
    read_all(file)


@pytest.mark.parametrize(
  "old, new",
  [
    (b"NUMPY", b"NUMPX"),
    (b"'descr'", b"'dascr'"),
    (b"'<f4'", b"'<f9'"),
    (b"(3, 5), }", b"(3, 5,   "),  # never closed
    (b"NUMPY\x01", b"NUMPY\x09"),
  ],
)
def test_a_broken_head(tmp_path, old, new):
  path, whole = tmp_path / "x.npz", _npy((3, 5), bytes(60))
  assert old in whole
  with zipfile.ZipFile(path, "w") as archive:  # checksums are right
    archive.writestr("a/b.npy", whole.replace(old, new))
  with pytest.raises(ValueError) as e:
    open_npz(path)
  assert str(e.value).startswith(
    f"{path}: got an array 'a/b' with a broken head ("
  )
  assert str(e.value).endswith("); copy the file again.")


def _npy(shape, data):
  stream = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    stream, {"descr": "<f4", "fortran_order": False, "shape": shape}
  )
  return stream.getvalue() + data


def test_a_head_that_lies_about_the_shape(tmp_path):
  with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
    archive.writestr("head/kernel.npy", _npy((10**6, 10**6), bytes(64)))
  with pytest.raises(ValueError) as e:
    open_npz(tmp_path / "x.npz")
  assert str(e.value) == (
    f"{tmp_path}/x.npz: got 192 bytes for 'head/kernel', expected"
    " 4,000,000,000,128 for its shape (1000000, 1000000); copy the file again."
  )


def test_a_bomb(tmp_path, monkeypatch):
  path = tmp_path / "x.npz"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("head/kernel.npy", _npy((500, 500), bytes(10**6)))
  assert read_all(path)["head/kernel"].shape == (500, 500)  # a head of zeros
  monkeypatch.setattr(limits, "ALWAYS_ALLOWED", 0)
  stored = zipfile.ZipFile(path).infolist()[0].compress_size
  with pytest.raises(ValueError) as e:
    open_npz(path)
  assert str(e.value) == (
    f"{path}: got {stored:,} bytes that state to expand to 1,000,128, expected"
    " at most 2 times as many and 0 MiB: weights hardly compress. If you trust"
    " it, save it again without compression (numpy.savez)."
  )


def test_more_than_stated_is_not_read(tmp_path):
  """A bomb whose table of contents and head say that it is small."""
  path, small = tmp_path / "x.npz", _npy((4,), bytes(16))
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("a.npy", small + bytes(10**7))
  _set(path, 24, len(small).to_bytes(4, "little"))
  with pytest.raises(ValueError, match="Bad CRC-32 for file 'a.npy'"):
    read_all(path)


def test_the_file_is_closed_with_the_last_array(file):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    array = open_npz(file)["half"]
    gc.collect()
    assert np.asarray(array).shape == (9000,)  # still open
    del array
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError):
      open_npz(file)
    gc.collect()
  # Of this file: the collector may meet what other tests have left open.
  assert not [w for w in caught if str(file) in str(w.message)]
