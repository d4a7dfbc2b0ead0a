"""Broken and foreign files are refused, with the reason."""

import pathlib
import pickle
import re
import shutil
import zipfile

import foreign
import numpy as np
import pytest
from weight_files import (
  DATA,
  hf_folder,
  message,
  nested,
  orbax,
  our_params,
  save,
)

import vit_jax
from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import model_config, to_dict
from vit_jax.weights import safetensors_file, timm
from vit_jax.weights.weights_file import EXPECTED, POS_EMBEDDING, lazy, model_of

SIZE = dict(variant="B/4", width=8, depth=2, mlp_dim=12, num_heads=2)


class Touch:
  """Makes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


def test_trees_that_are_no_model(tmp_path):
  path = orbax(tmp_path / "a", {"conv1": {"kernel": np.ones(3)}})
  assert message(path) == (
    f"{path}: got 1 parameters, such as conv1/kernel; expected those of a"
    " Vision Transformer (embedding/kernel, Transformer/encoderblock_0/...), of"
    " a hybrid, or of a BiT ResNet (conv_root/kernel, block1/unit1/...)."
  )
  path = orbax(tmp_path / "b", nested(our_params()) | {"more": [np.ones(3)]})
  assert message(path) == (
    f"{path}: got a checkpoint with 'more', which is no array; {EXPECTED}."
  )
  path = orbax(tmp_path / "c", nested(our_params()) | {"step": 3})
  assert "step: got type int" in message(path)


# Orbax's threads outlive for a moment the loop that they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_tree(tmp_path):
  path = tmp_path / "x"
  checkpointer.write_params(str(path), nested(our_params()), {})
  for name in ("_METADATA", "d"):
    broken = tmp_path / name
    shutil.copytree(path, broken)
    victim = broken / "params" / name
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    assert re.fullmatch(
      rf"{broken} is damaged: \w+: .*; copy it again.", message(broken)
    )
  (path / "metadata" / "metadata").write_text("{")
  assert message(path).startswith(
    f"{path} is damaged: metadata/metadata: got no JSON (Expecting "
  )


@pytest.mark.parametrize(
  "content, said",
  [
    (b"", "is neither .npz nor .safetensors but empty; " + EXPECTED),
    (b"Hello.\n" * 20, "is neither .npz nor .safetensors; " + EXPECTED),
    (
      b"\x89HDF\r\n\x1a\n" + bytes(99),
      "is HDF5 (Keras); save the weights as .npz",
    ),
    (
      b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n",
      "is a pointer of git-lfs; run git lfs pull",
    ),
  ],
)
def test_other_files(tmp_path, content, said):
  path = tmp_path / "B_16.npz"
  path.write_bytes(content)
  assert message(path) == f"got '{path}', which {said}."


def test_what_is_not_there(tmp_path):
  path = tmp_path / "none.npz"
  assert message(path) == (
    f"got '{path}', which does not exist; {EXPECTED}, or an address:"
    " https://..., hf-hub:OWNER/NAME."
  )
  assert message(tmp_path) == (
    f"got '{tmp_path}', which has no checkpoint in it; expected the folder of a"
    " run (it holds checkpoints/<step>/params), or of one step."
  )
  (tmp_path / "notes.txt").write_text("none here")
  (tmp_path / "checkpoints").mkdir()
  assert "which has no checkpoint in it" in message(tmp_path)
  for name in ("b", "a"):
    (tmp_path / name / "checkpoints").mkdir(parents=True)
  assert message(tmp_path).endswith("or of one step. Runs in it: a, b.")


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_is_never_run(tmp_path, protocol):
  path, trace = tmp_path / "model.pkl", tmp_path / "was_here"
  path.write_bytes(pickle.dumps(Touch(trace), protocol))
  text = message(path)
  if protocol < 2:  # those begin like any text
    assert "which is neither .npz nor .safetensors" in text
  else:
    assert text == (
      f"got '{path}', which is a pickle, which may run any code and is never"
      " loaded; save it as .safetensors where it comes from."
    )
  assert not trace.exists()


def test_a_file_of_pytorch_is_never_run(tmp_path):
  path, trace = tmp_path / "model.pth", tmp_path / "was_here"
  with zipfile.ZipFile(path, "w") as archive:  # as torch.save writes it
    archive.writestr("model/data.pkl", pickle.dumps(Touch(trace)))
    archive.writestr("model/data/0", bytes(64))
  assert message(path) == (
    f"got '{path}', which is a pickle of PyTorch, may run any code and is never"
    " loaded; save it as .safetensors with safetensors.torch."
  )
  assert not trace.exists()


def test_an_array_of_objects_is_never_run(tmp_path):
  trace = tmp_path / "was_here"
  bad = np.array([Touch(trace)], object)
  text = message(save(tmp_path / "x.npz", head__bias=bad))
  assert "x.npz: got pickled objects in 'head/bias', expected numbers" in text
  assert not trace.exists()


@pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.99])
def test_a_cut_file(tmp_path, share):
  whole = (DATA / "vit_linen_names.weights.npz").read_bytes()
  path = tmp_path / "x.npz"
  path.write_bytes(whole[: int(share * len(whole))])
  assert message(path) == (
    f"got '{path}', which cannot be read as a .npz (File is not a zip file);"
    " expected a whole file of arrays: copy it again, and compare its size."
  )


@pytest.mark.parametrize("where", ["contents", "numbers"])
def test_a_damaged_file(tmp_path, where):
  whole = bytearray((DATA / "vit_linen_names.weights.npz").read_bytes())
  at = whole.rindex(b"PK\x01\x02") if where == "contents" else len(whole) // 2
  whole[at] ^= 0xFF
  path = tmp_path / "x.npz"
  path.write_bytes(whole)
  assert f"got '{path}', which cannot be read as a .npz (" in message(path)


def test_other_models(tmp_path):
  path = tmp_path / "resnet.npz"
  np.savez(path, conv1=np.ones((7, 7, 3, 64)), fc=np.ones((64, 10)))
  assert message(path) == (
    f"got '{path}' with 2 arrays, such as conv1, fc, of no model that we know;"
    f" {EXPECTED}."
  )
  path = tmp_path / "x.safetensors"
  safetensors_file.write(path, {"conv1.weight": np.ones(3, "f")}, {})
  assert message(path).startswith(
    f"got '{path}' with 1 arrays, such as conv1.weight, of no model"
  )
  np.savez(tmp_path / "none.npz")
  assert "with 0 arrays, such as none, of no model" in message(
    tmp_path / "none.npz"
  )


def test_shapes_that_do_not_belong_together(tmp_path):
  name = "Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel"
  changes = {name.replace("/", "__"): np.zeros((48, 95), "f")}
  path = save(tmp_path / "x.npz", **changes)
  assert message(path) == (
    f"1 error in the weights of {path} for this model:\n"
    f"  - {name}: got shape (48, 95), expected (48, 96).\n"
    "The model is the right one; take other weights."
  )


@pytest.mark.parametrize(
  "bias, told",
  [
    (None, "head/bias missing, head/kernel of shape (48, 11)"),
    (
      np.zeros(12, "f"),
      "head/bias of shape (12,), head/kernel of shape (48, 11)",
    ),
  ],
)
def test_half_a_head(tmp_path, bias, told):
  path = save(tmp_path / "x.npz", head__bias=bias)
  assert message(path) == (
    f"{path}: got a head whose parts do not belong together: {told}; expected"
    " 11 classes in all. Take a whole file."
  )


@pytest.mark.parametrize(
  "name, array, said",
  [
    (
      "head/bias",
      np.array(["a"] * 11),
      "got type <U1, expected floating point",
    ),
    ("head/bias", np.zeros(11, int), "got type int64, expected floating point"),
    ("head/kernel", np.float32(3), "got shape (), expected 2 dimensions"),
    ("cls", np.zeros(48, "f"), "got shape (48,), expected 3 dimensions"),
    (POS_EMBEDDING, np.zeros(48, "f"), "got shape (48,), expected 3 dim"),
    ("embedding/kernel", np.zeros((192, 48), "f"), "(192, 48), expected 4 dim"),
  ],
)
def test_arrays_of_other_kinds(tmp_path, name, array, said):
  path = save(tmp_path / "x.npz", **{name.replace("/", "__"): array})
  text = message(path)
  assert text.startswith(f"{path}: {name}: got ") and said in text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none(tmp_path, value):
  bias = np.zeros(11, "f")
  bias[2] = value
  path = save(tmp_path / "x.npz", head__bias=bias)
  assert (
    "\n  - head/bias: got 1 values that are NaN or infinite, expected none.\n"
    in message(path)
  )


def test_what_lies_beside_a_file_is_broken(tmp_path):
  folder = hf_folder(tmp_path / "m")
  config = folder / "config.json"
  config.write_text("{")
  assert message(folder).startswith(f"{folder}/config.json: got no JSON (")
  config.write_text("[1]")
  assert message(folder) == (
    f"{folder}/config.json: got a list, expected options by name. Copy the file"
    " again."
  )
  config.unlink()
  assert message(folder) == (
    f"got '{folder}' without a config.json beside it, which tells the heads and"
    " the form of GELU; expected the folder of a Hugging Face model."
  )


def test_hugging_face_with_a_pickle_alone(tmp_path):
  folder, trace = hf_folder(tmp_path / "m"), tmp_path / "was_here"
  (folder / "model.safetensors").unlink()
  (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(trace)))
  assert message(folder) == (
    f"got '{folder}' with pytorch_model.bin, a pickle, which may run any code"
    " and is never loaded; expected model.safetensors: save it with"
    " save_pretrained(..., safe_serialization=True)."
  )
  assert not trace.exists()


def _timm(path, **changes):
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
    ({"image_size": [0, 8]}, "image_size: got [0, 8], expected 1 or more"),
    (
      {"image_size": "8"},
      "image_size: got '8', expected a value of type 2 whole",
    ),
    ({"class_names": [1]}, "class_names: got 1, expected a value of type text"),
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
  ],
)
def test_arrays_of_a_vit(tmp_path, name, shape, said):
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
