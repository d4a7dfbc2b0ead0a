"""Every format is recognised by its content; broken files are refused."""

import functools
import json
import pathlib
import pickle
import re
import shutil
import zipfile

import foreign
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import vit_jax
from vit_jax import checkpoint, weights
from vit_jax.config import model_config, to_dict
from vit_jax.weights import hf, labels, safetensors_file, timm
from vit_jax.weights.found import EXPECTED
from vit_jax.weights.google import POS_EMBEDDING

DATA = pathlib.Path(__file__).parents[1] / "data"
SIZE = dict(variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4)
MODEL = model_config(**SIZE)


def published(name="vit_linen_names"):
  """Arrays of a ViT with 2 blocks on a grid of 4 x 4, 11 classes."""
  with np.load(DATA / f"{name}.weights.npz") as file:
    return dict(file)


def save(path, **changes):
  """Writes a `.npz` with other arrays in it; None leaves one out."""
  arrays = published() | {k.replace("__", "/"): v for k, v in changes.items()}
  np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
  return path


@functools.cache
def our_params(image=(32, 32), num_classes=11):
  return foreign.random_params(MODEL, num_classes, image)


def nested(params):
  return unflatten_dict(params, sep="/")


def message(path, **options):
  """Returns the error for a path that cannot be loaded."""
  with pytest.raises((ValueError, FileNotFoundError)) as e:
    vit_jax.load(path, **options)
  return str(e.value)


def assert_same(found, params):
  assert found.params.keys() == params.keys()
  for name, array in params.items():
    np.testing.assert_array_equal(found.params[name], array, name)


