"""What a file may state, and where its names and links may lead."""

import io
import os
import zipfile

import numpy as np
import pytest
from etils import epath

import vit_jax
from vit_jax import weights
from vit_jax.config import model_config, to_dict
from vit_jax.weights import limits, safetensors_file, timm
from vit_jax.weights.beside import beside
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.weights_file import model_of

SIZE = dict(variant="B/4", width=8, depth=2, mlp_dim=12, num_heads=2)


def npy(shape, data=b"", descr="<f4"):
  out = io.BytesIO()
  head = {"descr": descr, "fortran_order": False, "shape": shape}
  np.lib.format.write_array_header_1_0(out, head)
  return out.getvalue() + data


def npz(path, members):
  with zipfile.ZipFile(path, "w") as archive:
    for name, data in members:
      archive.writestr(name, data)
  return path


@pytest.mark.parametrize(
  "shape, data, said",
  [
    ((-4, -4), bytes(64), "got the shape (-4, -4) for 'x'"),
    ((0, 2**62), b"", "got the shape (0, 4611686018427387904) for 'x'"),
    ((True, 2), bytes(8), "got the shape (True, 2) for 'x'"),
    ((1,) * 9, bytes(4), "expected at most 8 sides of 0 to 2,147,483,647"),
    ((2**30,), bytes(4), "expected 4,294,967,424 for its shape (1073741824,)"),
  ],
)
def test_shapes(tmp_path, shape, data, said):
  path = npz(tmp_path / "x.npz", [("x.npy", npy(shape, data))])
  with pytest.raises(ValueError) as e:
    open_npz(path)
  assert str(e.value).startswith(f"{path}: got ") and said in str(e.value)


@pytest.mark.parametrize(
  "head",
  [
    b"(" * 9000,
    b"-" * 9000 + b"1",
    b"  x\n x",
    b"{'a': 9**9**9}",
    b"\0",
    b"[]",
  ],
)
def test_a_head_that_is_no_head(tmp_path, head):
  data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
  path = npz(tmp_path / "x.npz", [("x.npy", data)])
  with pytest.raises(ValueError, match="an array 'x' with a broken head"):
    open_npz(path)


def test_names(tmp_path):
  one = npy((1,), bytes(4))
  with pytest.warns(UserWarning, match="Duplicate name"):
    path = npz(tmp_path / "a.npz", [("x.npy", one), ("x.npy", one)])
  with pytest.raises(ValueError, match="two arrays of the name 'x'"):
    open_npz(path)
  path = npz(tmp_path / "b.npz", [("x" * 501 + ".npy", one)])
  with pytest.raises(ValueError, match="a name of 501 characters"):
    open_npz(path)
  many = limits.MAX_ARRAYS + 1
  with pytest.raises(ValueError, match="got 10,001 arrays, expected at most"):
    limits.check_names([str(i) for i in range(many)], "x")
  limits.check_names([str(i) for i in range(many - 1)], "x")


@pytest.mark.parametrize("is_64", [False, True])
def test_a_table_of_contents_that_is_too_long(tmp_path, monkeypatch, is_64):
  """Refused before zipfile keeps a record of each member."""
  if is_64:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 3)
  path = npz(tmp_path / "x.npz", ((f"{i}.npy", b"") for i in range(50)))
  monkeypatch.setattr(limits, "MAX_NAMES_BYTES", 1000)
  with pytest.raises(ValueError, match="a table of contents of 2,.* bytes"):
    open_npz(path)


def test_expansion():
  limits.check_expansion(100, 2 * 100 + 2**27, "x")
  with pytest.raises(ValueError, match="got 100 bytes that state to expand to"):
    limits.check_expansion(100, 2 * 100 + 2**27 + 1, "x")


@pytest.mark.parametrize(
  "name", ["../x", "/etc/passwd", "a/b", "a\\b", "", ".", "..", "\0", "x" * 256]
)
def test_names_of_no_file_in_the_folder(tmp_path, name):
  with pytest.raises(ValueError, match="expected a file in that folder"):
    beside(epath.Path(tmp_path), name)


def test_links(tmp_path):
  folder, other = tmp_path / "a", tmp_path / "b"
  for place in (folder, other):
    place.mkdir()
    (place / "x").write_text("")
  os.symlink(folder / "x", folder / "inside")
  os.symlink("../b/x", folder / "outside")
  os.symlink(other, tmp_path / "named")
  assert beside(epath.Path(folder), "inside") == folder / "inside"
  assert beside(epath.Path(tmp_path / "named"), "x").exists()
  assert not beside(epath.Path(folder), "missing").exists()
  with pytest.raises(ValueError) as e:
    beside(epath.Path(folder), "outside")
  assert str(e.value) == (
    f"got '{folder}/outside', which is a link to {other}/x, outside of its"
    " folder; expected a file. Copy it there, if it is the right one."
  )


