"""Files that others wrote: one array at a time, nothing run, nothing outside.

A damaged file is an error that names it.
"""

import ast
import io
import json
import os
import pathlib
import pickle
import random
import shutil
import tarfile
import zipfile

import flax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pyarrow
import pytest
from etils import epath
from pyarrow import parquet
from safetensors.numpy import load_file, save_file
from weight_files import (
  DATA,
  MODEL,
  WEIGHTS,
  assert_same,
  hf_folder,
  message,
  nested,
  our_params,
  save,
)

from vit_jax import paths, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import json_file, to_dict
from vit_jax.finetune.data.imports import KINDS, Options
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.safetensors_file import open_safetensors, write

PACKAGE = pathlib.Path(__file__).parents[2] / "vit_jax"
ARRAYS = {
  "a/b": np.arange(15, dtype="f").reshape(3, 5),
  "columns": np.asfortranarray(np.arange(8.0).reshape(4, 2)),
  "half": np.random.default_rng(0).standard_normal(9000).astype("e"),
}


# One array at a time.


def test_an_npz_is_read_lazily(tmp_path):
  """Opening reads headers alone, and each use reads again."""
  bfloat16 = jnp.asarray([1.0, -2.5, 3e38], jnp.bfloat16)
  np.savez(file := tmp_path / "x.npz", **ARRAYS, cls=np.asarray(bfloat16))
  got = open_npz(file)
  assert got["cls"].dtype == jnp.bfloat16  # which numpy writes as bytes
  assert_same(got, ARRAYS | {"cls": np.asarray(bfloat16)})
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


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_safetensors(tmp_path, dtype):
  tensors = {
    "a.weight": np.arange(12).reshape(4, 3).astype(dtype).T,
    "b.bias": np.linspace(0, 1, 5).astype(dtype),
  }
  path = tmp_path / "x.safetensors"
  write(path, tensors, {"vit_jax": {"names": ["α", "b"]}})
  arrays, metadata = open_safetensors(path)
  for _ in range(2):  # every use reads again
    assert_same(arrays, tensors)
    np.asarray(arrays["b.bias"])[...] = 0
  assert {a.dtype for a in arrays.values()} == {np.dtype(dtype)}
  # PyTorch's loaders ask for the format.
  assert metadata == {"format": "pt", "vit_jax": '{"names": ["α", "b"]}'}
  assert load_file(path).keys() == tensors.keys()


# Damage.


def broken_npz(offset, value):
  """Returns what changes bytes of the first record of the table of contents."""

  def damage(path):
    np.savez(path, **ARRAYS)
    whole = bytearray(path.read_bytes())
    at = whole.index(b"PK\x01\x02") + offset
    whole[at : at + len(value)] = value
    path.write_bytes(whole)

  return damage


def cut_npz(path):
  np.savez(path, **ARRAYS)
  path.write_bytes(path.read_bytes()[:-1])


def header(shape, old=b"", new=b""):
  """Returns what writes a `.npz` whose checksums, but not its header, fit."""
  stream = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    stream, {"descr": "<f4", "fortran_order": False, "shape": shape}
  )
  content = (stream.getvalue() + bytes(60)).replace(old, new)

  def damage(path):
    with zipfile.ZipFile(path, "w") as archive:
      archive.writestr("a/b.npy", content)

  return damage


def cut_safetensors(size):
  def damage(path):
    write(path, {"a": np.arange(12.0)}, {})
    path.write_bytes(path.read_bytes()[:size])

  return damage


def oversized(path):
  about = {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 8]}}
  text = json.dumps(about).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))


