"""Files that others wrote run nothing, lead nowhere, and fail in one error."""

import ast
import functools
import gzip
import io
import json
import os
import pathlib
import random
import re
import shutil
import tarfile

import numpy as np
import orbax.checkpoint as ocp
import pyarrow
import pytest
from etils import epath
from flax.traverse_util import unflatten_dict
from pyarrow import parquet
from weight_files import MODEL, hf_folder, our_params, save

from vit_jax import paths, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import json_file, to_dict
from vit_jax.finetune.data.imports import KINDS, Options
from vit_jax.weights import safetensors_file

PACKAGE = pathlib.Path(__file__).parents[2] / "vit_jax"
# What runs code from a file, or writes members of an archive where they say.
FORBIDDEN = {
  *("pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "xml"),
  *("yaml.load", "yaml.unsafe_load", "read_pickle", "eval"),
  *("extractall", "unpack_archive", "tar.extract", "archive.extract"),
}


CHECKED = {"np.load", "torch.load", "Image.open"}
WORDS = re.compile(
  r"\b({})\b".format("|".join(map(re.escape, FORBIDDEN | CHECKED)))
)


def calls_and_imports(path):
  """Yields (dotted name, call or None) of what a file calls and imports."""
  text = path.read_text()
  if not WORDS.search(text):
    return
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Call):
      name = ast.unparse(node.func)
      yield name, node
      yield name.rpartition(".")[2], node
    elif isinstance(node, ast.Import | ast.ImportFrom):
      yield from ((a.name, None) for a in node.names)
      yield getattr(node, "module", None), None


def test_nothing_is_unpickled_or_extracted():
  for path in sorted(PACKAGE.rglob("*.py")):
    for name, call in calls_and_imports(path):
      assert name not in FORBIDDEN, f"{path}: {name}"
      if name == "np.load":
        assert "allow_pickle=False" in ast.unparse(call), path
      if name == "torch.load":
        assert "weights_only=True" in ast.unparse(call), path
      if name == "Image.open":  # Pillow hands PostScript to Ghostscript
        assert "formats=" in ast.unparse(call), path


def test_what_leads_out_of_a_folder(tmp_path):
  for name in ("../x", "/etc/passwd", "a\\b", "", "..", "\0"):
    with pytest.raises(ValueError, match="expected a file in that folder"):
      paths.file_in(epath.Path(tmp_path), name)
  folder, other = tmp_path / "a", tmp_path / "b"
  for place in (folder, other):
    place.mkdir()
    (place / "x").write_text("")
  os.symlink(folder / "x", folder / "inside")
  os.symlink("../b/x", folder / "outside")
  os.symlink(other, tmp_path / "named")
  assert paths.file_in(epath.Path(folder), "inside") == folder / "inside"
  assert paths.file_in(epath.Path(tmp_path / "named"), "x").exists()

  with pytest.raises(ValueError, match=f"outside.*{other}/x"):
    paths.file_in(epath.Path(folder), "outside")


def test_links_of_hugging_face_s_cache(tmp_path):
  """`snapshots/REVISION` holds nothing but links into `blobs`."""
  model = tmp_path / "models--a--b"
  (model / "blobs").mkdir(parents=True)
  folder = model / "snapshots/main"
  folder.mkdir(parents=True)
  (model / "blobs/0123").write_text("{}")
  (tmp_path / "secret").write_text("{}")
  os.symlink("../../blobs/0123", folder / "config.json")
  os.symlink("../../../secret", folder / "other.json")
  assert paths.file_in(epath.Path(folder), "config.json").read_text() == "{}"
  with pytest.raises(ValueError, match="outside of its folder"):
    paths.file_in(epath.Path(folder), "other.json")


def test_an_index_names_files_of_its_own_folder(tmp_path):
  safetensors_file.write(tmp_path / "x.safetensors", {"a": np.ones(3, "f")}, {})
  folder = tmp_path / "m"
  folder.mkdir()
  index = folder / safetensors_file.INDEX
  index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
  with pytest.raises(ValueError, match="expected a file in that folder"):
    weights.read(folder)


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


@pytest.mark.parametrize("text", [b"9" * 5000, b"\xff\xfe", b"{"])
def test_json_that_is_none(text):
  with pytest.raises(ValueError, match="^a.json: got no JSON"):
    json_file.parse(text, "a.json")


def write_npz(folder):
  save(folder / "x.npz")


def write_checkpoint(folder):
  metadata = {"config": {"model": to_dict(MODEL)}, "image_size": [32, 32]}
  tree = unflatten_dict(our_params(), sep="/")
  checkpointer.write_params(str(folder / "x"), tree, metadata)


def write_tar(folder, compress=bytes, name="train.tar"):
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode="w") as tar:
    for member in ("a/0.jpg", "a/0.cls", "a/1.jpg", "a/1.cls"):
      info = tarfile.TarInfo(member)
      info.size = 1
      tar.addfile(info, io.BytesIO(b"1"))
  (folder / name).write_bytes(compress(out.getvalue()))


write_tar_gz = functools.partial(
  write_tar, compress=gzip.compress, name="train.tar.gz"
)


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
  "npz": (write_npz, read_weights, "x.npz"),
  "safetensors": (hf_folder, read_weights, ""),
  "checkpoint": (write_checkpoint, read_weights, "x"),
  "tar": (write_tar, read_import("webdataset:"), ""),
  "tar.gz": (write_tar_gz, read_import("webdataset:"), ""),
  "parquet": (write_parquet, read_import("parquet:"), ""),
}


# Orbax's threads outlive for a moment the loop that they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
  "kind",
  [
    pytest.param(k, marks=pytest.mark.slow) if k == "checkpoint" else k
    for k in READERS
  ],
)
def test_a_damaged_file_is_read_or_refused_in_one_error(kind, tmp_path):
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
