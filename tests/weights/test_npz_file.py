"""Reading `.npz`: one array at a time, nothing unpickled."""

import io
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


def npy(shape, data):
  stream = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    stream, {"descr": "<f4", "fortran_order": False, "shape": shape}
  )
  return stream.getvalue() + data


def zipped(path, content):
  with zipfile.ZipFile(path, "w") as archive:  # checksums are right
    archive.writestr("a/b.npy", content)
  return path


def test_shapes_and_values(file):
  got = open_npz(file)
  with np.load(file) as expected:
    assert got.keys() == set(expected.files)
    for name, array in got.items():
      assert array.shape == expected[name].shape
      assert array.dtype == expected[name].dtype
      np.testing.assert_array_equal(array, expected[name])


def test_bfloat16_is_recovered(tmp_path):
  array = jnp.asarray([1.0, -2.5, 3e38], jnp.bfloat16)
  np.savez(tmp_path / "x.npz", cls=np.asarray(array))
  got = open_npz(tmp_path / "x.npz")["cls"]
  assert got.dtype == jnp.bfloat16 and np.asarray(got).dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, array)


def test_opening_reads_headers_alone_and_each_use_reads_again(file):
  whole = bytearray(file.read_bytes())
  with np.load(file) as arrays:
    at = whole.index(arrays["half"].tobytes()) + 10_000
  whole[at] ^= 1
  file.write_bytes(whole)
  arrays = open_npz(file)
  changed = arrays["a/b"].then((15,), np.ravel)  # as lazy as before
  assert changed.shape == (15,)
  np.asarray(changed)[:] = 0
  assert np.asarray(changed).any()
  for _ in range(2):
    with pytest.raises(ValueError, match="Bad CRC-32 for file 'half.npy'"):
      np.asarray(arrays["half"])


def table_of_contents(offset, value):
  """Returns what changes bytes of the first record of the central directory."""

  def change(whole):
    at = whole.index(b"PK\x01\x02") + offset
    whole[at : at + len(value)] = value
    return whole

  return change


@pytest.mark.parametrize(
  "change, message",
  [
    *(
      (lambda whole, n=n: whole[: int(n * len(whole))], "is not a zip file")
      for n in (0.01, 0.999)
    ),
    (table_of_contents(0, b"XX"), "Bad magic number for central directory"),
    (table_of_contents(10, b"\x63"), "compression method is not supported"),
    (table_of_contents(46, b"X"), "differ"),  # the name
  ],
)
def test_a_damaged_file_is_refused(file, change, message):
  file.write_bytes(change(bytearray(file.read_bytes())))
  with pytest.raises(ValueError) as e:
    read_all(file)
  start = f"got '{file}', expected a whole .npz or .pth ("
  assert str(e.value).startswith(start) and message in str(e.value)


@pytest.mark.parametrize(
  "old, new",
  [
    (b"'<f4'", b"'<f9'"),
    (b"(3, 5), }", b"(3, 5,   "),  # never closed
    (b"(3, 5), }", b"(9, 5), }"),  # more than there is
  ],
)
def test_a_broken_header_is_refused(tmp_path, old, new):
  whole = npy((3, 5), bytes(60))
  assert old in whole
  path = zipped(tmp_path / "x.npz", whole.replace(old, new))
  with pytest.raises(ValueError, match=f"got '{path}'.* its array 'a/b': "):
    open_npz(path)


def test_no_memory_is_taken_for_more_than_the_file_has(tmp_path):
  path = zipped(tmp_path / "x.npz", npy((10**6, 10**6), bytes(64)))
  with pytest.raises(ValueError, match="192 bytes, expected 4,000,000,000,128"):
    open_npz(path)