class Touch:
  """Makes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


# What is read.


def test_google():
  path = DATA / "vit_token_prelogits.weights.npz"
  found = weights.read(path)
  assert (found.path, found.format, found.options) == (str(path), "google", {})
  assert found.grid is None and found.image_size is None and found.ops is None
  assert found.class_names is None and found.notes == ()
  assert found.has_cls_row
  found = weights.read(DATA / "bv_gap_sincos2d_rep.weights.npz", grid=(2, 8))
  assert found.grid == (2, 8) and not found.has_cls_row
  found = weights.read(DATA / "bv_token.weights.npz")
  assert found.options == {"cls_row": False} and not found.has_cls_row
  # The caller knows better.
  found = weights.read(DATA / "bv_token.weights.npz", options={"cls_row": True})
  assert found.has_cls_row


def test_nothing_is_read_before_it_is_looked_at(monkeypatch):
  looked = []
  read = np.lib.format.read_array
  monkeypatch.setattr(
    np.lib.format,
    "read_array",
    lambda *args, **kw: looked.append(1) or read(*args, **kw),
  )
  found = weights.read(DATA / "vit_linen_names.weights.npz")
  weights.identify(found.params, found.options)
  assert not looked
  found = vit_jax.load(DATA / "vit_linen_names.weights.npz")
  assert len(looked) == len(found.report.loaded)  # each once


@pytest.mark.parametrize(
  "num_classes, loss, sentence",
  [(1000, None, "ImageNet-1k"), (21_843, "sigmoid", "Google's ImageNet-21k")],
)
def test_a_width_that_has_names(tmp_path, num_classes, loss, sentence):
  path = save(
    tmp_path / "x.npz",
    head__kernel=np.zeros((48, num_classes), "f"),
    head__bias=np.zeros(num_classes, "f"),
  )
  found = weights.read(path)
  assert found.class_names == labels.known(num_classes)
  # Google's files of ImageNet-21k were trained with a sigmoid.
  assert found.loss == loss
  (note,) = found.notes
  assert note == labels.describe(num_classes) and sentence in note


def _timm(path, about=None, metadata=None):
  arrays = timm.write(our_params(), MODEL)
  safetensors_file.write(path, arrays, metadata or {})
  if about is not None:
    (path.parent / "config.json").write_text(json.dumps(about))
  return path


def test_timm(tmp_path):
  path = _timm(tmp_path / "model.safetensors")
  found = weights.read(path, options={"num_heads": 4})
  assert_same(found, our_params())
  assert found.format == "timm" and found.has_cls_row
  assert found.options == {"gelu": "erf", "ln_eps": 1e-6, "num_heads": 4}
  assert found.image_size is None and found.ops is None
  assert "State it: num_heads." in message(path)


@pytest.mark.parametrize(
  "about, ops",
  [
    (
      {"interpolation": "bicubic", "crop_pct": 0.9},
      "decode(dct='accurate')|resize_small_torch(35)|central_crop_torch(32)",
    ),
    (  # a share of 1 keeps the aspect ratio as well
      {"interpolation": "bilinear", "crop_pct": 1.0},
      "decode(dct='accurate')|resize_small_torch(32, 'bilinear')"
      "|central_crop_torch(32)",
    ),
    (
      {"crop_pct": 1.0, "crop_mode": "squash"},
      "decode(dct='accurate')|resize_torch(32)",
    ),
    (
      {"input_size": [3, 32, 64]},
      "decode(dct='accurate')|resize_torch((32, 64))",
    ),
  ],
)
def test_timm_s_config(tmp_path, about, ops):
  half = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 32, 32]}
  config = {"label_names": list("abcdefghijk"), "pretrained_cfg": half | about}
  _timm(tmp_path / "model.safetensors", config)
  # The file, or its folder.
  for path in (tmp_path / "model.safetensors", tmp_path):
    found = weights.read(path, options={"num_heads": 4})
    assert found.image_size == tuple((half | about)["input_size"][1:])
    assert found.class_names == tuple("abcdefghijk")
    assert found.ops == ops and found.notes == ()


def test_names_of_another_number_are_left_out(tmp_path):
  config = {"label_names": ["cat", "ox"]}
  path = _timm(tmp_path / "model.safetensors", config)
  found = weights.read(path, options={"num_heads": 4})
  assert found.class_names is None
  assert found.notes == ("got 2 names for a head of 11 classes: left out.",)


def test_another_normalisation_moves_into_the_patch_embedding(tmp_path):
  mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
  config = {"pretrained_cfg": {"mean": mean, "std": std}}
  path = _timm(tmp_path / "x.safetensors", config)
  found = weights.read(path, options={"num_heads": 4})
  pixels = np.random.default_rng(0).uniform(0, 1, (8, 8, 3))

  def embed(x, params):
    kernel, bias = (
      np.asarray(params[f"embedding/{n}"], np.float64)
      for n in ("kernel", "bias")
    )
    return np.einsum("hwi,hwio->o", x, kernel) + bias

  # Sums of 192 products of about 1 / sqrt(192) times 2, rounded at 6e-8.
  np.testing.assert_allclose(
    embed(2 * pixels - 1, found.params),
    embed((pixels - mean) / std, our_params()),
    atol=5e-6,
  )
  assert found.notes == (
    f"images were normalised with mean {mean} and deviation {std}; this is now"
    " part of the patch embedding, which gets images in [-1, 1].",
  )


def test_a_standardised_convolution_cannot_take_it(tmp_path):
  model = model_config(name="bit", variant="R26x0.5")
  params = foreign.random_params(model, 3, (32, 32))
  path = tmp_path / "model.safetensors"
  safetensors_file.write(path, timm.write(params, model), {})
  found = weights.read(path)
  assert_same(found, params)
  assert found.options["root_pad"] == "zero"
  config = {"mean": [0.4] * 3, "std": [0.5] * 3}
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert message(path) == (
    f"{path}: got images normalised with mean [0.4, 0.4, 0.4] and deviation"
    " [0.5, 0.5, 0.5], expected 0.5 and 0.5 for a model that begins with a"
    " standardised convolution."
  )


def _hf(folder, image=(32, 48), **changes):
  arrays, config, preprocessor = hf.write(
    our_params(image), MODEL, num_classes=11, image_size=image
  )
  folder.mkdir()
  safetensors_file.write(folder / "model.safetensors", arrays, {})
  (folder / "config.json").write_text(json.dumps(config | changes))
  (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
  return folder


def test_hugging_face(tmp_path):
  folder = _hf(tmp_path / "m", hidden_act="gelu", layer_norm_eps=1e-12)
  found = weights.read(folder)
  assert_same(found, our_params((32, 48)))
  assert found.format == "hf" and found.has_cls_row
  assert found.options == {"gelu": "erf", "ln_eps": 1e-12}
  assert (found.grid, found.image_size) == ((4, 6), (32, 48))
  assert found.ops == "decode|resize((32, 48), antialias=True)"
  assert found.class_names is None  # LABEL_0 is no name
  file = weights.read(folder / "model.safetensors")
  assert file.grid == (4, 6) and file.ops == found.ops


@pytest.mark.parametrize("do_normalize", [True, False])
def test_hugging_face_s_preprocessor(tmp_path, do_normalize):
  folder = _hf(tmp_path / "m")
  about = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3}
  about |= {"do_normalize": do_normalize}
  (folder / "preprocessor_config.json").write_text(json.dumps(about))
  (note,) = weights.read(folder).notes
  mean, std = ("0.4", "0.2") if do_normalize else ("0.0", "1.0")
  assert f"with mean [{mean}, " in note and f"deviation [{std}, " in note


def test_hugging_face_in_several_files(tmp_path):
  folder = _hf(tmp_path / "m")
  whole = folder / "model.safetensors"
  arrays = {
    k: np.asarray(v)
    for k, v in safetensors_file.open_safetensors(whole)[0].items()
  }
  whole.unlink()
  files = {k: f"model-{i % 2}.safetensors" for i, k in enumerate(arrays)}
  for file in set(files.values()):
    part = {k: v for k, v in arrays.items() if files[k] == file}
    safetensors_file.write(folder / file, part, {})
  index = json.dumps({"weight_map": files})
  (folder / safetensors_file.INDEX).write_text(index)
  assert_same(weights.read(folder), our_params((32, 48)))


# Checkpoints, ours and others'.


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/7"])
def test_a_run(tmp_path, inside):
  params = nested(our_params((16, 32)))
  metadata = {
    "config": {"model": to_dict(MODEL), "seed": 3},  # as train.py writes it
    "grid": [2, 4],
    "image_size": [16, 32],
    "class_names": list("abcdefghijk"),
    "preprocessing": {"ops": "decode|resize((16, 32))"},
  }
  for step in (5, 7):
    path = str(tmp_path / "checkpoints" / str(step))
    checkpoint.write_params(path, params, metadata | {"step": step})
  found = weights.read(tmp_path / inside)
  assert_same(found, our_params((16, 32)))
  assert found.format == "checkpoint" and found.metadata["step"] == 7
  assert (found.grid, found.image_size) == ((2, 4), (16, 32))
  assert found.class_names == tuple("abcdefghijk")
  assert found.ops == "decode|resize((16, 32))"
  vit = vit_jax.load(tmp_path / inside)
  assert (vit.config, vit.image_size, vit.ops) == (
    MODEL,
    (16, 32),
    found.ops,
  )


def test_paths_from_here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  checkpoint.write_params("run", nested(our_params()), {})
  _orbax(tmp_path / "tree", nested(our_params()))
  save("x.npz")
  for path in ("run", "tree"):
    assert_same(weights.read(path), our_params())
  assert weights.read("x.npz").params.keys() == our_params().keys()


def test_a_checkpoint_has_no_names_but_its_own(tmp_path):
  """A head of 1000 is not always ImageNet's; a run knows its data."""
  params = nested(our_params(num_classes=1000))
  metadata = {"model": to_dict(MODEL), "class_names": None}
  checkpoint.write_params(str(tmp_path / "x"), params, metadata)
  found = weights.read(tmp_path / "x")
  assert found.class_names is None and found.notes == ()