@pytest.mark.parametrize(
  "name, damage, words",
  [
    ("x.npz", cut_npz, "not a zip file"),
    ("x.npz", broken_npz(0, b"XX"), "central directory"),
    ("x.npz", broken_npz(10, b"\x63"), "compression method"),
    ("x.npz", broken_npz(46, b"X"), "differ"),  # the name
    ("x.npz", header((3, 5), b"'<f4'", b"'<f9'"), "a/b"),
    ("x.npz", header((3, 5), b", 5), }", b", 5,   "), "a/b"),
    ("x.npz", header((9, 5)), "a/b"),  # more than there is
    ("x.npz", header((10**6, 10**6)), "bytes"),  # and no memory is taken
    ("x.safetensors", cut_safetensors(4), "whole .safetensors"),
    ("x.safetensors", cut_safetensors(-1), "whole .safetensors"),
    ("x.safetensors", oversized, "whole .safetensors"),
    (
      "x.safetensors",
      lambda path: save_file({"a": np.arange(3, dtype="H")}, path),
      "type U16",
    ),
  ],
)
def test_a_damaged_file_is_refused(tmp_path, name, damage, words):
  damage(path := tmp_path / name)
  with pytest.raises(ValueError) as e:
    if name == "x.npz":
      {k: np.asarray(v) for k, v in open_npz(path).items()}
    else:
      open_safetensors(path)
  assert str(path) in str(e.value) and words in str(e.value)


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"Hello.\n" * 20,
    b"\x89HDF\r\n\x1a\n" + bytes(99),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n",
    b"<!DOCTYPE html><html>404</html>",
    flax.serialization.msgpack_serialize({"params": {"a": 1}}),
    (DATA / "vit_linen_names.weights.npz").read_bytes()[:9000],
  ],
  ids="empty text hdf5 lfs html msgpack half".split(),
)
def test_other_files(tmp_path, content):
  path = tmp_path / "B_16.npz"
  path.write_bytes(content)
  is_npz = content[:2] == b"PK"
  reason = "expected a whole .npz" if is_npz else "of no known format"
  assert f"got '{path}', " in message(path) and reason in message(path)
  (tmp_path / "m").mkdir()
  (tmp_path / "m" / WEIGHTS).write_bytes(content)
  (tmp_path / "m" / "config.json").write_text("{}")
  assert f"{tmp_path}/m/model.safetensors" in message(tmp_path / "m")


def write_checkpoint(folder):
  metadata = {"config": {"model": to_dict(MODEL)}, "image_size": [32, 32]}
  checkpointer.write_params(str(folder / "x"), nested(our_params()), metadata)


# Orbax's threads outlive for a moment the loop that they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_tree(tmp_path):
  write_checkpoint(tmp_path)
  path = tmp_path / "x"
  for name in ("_METADATA", "d"):
    broken = tmp_path / name
    shutil.copytree(path, broken)
    victim = broken / "params" / name
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    assert message(broken).startswith(f"{broken} is damaged: ")
  (path / "metadata" / "metadata").write_text("{")
  assert f"{path} is damaged: metadata/metadata: got no JSON" in message(path)


def test_a_checkpoint_that_states_more_than_its_files_have(tmp_path):
  tree = {"a": np.ones((4, 4), np.float32)}
  path = tmp_path / "tree"
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as writer:
    writer.save(path, ocp.args.PyTreeSave(tree))
  described = path / "a" / ".zarray"
  stated = json.loads(described.read_text())
  described.write_text(json.dumps(stated | {"shape": [10**5, 10**5]}))
  with pytest.raises(ValueError, match="bytes for arrays of 40,000,000,000"):
    weights.read(path)


def test_json_that_is_none(tmp_path):
  for text in (b"9" * 5000, b"\xff\xfe", b"{"):
    with pytest.raises(ValueError, match="^a.json: got no JSON"):
      json_file.parse(text, "a.json")
  config = hf_folder(tmp_path / "m") / "config.json"
  for text in ("{", "[1]"):
    config.write_text(text)
    assert str(config) in message(tmp_path / "m")
  config.unlink()
  assert "config.json: missing" in message(tmp_path / "m")


def write_tar(folder):
  with tarfile.open(folder / "train.tar", "w") as tar:
    for member in ("a/0.jpg", "a/0.cls", "a/1.jpg", "a/1.cls"):
      info = tarfile.TarInfo(member)
      info.size = 1
      tar.addfile(info, io.BytesIO(b"1"))


def write_parquet(folder):
  rows = [{"bytes": b"x" * i, "path": None} for i in range(4)]
  table = pyarrow.table({"image": rows, "label": [0, 1, 0, 1]})
  parquet.write_table(table, folder / "train.parquet")


def read_weights(path):
  for array in weights.read(path).params.values():
    np.asarray(array)


def read_import(kind):
  def read(path):
    for split in KINDS[kind](str(path), Options()).splits.values():
      for _ in split.entries():
        pass

  return read


