"""Broken and foreign files are refused, with the reason and the path."""

import json
import pathlib
import pickle
import re
import shutil
import zipfile

import flax
import foreign
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from weight_files import (
  DATA,
  MODEL,
  hf_folder,
  message,
  nested,
  orbax,
  our_params,
  save,
)

import vit_jax
from vit_jax.checkpointing import checkpointer
from vit_jax.config import to_dict
from vit_jax.weights import safetensors_file
from vit_jax.weights.weights_file import EXPECTED, lazy
from vit_jax.zoo.files import key_prefixes, timm

DENSE = "Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel"
TABLE = "Transformer/encoderblock_0/posembed_input/pos_embedding"


class Touch:
  """Makes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


def wrong_bias():
  bias = np.zeros(11, "f")
  bias[2] = np.inf
  return bias


@pytest.mark.parametrize(
  "changes, expected",
  [
    (
      {DENSE: np.zeros((48, 95), "f")},
      f"{DENSE}: got shape (48, 95), expected (48, 96).",
    ),
    (
      {"head/bias": wrong_bias()},
      "head/bias: got 1 NaN or infinite values.",
    ),
    (
      {"head/bias": None},
      "parts of the head do not fit together: head/bias, head/kernel.",
    ),
    ({"head/bias": np.zeros(11, int)}, "got type int64, expected floats"),
    ({TABLE: np.zeros(5, "f")}, "pos_embedding: got (5,), expected 3"),
  ],
)
def test_arrays_that_make_no_model(tmp_path, changes, expected):
  changes = {k.replace("/", "__"): v for k, v in changes.items()}
  path = save(tmp_path / "x.npz", **changes)
  text = message(path)
  assert str(path) in text and expected in text


def test_trees_that_are_no_model(tmp_path):
  path = orbax(tmp_path / "a", {"conv1": {"kernel": np.ones(3)}})
  assert f"{path}: got 'conv1/kernel', expected" in message(path)
  path = orbax(tmp_path / "b", nested(our_params()) | {"more": [np.ones(3)]})
  assert message(path) == (
    f"{path}: got 'more', which is no array; {EXPECTED}."
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
    assert message(broken).startswith(f"{broken} is damaged: ")
  (path / "metadata" / "metadata").write_text("{")
  assert message(path).startswith(
    f"{path} is damaged: metadata/metadata: got no JSON (Expecting "
  )


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
)
def test_other_files(tmp_path, content):
  path = tmp_path / "B_16.npz"
  path.write_bytes(content)
  is_npz = content[:2] == b"PK"
  reason = "expected a whole .npz" if is_npz else "of no known format"
  assert f"got '{path}', " in message(path) and reason in message(path)
  folder = hf_folder(tmp_path / "m")
  (folder / "model.safetensors").write_bytes(content)
  assert f"got '{folder}/model.safetensors', expected" in message(folder)


def test_a_model_in_parts(tmp_path):
  folder = hf_folder(tmp_path / "m")
  file = folder / "model.safetensors"
  arrays, _ = safetensors_file.open_safetensors(file)
  arrays = {name: np.asarray(array) for name, array in arrays.items()}
  expected = vit_jax.load(folder, verbose=False).params
  file.unlink()
  parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
  of = {name: parts[i % 2] for i, name in enumerate(arrays)}
  for part in parts:
    own = {name: a for name, a in arrays.items() if of[name] == part}
    safetensors_file.write(folder / part, own, {})
  assert "expected one, or model.safetensors.index" in message(folder)
  index = folder / safetensors_file.INDEX
  index.write_text(json.dumps({"weight_map": of}))
  for path in (folder, index):
    got = vit_jax.load(path, verbose=False).params
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_file_of_another_name_is_read_where_it_is_alone(tmp_path):
  folder = hf_folder(tmp_path / "m")
  file = folder / "model.fp16.safetensors"
  (folder / "model.safetensors").rename(file)
  assert vit_jax.load(folder, verbose=False).num_classes == 11
  shutil.copy(file, folder / "other.safetensors")
  assert "'model.fp16.safetensors', 'other.safetensors', expected" in message(
    folder
  )


@pytest.mark.parametrize(
  "rename",
  [
    lambda n: "module." + n,
    lambda n: "model." + n,
    lambda n: "encoder." + n,
    lambda n: "teacher.backbone." + n,
    lambda n: "visual.trunk." + n,
    lambda n: re.sub(r"^blocks\.(\d+)", r"blocks.\1.\1", n),  # DINOv2's chunks
    lambda n: re.sub(r"(norm\d|proj)\.", r"_orig_mod.\1.", n),
    lambda n: (
      "_fsdp_wrapped_module."
      + re.sub(
        r"^(blocks\.\d+)",
        r"\1._fsdp_wrapped_module._checkpoint_wrapped_module",
        n,
      )
    ),
  ],
)
def test_names_around_a_model_are_taken_off(tmp_path, rename):
  arrays = timm.write(our_params(), MODEL)
  path = tmp_path / "x.safetensors"
  safetensors_file.write(path, {rename(n): a for n, a in arrays.items()}, {})
  vit = vit_jax.load(path, num_heads=4, verbose=False)
  for name, array in flatten_dict(vit.params, sep="/").items():
    np.testing.assert_array_equal(array, our_params()[name])
  assert any(text in vit.report.notes[0] for text in ("taken o", "chunks"))


@pytest.mark.parametrize(
  "prefix", ["model.", "vit.", "clf.", "base_model.model.", "a._orig_mod."]
)
def test_hugging_face_s_names_in_a_wrapper(tmp_path, prefix):
  folder = hf_folder(tmp_path / "m")
  file = folder / "model.safetensors"
  arrays = {
    f"{prefix}{n}": np.asarray(a)
    for n, a in safetensors_file.open_safetensors(file)[0].items()
  }
  safetensors_file.write(file, arrays, {})
  vit = vit_jax.load(folder, verbose=False)
  *_, note = [n for n in vit.report.notes if " was taken o" in n]
  assert f"the prefix {prefix.removesuffix('_orig_mod.')!r} was taken" in note


def test_arrays_beside_a_wrapped_model():
  names = ["patch_embed.proj.weight", "blocks.0.norm1.weight"]

  def without(*names):
    return key_prefixes.without({n: lazy(np.ones(3, "f")) for n in names})

  teacher = [f"teacher.backbone.{n}" for n in names]
  known = ["teacher.dino_head.mlp.0.weight", "logit_scale", "text.ln.weight"]
  arrays, (note,) = without(*teacher, *known)
  assert list(arrays) == names and "and left out 'teacher.dino_head" in note
  with pytest.raises(ValueError, match="got arrays beside .teacher"):
    without(*teacher, "fc.weight")
  student = [f"student.backbone.{n}" for n in names]
  _, (note,) = without(*teacher, *student, "student.dino_head.weight")
  assert "'teacher.backbone.' was taken" in note and "'student.backbone" in note
  others = [f"a.{n}" for n in names] + [f"b.{n}" for n in names]
  with pytest.raises(ValueError, match="several models: 'a.', 'b.'"):
    without(*others)
  assert without(*names, "head.weight")[1] == ()


def test_arrays_of_other_models(tmp_path):
  path = tmp_path / "x.npz"
  np.savez(path, conv1=np.ones((7, 7, 3, 64)), fc=np.ones((64, 10)))
  assert message(path) == (
    f"got '{path}' with arrays of no known model: 'conv1', 'fc'; {EXPECTED}."
  )
  np.savez(path)
  assert "of no known model: none" in message(path)
  path = tmp_path / "x.safetensors"
  safetensors_file.write(path, {"conv1.weight": np.ones(3, "f")}, {})
  assert f"'{path}' with arrays of no known model: 'conv1.w" in message(path)


def test_nothing_is_there(tmp_path):
  path = tmp_path / "none.npz"
  assert message(path) == (f"got '{path}', which does not exist; {EXPECTED}.")
  (tmp_path / "notes.txt").write_text("none here")
  (tmp_path / "checkpoints").mkdir()
  assert message(tmp_path) == (
    f"got '{tmp_path}', which has no checkpoint in it; expected the folder of a"
    " run or of a step."
  )


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_never_run(tmp_path, protocol):
  trace = tmp_path / "was_here"
  payload = pickle.dumps(Touch(trace), protocol)
  for name in ("model.pkl", "x.npz", "x.safetensors"):
    (tmp_path / name).write_bytes(payload)
    assert "of no known format" in message(tmp_path / name)
  assert not trace.exists()
  pickle.loads(payload)
  assert trace.exists()  # it would have been there


def test_pickles_in_other_files_are_never_run(tmp_path):
  trace = tmp_path / "was_here"
  path = tmp_path / "model.pth"
  with zipfile.ZipFile(path, "w") as archive:  # as torch.save writes it
    archive.writestr("model/data.pkl", pickle.dumps(Touch(trace)))
    archive.writestr("model/data/0", bytes(64))
  # The sentence depends on whether torch is installed.
  assert f"got '{path}', " in message(path) and "orch" in message(path)
  objects = np.array([Touch(trace)], object)
  assert "'head/bias': pickled objects, expected numbers" in message(
    save(tmp_path / "x.npz", head__bias=objects)
  )
  np.save(tmp_path / "x.npy", objects)
  assert "of no known format" in message(tmp_path / "x.npy")
  folder = hf_folder(tmp_path / "m")
  (folder / "model.safetensors").unlink()
  (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(trace)))
  assert "pytorch_model.bin', " in message(folder)
  assert not trace.exists()


def test_a_broken_file_beside_the_weights(tmp_path):
  folder = hf_folder(tmp_path / "m")
  config = folder / "config.json"
  for text, expected in (
    ("{", f"{config}: got no JSON ("),
    ("[1]", f"{config}: got list, expected a JSON object."),
  ):
    config.write_text(text)
    assert message(folder).startswith(expected)
  config.unlink()
  assert "config.json: missing" in message(folder)


def _timm(path, **changes):
  ours = {"model": to_dict(MODEL), "image_size": [32, 32], "grid": [4, 4]}
  arrays = timm.write(our_params(), MODEL)
  safetensors_file.write(path, arrays, {"vit_jax": ours | changes})
  return path


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({"model": {"depth": 999}}, "depth: got 999, expected 2 by the"),
    ({"image_size": [36, 32]}, "got images of 36 x 32, expected multiples of"),
    ({"class_names": [1]}, "class_names: got 1, expected a value of type text"),
    ({"preprocessing": {"ops": "(" * 999}}, "expected the form"),
  ],
)
def test_wrong_statements_in_our_own_header(tmp_path, changes, expected):
  path = _timm(tmp_path / "x.safetensors")
  assert vit_jax.load(path, verbose=False).config == MODEL
  if isinstance(changes.get("model"), dict):
    changes["model"] = to_dict(MODEL) | changes["model"]
  text = message(_timm(path, **changes), verbose=False)
  assert expected in text


def test_a_number_in_a_name_makes_no_list():
  """`blocks.99999999` alone does not make rows of so many blocks."""
  names = ["patch_embed.proj.weight", "blocks.0.x", "blocks.99999999.x"]
  arrays = {n: np.zeros((8, 3, 4, 4), np.float32) for n in names}
  with pytest.raises(ValueError, match="'blocks.99999999.x'"):
    foreign.translate(timm.SERIES, arrays, 2)