def _orbax(folder, tree):
  with ocp.PyTreeCheckpointer() as writer:
    writer.save(folder, tree)
  return folder


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"params": x}])
def test_a_tree_of_another_program(tmp_path, wrap):
  path = _orbax(tmp_path / "x", wrap(nested(our_params())))
  found = weights.read(path)
  assert_same(found, our_params())
  assert found.format == "checkpoint" and found.metadata == {}
  assert weights.identify(found.params, found.options) == MODEL


def test_a_tree_in_its_item_folder(tmp_path):
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler("default")) as writer:
    tree = ocp.args.StandardSave(nested(our_params()))
    writer.save(tmp_path / "x", ocp.args.Composite(default=tree))
  assert_same(weights.read(tmp_path / "x"), our_params())


def test_metadata_of_another_program(tmp_path):
  metadata = {"author": "me"}
  checkpoint.write_params(str(tmp_path / "x"), nested(our_params()), metadata)
  found = weights.read(tmp_path / "x")
  assert found.metadata == {} and found.options == {}
  assert_same(found, our_params())


def test_trees_that_are_no_model(tmp_path):
  path = _orbax(tmp_path / "a", {"conv1": {"kernel": np.ones(3)}})
  assert message(path) == (
    f"{path}: got 1 parameters, such as conv1/kernel; expected those of a"
    " Vision Transformer (embedding/kernel, Transformer/encoderblock_0/...), of"
    " a hybrid, or of a BiT ResNet (conv_root/kernel, block1/unit1/...)."
  )
  path = _orbax(tmp_path / "b", nested(our_params()) | {"more": [np.ones(3)]})
  assert message(path) == (
    f"{path}: got a checkpoint with 'more', which is no array; {EXPECTED}."
  )
  path = _orbax(tmp_path / "c", nested(our_params()) | {"step": 3})
  assert "step: got type int" in message(path)


# Orbax's threads outlive for a moment the loop that they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_tree(tmp_path):
  path = tmp_path / "x"
  checkpoint.write_params(str(path), nested(our_params()), {})
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


# What is refused.


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
    f"1 fault in the weights of {path} for this model:\n"
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
  folder = _hf(tmp_path / "m")
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
  folder, trace = _hf(tmp_path / "m"), tmp_path / "was_here"
  (folder / "model.safetensors").unlink()
  (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(trace)))
  assert message(folder) == (
    f"got '{folder}' with pytorch_model.bin, a pickle, which may run any code"
    " and is never loaded; expected model.safetensors: save it with"
    " save_pretrained(..., safe_serialization=True)."
  )
  assert not trace.exists()


def test_the_samples_are_a_whole_model():
  """What the tests above change must be right before."""
  vit = vit_jax.load(DATA / "vit_linen_names.weights.npz")
  assert vit.config == MODEL
  shapes = {k: v.shape for k, v in flatten_dict(vit.params, sep="/").items()}
  assert shapes == foreign.shapes(MODEL, 11, (32, 32))
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(vit.params))