READERS = {
  "npz": (lambda folder: save(folder / "x.npz"), read_weights, "x.npz"),
  "safetensors": (hf_folder, read_weights, ""),
  "checkpoint": (write_checkpoint, read_weights, "x"),
  "tar": (write_tar, read_import("webdataset:"), ""),
  "parquet": (write_parquet, read_import("parquet:"), ""),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
  "kind",
  [
    pytest.param(k, marks=pytest.mark.slow) if k == "checkpoint" else k
    for k in READERS
  ],
)
def test_damage_anywhere_is_read_or_refused_in_one_error(kind, tmp_path):
  """Thirty files are cut or have three bits changed, at random."""
  write, read, name = READERS[kind]
  whole = tmp_path / "whole"
  whole.mkdir()
  write(whole)
  read(whole / name)
  rng = random.Random(0)
  files = [f.relative_to(whole) for f in whole.rglob("*") if f.is_file()]
  num_refused = 0
  for i in range(30):
    work = tmp_path / str(i)
    shutil.copytree(whole, work)
    victim = work / rng.choice(sorted(files))
    data = bytearray(victim.read_bytes())
    if i % 3 == 0:
      del data[rng.randrange(len(data)) :]
    for _ in range(3 if data else 0):
      data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    victim.write_bytes(data)
    try:
      read(work / name)
    except (ValueError, FileNotFoundError) as e:
      num_refused += 1
      assert str(work) in str(e) and len(str(e)) < 5000, f"{i}: {e!r}"
  assert num_refused


# Nothing is run, and nothing leads out of a folder.


def test_libraries_are_told_to_run_nothing():
  """Pillow hands PostScript to Ghostscript if it may read any format.

  Rules of ruff find pickles, `eval` and archives that are extracted.
  """
  told = {"torch.load": "weights_only=True", "Image.open": "formats="}
  for path in sorted(PACKAGE.rglob("*.py")):
    text = path.read_text()
    if not any(f"{name}(" in text for name in told):
      continue
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Call):
        option = told.get(ast.unparse(node.func), "")
        assert option in ast.unparse(node), f"{path}:{node.lineno}"


class Touch:
  """Makes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


@pytest.fixture
def pickled(tmp_path):
  """Bytes that make a file when they are unpickled, by protocol."""
  trace = tmp_path / "was_here"
  payloads = [pickle.dumps(Touch(trace), i) for i in (0, 2, 5)]
  yield payloads
  assert not trace.exists()
  pickle.loads(payloads[-1])
  assert trace.exists()  # it would have been there


def test_a_pickle_is_never_run(tmp_path, pickled):
  for payload in pickled:
    for name in ("model.pkl", "x.npz", "x.safetensors"):
      (tmp_path / name).write_bytes(payload)
      assert "of no known format" in message(tmp_path / name)
  objects = np.array([Touch(tmp_path / "was_here")], object)
  text = message(save(tmp_path / "x.npz", head__bias=objects))
  assert "head/bias" in text and "pickled" in text


@pytest.mark.slow  # it imports torch
def test_a_pickle_in_a_file_of_torch_is_never_run(tmp_path, pickled):
  path = tmp_path / "model.pth"
  with zipfile.ZipFile(path, "w") as archive:  # as torch.save writes it
    archive.writestr("model/data.pkl", pickled[1])
    archive.writestr("model/data/0", bytes(64))
  # The sentence depends on whether torch is installed.
  assert f"got '{path}', " in message(path) and "orch" in message(path)
  (tmp_path / "config.json").write_text("{}")
  path.rename(tmp_path / "pytorch_model.bin")
  assert "pytorch_model.bin', " in message(tmp_path)


def test_what_leads_out_of_a_folder(tmp_path):
  def file_in(folder, name):
    return paths.file_in(epath.Path(folder), name)

  for name in ("../x", "/etc/passwd", "a\\b", "", "..", "\0"):
    with pytest.raises(ValueError, match="expected a file in that folder"):
      file_in(tmp_path, name)
  folder, other = tmp_path / "a", tmp_path / "b"
  for place in (folder, other):
    place.mkdir()
    (place / "x").write_text("")
  os.symlink(folder / "x", folder / "inside")
  os.symlink("../b/x", folder / "outside")
  os.symlink(other, tmp_path / "named")
  assert file_in(folder, "inside") == folder / "inside"
  assert file_in(tmp_path / "named", "x").exists()
  with pytest.raises(ValueError, match=f"outside.*{other}/x"):
    file_in(folder, "outside")

  # `snapshots/REVISION` of Hugging Face's cache has but links into `blobs`.
  snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
  snapshot.mkdir(parents=True)
  blob = tmp_path / "models--a--b" / "blobs" / "0123"
  blob.parent.mkdir()
  blob.write_text("{}")
  os.symlink("../../blobs/0123", snapshot / "config.json")
  os.symlink("../../../a/x", snapshot / "other.json")
  assert file_in(snapshot, "config.json").read_text() == "{}"
  with pytest.raises(ValueError, match="outside of its folder"):
    file_in(snapshot, "other.json")
