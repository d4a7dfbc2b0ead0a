"""Reading `.npz`: one array at a time, nothing unpickled."""

import gc
import io
import warnings
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

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


def test_each_use_reads_once_and_opening_reads_headers_alone(file, monkeypatch):
  opened = []
  whole = zipfile.ZipFile.open

  def counted(archive, member, *args, **options):
    opened.append(getattr(member, "filename", member))
    return whole(archive, member, *args, **options)

  arrays = open_npz(file)
  monkeypatch.setattr(zipfile.ZipFile, "open", counted)
  changed = arrays["a/b"].then((15,), np.ravel)  # as lazy as before
  assert not opened and changed.shape == (15,)
  np.asarray(arrays["half"])
  np.asarray(changed)
  np.asarray(changed, np.float64)
  assert {"half.npy"} == {*opened[: opened.index("a/b.npy")]}
  assert opened.count("a/b.npy") == 2 * opened.count("half.npy")


def test_bfloat16_is_recovered(tmp_path):
  array = jnp.asarray([1.0, -2.5, 3e38], jnp.bfloat16)
  np.savez(tmp_path / "x.npz", cls=np.asarray(array))
  got = open_npz(tmp_path / "x.npz")["cls"]
  assert got.dtype == jnp.bfloat16 and np.asarray(got).dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9, 0.999])
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
def test_a_broken_header(tmp_path, old, new):
  path, whole = tmp_path / "x.npz", _npy((3, 5), bytes(60))
  assert old in whole
  with zipfile.ZipFile(path, "w") as archive:  # checksums are right
    archive.writestr("a/b.npy", whole.replace(old, new))
  with pytest.raises(ValueError) as e:
    open_npz(path)
  assert str(e.value).startswith(
    f"{path}: got an array 'a/b' with a broken header ("
  )
  assert str(e.value).endswith("); copy the file again.")


def _npy(shape, data):
  stream = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    stream, {"descr": "<f4", "fortran_order": False, "shape": shape}
  )
  return stream.getvalue() + data


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