def test_links_of_hugging_face_s_cache(tmp_path):
  """`snapshots/REVISION` holds nothing but links into `blobs`."""
  model = tmp_path / "models--a--b"
  (model / "blobs").mkdir(parents=True)
  (model / "snapshots/main").mkdir(parents=True)
  (model / "blobs/0123").write_text("{}")
  (tmp_path / "secret").write_text("{}")
  folder = model / "snapshots/main"
  os.symlink("../../blobs/0123", folder / "config.json")
  os.symlink("../../../secret", folder / "other.json")
  assert beside(epath.Path(folder), "config.json").read_text() == "{}"
  with pytest.raises(ValueError, match="outside of its folder"):
    beside(epath.Path(folder), "other.json")


def _timm(path, **changes):
  import foreign

  model = model_config(**SIZE)
  params = foreign.random_params(model, 3, (8, 8))
  ours = {"model": to_dict(model), "image_size": [8, 8], "grid": [2, 2]}
  arrays = timm.write(params, model)
  safetensors_file.write(path, arrays, {"vit_jax": ours | changes})
  return path


@pytest.mark.parametrize(
  "changes, said",
  [
    ({"model": {**SIZE, "depth": 999}}, "depth: got 999, expected 2 by the"),
    ({"model": {**SIZE, "depth": 10**9}}, "depth: got 1000000000, expected 2"),
    ({"model": [1]}, "model: got [1], expected options by name"),
    (
      {"image_size": [8, 800]},
      "got 8 x 800 pixels, which make 2 x 200",
    ),
    ({"image_size": [10, 8]}, "got 10 x 8 pixels, expected multiples of the"),
    ({"image_size": [0, 8]}, "image_size[0]: got 0, expected a whole number"),
    ({"image_size": "8"}, "image_size: got '8', expected a list"),
    ({"class_names": [1]}, "class_names[0]: got 1, expected text"),
    ({"loss": "x"}, "loss: got 'x', expected one of softmax, sigmoid"),
    ({"preprocessing": {"ops": "(" * 999}}, "expected operations such as"),
    ({"preprocessing": 3}, "preprocessing: got 3, expected options by name"),
  ],
)
def test_what_is_stated_beside_the_arrays(tmp_path, changes, said):
  path = _timm(tmp_path / "x.safetensors", **changes)
  with pytest.raises(ValueError) as e:
    vit_jax.load(path, verbose=False)
  assert str(path) in str(e.value) and said in str(e.value)


def test_the_sample_is_whole(tmp_path):
  vit = vit_jax.load(_timm(tmp_path / "x.safetensors"), verbose=False)
  assert vit.config == model_config(**SIZE, gelu="tanh")


def test_a_number_in_a_name_makes_no_list():
  """`blocks.99999999` alone once made rows of so many blocks."""
  names = ["patch_embed.proj.weight", "blocks.0.x", "blocks.99999999.x"]
  from vit_jax.weights.lazy import lazy

  arrays = {n: lazy(np.zeros((8, 3, 4, 4), np.float32)) for n in names}
  with pytest.raises(ValueError, match="'blocks.99999999.x'"):
    timm.read(arrays, num_heads=2)


@pytest.mark.parametrize(
  "name, shape, said",
  [
    (
      "Transformer/encoderblock_0/posembed_input/pos_embedding",
      (5,),
      "pos_embedding: got shape (5,), expected 3 dimensions",
    ),
    ("Transformer/encoderblock/x", (10**6, 0), "expected at most 1,000 blocks"),
  ],
)
def test_arrays_of_a_vit(tmp_path, name, shape, said):
  import foreign

  arrays = foreign.random_params(model_config(**SIZE), 3, (8, 8))
  np.savez(tmp_path / "x.npz", **arrays, **{name: np.zeros(shape, "f")})
  with pytest.raises(ValueError) as e:
    weights.read(tmp_path / "x.npz")
  assert said in str(e.value) and str(tmp_path) in str(e.value)


def test_the_head_of_a_bit(tmp_path):
  arrays = {
    "resnet/block1/unit01/a/standardized_conv2d/kernel": np.zeros((1, 1, 4, 4)),
    "resnet/head/conv2d/kernel": np.zeros((8, 3, 1, 1)),
  }
  np.savez(tmp_path / "x.npz", **arrays)
  with pytest.raises(ValueError, match=r"got shape \(8, 3, 1, 1\), expected"):
    weights.read(tmp_path / "x.npz")


def test_a_config_of_any_type_tells_no_model():
  assert model_of({"config": "None"}) is None
  assert model_of({"config": {"model": {"depth": 1}}}) == {"depth": 1}
