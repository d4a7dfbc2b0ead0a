"""Files of torch.save: arrays in any container, and never code."""

import argparse
import json
import pathlib
import re
import sys

import numpy as np
import pytest
import torch_libraries
from flax.traverse_util import flatten_dict
from weight_files import MODEL, assert_same, hf_folder, message, our_params

import vit_jax
from vit_jax.weights import reading, safetensors_file, weights_file
from vit_jax.zoo.files import timm, torch_file

DOCS = pathlib.Path(vit_jax.__file__).parents[1] / "docs"
torch = torch_libraries.Later("torch")


def tensors(prefix="", dtype="float32"):
  return {
    prefix + name: torch.from_numpy(array).to(getattr(torch, dtype))
    for name, array in timm.write(our_params(), MODEL).items()
  }


def load(path):
  return vit_jax.load(path, num_heads=4, verbose=False)


def flat(vit):
  return flatten_dict(vit.params, sep="/")


@pytest.mark.slow
@pytest.mark.parametrize("is_zip", [True, False])
def test_arrays_alone(tmp_path, is_zip):
  path = tmp_path / "x.pth"
  kwargs = {"_use_new_zipfile_serialization": is_zip}
  torch.save(tensors(), path, **kwargs)
  assert_same(flat(load(path)), our_params())
  torch.save(tensors(dtype="bfloat16"), path, **kwargs)
  kernel = load(path).params["embedding"]["kernel"]
  np.testing.assert_allclose(
    kernel, our_params()["embedding/kernel"], rtol=2**-8
  )
  torch_file.write(path, timm.write(our_params(), MODEL), {"a": 1})
  assert_same(flat(load(path)), our_params())


@pytest.mark.slow
@pytest.mark.parametrize(
  "tree, note",
  [
    (lambda own, other: {"state_dict": own, "epoch": 3}, "'state_dict' in the"),
    (lambda own, other: {"model": own, "optimizer": {"state": {0: other}}},
     "'model' in the file, and not of 'optimizer'."),
    (lambda own, other: {"student": other, "teacher": own},
     "'teacher' in the file, and not of 'student'."),
    (lambda own, other: {"model": {"model": other, "ema": own}},
     "'model.ema' in the file, and not of 'model.model'."),
  ],
)  # fmt: skip
def test_the_arrays_of_a_checkpoint(tmp_path, tree, note):
  path = tmp_path / "x.pth"
  zeros = {k: 0 * v for k, v in tensors("module.").items()}
  torch.save(tree(tensors("_orig_mod.module."), zeros), path)
  vit = load(path)
  assert_same(flat(vit), our_params())
  first, second, *_ = vit.report.notes
  assert f"the arrays are those of {note}" in first
  assert "the prefix '_orig_mod.module.' was taken off" in second


def save_code(path):
  torch.save({"model": tensors(), "args": argparse.Namespace(lr=1)}, path)


def save_half(path):
  torch.save(tensors(), path)
  data = path.read_bytes()
  path.write_bytes(data[: len(data) // 2])


@pytest.mark.slow
@pytest.mark.parametrize(
  "save, text",
  [
    (save_code, "would run argparse.Namespace"),
    (lambda path: torch.save([1, 2], path), "expected a state_dict"),
    (
      lambda path: torch.jit.script(torch.nn.Linear(2, 2)).save(path),
      "TorchScript",
    ),
    (save_half, "expected a whole"),
  ],
  ids="code list script damaged".split(),
)
def test_files_that_are_refused(tmp_path, save, text):
  save(path := tmp_path / "x.pth")
  assert f"got '{path}'" in message(path) and text in message(path)


def test_without_torch(tmp_path, monkeypatch):
  path = tmp_path / "x.pth"
  path.write_bytes(reading.OLD_TORCH)
  monkeypatch.setitem(sys.modules, "torch", None)
  assert "pip install torch" in message(path)


class Network:
  """Pickled, it is what a whole module of torch is: an object with code."""

  def __init__(self, state):
    self.state = state

  def state_dict(self):
    return self.state


@pytest.mark.slow
@pytest.mark.parametrize(
  "tree",
  [
    lambda own: {
      "student": {f"backbone.{k}": 0 * v for k, v in own.items()},
      "teacher": {f"backbone.{k}": v for k, v in own.items()},
      "args": argparse.Namespace(lr=1),
    },
    lambda own: {k: v.numpy() for k, v in own.items()},
    lambda own: {"model": Network(own), "epoch": 3},
  ],
  ids="dino numpy module".split(),
)
def test_the_lines_of_the_docs_save_a_pickle_s_arrays(tmp_path, tree):
  source, target = tmp_path / "x.pth", tmp_path / "y.pth"
  torch.save(tree(tensors()), source)
  assert "see docs/weights.md" in message(source)
  page = (DOCS / "weights.md").read_text()
  (code,) = re.findall("```py\n(import torch.*?)```", page, re.DOTALL)
  code = code.replace("source.pth", str(source))
  exec(code.replace("target.pth", str(target)), {})
  assert_same(flat(load(target)), our_params())


@pytest.mark.slow
def test_a_folder_of_transformers_with_pickles(tmp_path):
  folder = hf_folder(tmp_path / "m")
  safe = folder / "model.safetensors"
  arrays, _ = safetensors_file.open_safetensors(safe)
  state = {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}
  expected = flat(vit_jax.load(folder, verbose=False))
  safe.unlink()
  names = ["pytorch_model-1.bin", "pytorch_model-2.bin"]
  weight_map = {k: names[i >= 5] for i, k in enumerate(state)}
  for name in names:
    part = {k: v for k, v in state.items() if weight_map[k] == name}
    torch.save(part, folder / name)
  index = json.dumps({"weight_map": weight_map})
  (folder / weights_file.TORCH_INDEX).write_text(index)
  assert_same(flat(vit_jax.load(folder, verbose=False)), expected)
  torch.save(state, folder / weights_file.TORCH_BIN)
  assert_same(flat(vit_jax.load(folder, verbose=False)), expected)
