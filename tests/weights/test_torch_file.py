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
from weight_files import MODEL, hf_folder, message, our_params

import vit_jax
from vit_jax.weights import reading, safetensors_file, weights_file
from vit_jax.zoo.files import timm, torch_file


@pytest.fixture(scope="module")
def torch():
  return torch_libraries.load("torch")


def tensors(torch, prefix="", dtype="float32"):
  return {
    prefix + name: torch.from_numpy(array).to(getattr(torch, dtype))
    for name, array in timm.write(our_params(), MODEL).items()
  }


def load(path):
  return vit_jax.load(path, num_heads=4, verbose=False)


def assert_ours(vit):
  for name, array in flatten_dict(vit.params, sep="/").items():
    np.testing.assert_array_equal(array, our_params()[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("is_zip", [True, False])
def test_arrays_alone(torch, tmp_path, is_zip):
  path = tmp_path / "x.pth"
  kwargs = {"_use_new_zipfile_serialization": is_zip}
  torch.save(tensors(torch), path, **kwargs)
  assert_ours(load(path))
  half = tmp_path / "half.bin"
  torch.save(tensors(torch, dtype="bfloat16"), half, **kwargs)
  kernel = load(half).params["embedding"]["kernel"]
  np.testing.assert_allclose(
    kernel, our_params()["embedding/kernel"], rtol=2**-8
  )


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
def test_the_arrays_of_a_checkpoint(torch, tmp_path, tree, note):
  path = tmp_path / "x.pth"
  zeros = {k: 0 * v for k, v in tensors(torch, "module.").items()}
  torch.save(tree(tensors(torch, "_orig_mod.module."), zeros), path)
  vit = load(path)
  assert_ours(vit)
  first, second, *_ = vit.report.notes
  assert f"the arrays are those of {note}" in first
  assert "the prefix '_orig_mod.module.' was taken off" in second


def _script(torch, path):
  torch.jit.script(torch.nn.Linear(2, 2)).save(path)


def _half(torch, path):
  torch.save(tensors(torch), path)
  data = path.read_bytes()
  path.write_bytes(data[: len(data) // 2])


@pytest.mark.slow
@pytest.mark.parametrize(
  "save, text",
  [
    (
      lambda torch, path: torch.save(
        {"model": tensors(torch), "args": argparse.Namespace(lr=1)}, path
      ),
      "would run argparse.Namespace",
    ),
    (lambda torch, path: torch.save([1, 2], path), "expected a state_dict"),
    (_script, "TorchScript"),
    (_half, "expected a whole"),
  ],
  ids="code list script damaged".split(),
)
def test_files_that_are_refused(torch, tmp_path, save, text):
  save(torch, path := tmp_path / "x.pth")
  assert f"got '{path}'" in message(path) and text in message(path)


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
def test_the_lines_of_the_docs_save_a_pickle_s_arrays(torch, tmp_path, tree):
  source, target = tmp_path / "x.pth", tmp_path / "y.pth"
  torch.save(tree(tensors(torch)), source)
  assert "see docs/weights.md" in message(source)
  page = pathlib.Path(vit_jax.__file__).parents[1] / "docs/weights.md"
  (code,) = re.findall(
    "```py\n(import torch.*?)```", page.read_text(), re.DOTALL
  )
  code = code.replace("source.pth", str(source))
  exec(code.replace("target.pth", str(target)), {})
  assert_ours(load(target))


@pytest.mark.slow
def test_a_folder_of_transformers_with_pickles(torch, tmp_path):
  folder = hf_folder(tmp_path / "m")
  safe = folder / "model.safetensors"
  arrays, _ = safetensors_file.open_safetensors(safe)
  state = {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}
  expected = vit_jax.load(folder, verbose=False).params
  safe.unlink()
  names = ["pytorch_model-1.bin", "pytorch_model-2.bin"]
  parts = dict(zip(names, (list(state)[:5], list(state)[5:]), strict=True))
  for name, keys in parts.items():
    torch.save({k: state[k] for k in keys}, folder / name)
  weight_map = {k: name for name, keys in parts.items() for k in keys}
  index = json.dumps({"weight_map": weight_map})
  (folder / weights_file.TORCH_INDEX).write_text(index)
  for _ in range(2):
    got = flatten_dict(vit_jax.load(folder, verbose=False).params)
    for key, array in flatten_dict(expected).items():
      np.testing.assert_array_equal(got[key], array)
    torch.save(state, folder / weights_file.TORCH_BIN)


@pytest.mark.slow
def test_written_and_read_to_the_bit(torch, tmp_path):
  arrays = timm.write(our_params(), MODEL)
  torch_file.write(tmp_path / "x.pth", arrays, {"a": 1})
  assert_ours(load(tmp_path / "x.pth"))


def test_without_torch(tmp_path, monkeypatch):
  path = tmp_path / "x.pth"
  path.write_bytes(reading.OLD_TORCH)
  monkeypatch.setitem(sys.modules, "torch", None)
  assert "pip install torch" in message(path)
