"""Files of torch.save: arrays in any container, and never code."""

import argparse
import importlib.util
import json
import pathlib

import numpy as np
import pytest
import torch_libraries
from flax.traverse_util import flatten_dict
from weight_files import MODEL, hf_folder, message, our_params

import vit_jax
from vit_jax.weights import safetensors_file
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


@pytest.mark.slow
@pytest.mark.parametrize(
  "tensor, text",
  [
    (lambda t: t.ones(2, dtype=t.complex64), "torch.complex64, torch.strided,"),
    (lambda t: t.eye(2).to_sparse(), "torch.float32, torch.sparse_coo,"),
    (
      lambda t: t.ones(2).to(t.float8_e4m3fn),
      "torch.float8_e4m3fn, torch.strided, expected a dense one of float32,",
    ),
    (
      lambda t: t.ones(2, device="meta"),
      "torch.float32, torch.strided, on the device meta, without values,",
    ),
  ],
  ids="complex sparse float8 meta".split(),
)
def test_tensors_of_other_types(torch, tmp_path, tensor, text):
  path = tmp_path / "x.pth"
  torch.save({"a": tensor(torch)}, path)
  assert f"a: got a tensor of type {text}" in message(path)


@pytest.mark.slow
def test_a_pickle_that_would_run_code(torch, tmp_path):
  path = tmp_path / "x.pth"
  args = argparse.Namespace(lr=1)
  torch.save({"model": tensors(torch), "args": args}, path)
  text = message(path)
  assert f"got '{path}', a PyTorch pickle that would run code" in text
  assert "argparse.Namespace" in text and "weights_only=False" in text
  torch.save([1, 2], path)
  assert "without arrays by name (a list), expected the state_dict" in message(
    path
  )
  data = path.read_bytes()
  torch.jit.script(torch.nn.Linear(2, 2)).save(path)
  assert "a TorchScript program" in message(path)
  torch.save(tensors(torch), path)
  data = path.read_bytes()
  path.write_bytes(data[: len(data) // 2])
  assert "is not a zip" in message(path) or "cannot" in message(path)


def _run(torch, line, source, target):
  """Runs a line of Python that an error proposes."""
  exec(line, {"torch": torch, "SRC": str(source), "DST": str(target)})
  assert_ours(load(target))


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
    lambda own: {"model": own, "args": argparse.Namespace(lr=1)},
    lambda own: {
      "student": {f"backbone.{k}": 0 * v for k, v in own.items()},
      "teacher": {f"backbone.{k}": v for k, v in own.items()},
      "args": argparse.Namespace(lr=1),
    },
    lambda own: {
      "state_dict": {f"model.{k}": v for k, v in own.items()},
      "hyper_parameters": argparse.Namespace(lr=1),
    },
    lambda own: {k: v.numpy() for k, v in own.items()},
    lambda own: Network(own),
    lambda own: {"model": Network(own), "epoch": 3},
  ],
  ids="mae dino lightning numpy module modules".split(),
)
def test_the_line_for_a_pickle_saves_its_arrays(torch, tmp_path, tree):
  path = tmp_path / "x.pth"
  torch.save(tree(tensors(torch)), path)
  _, line = message(path).split("save its arrays: ")
  _run(torch, line, path, tmp_path / "y.pth")


@pytest.mark.slow
@pytest.mark.parametrize(
  "prefix, tree",
  [
    ("module.", lambda own, other: {"n_averaged": zero_of(own), **own}),
    ("module.momentum_encoder.", lambda own, other: {
      "epoch": 300, "state_dict": own | other}),
  ],
)  # fmt: skip
def test_the_line_for_one_of_several_models(torch, tmp_path, prefix, tree):
  path = tmp_path / "x.pth.tar"
  zeros = {k: 0 * v for k, v in tensors(torch, "module.base_encoder.").items()}
  torch.save(tree(tensors(torch, prefix), zeros), path)
  text = message(path)
  line = text[text.index("p = ") :]
  assert line.startswith(f"p = {prefix!r}; ")
  _run(torch, line, path, tmp_path / "y.pth")


def zero_of(tensors):
  """Returns a tensor that is no array of the model."""
  return 0 * next(iter(tensors.values()))


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
  (folder / torch_file.INDEX).write_text(json.dumps({"weight_map": weight_map}))
  for _ in range(2):
    got = flatten_dict(vit_jax.load(folder, verbose=False).params)
    for key, array in flatten_dict(expected).items():
      np.testing.assert_array_equal(got[key], array)
    torch.save(state, folder / torch_file.BIN)


@pytest.mark.slow
def test_written_and_read_to_the_bit(torch, tmp_path):
  arrays = timm.write(our_params(), MODEL)
  torch_file.write(tmp_path / "x.pth", arrays, {"a": 1})
  assert_ours(load(tmp_path / "x.pth"))


def test_without_torch(tmp_path, monkeypatch):
  path = tmp_path / "x.pth"
  path.write_bytes(torch_file._OLD)
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda n: None if n == "torch" else find(n)
  )
  assert "which only torch can read. Install it (pip install" in message(path)


def test_torch_is_imported_in_one_file():
  root = pathlib.Path(vit_jax.__file__).parent
  files = [
    str(path.relative_to(root))
    for path in root.rglob("*.py")
    if "import torch\n" in path.read_text()
  ]
  assert files == ["weights/torch_file.py"]
