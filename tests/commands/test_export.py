"""Forward passes written for others: ONNX and StableHLO."""

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from converting import MODELS, make

import vit_jax
from vit_jax.commands import convert as convert_command
from vit_jax.tools.exporting import convert, onnx

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = DATA / "vit_token.weights.npz"
# float32 holds 7 digits; sums in another order lose one or two, and a ResNet
# that divides by deviations, three.
ROUNDING = 2e-5
MODERN = ("swiglu", "distilled")


def run(capsys, *argv):
  convert_command.main([str(word) for word in argv])
  return capsys.readouterr().out.splitlines()


def random_images(vit, count):
  rng = np.random.default_rng(count)
  shape = (count, *vit.image_size, 3)
  return rng.uniform(-1, 1, shape).astype(np.float32)


def logits(vit, images):
  with jax.default_matmul_precision("highest"):
    return np.asarray(vit(images)[0])


def assert_close(got, expected):
  assert got.shape == expected.shape
  assert np.abs(got - expected).max() < ROUNDING * np.abs(expected).max()


@pytest.mark.slow
def test_stablehlo(tmp_path, capsys):
  dst = tmp_path / "new" / "vit.stablehlo"
  run(capsys, TOKEN, dst, "--to=stablehlo")
  exported = jax.export.deserialize(bytearray(dst.read_bytes()))
  assert exported.platforms == ("cpu", "cuda", "tpu")
  vit = vit_jax.load(TOKEN, verbose=False)
  images = random_images(vit, 3)
  assert_close(np.asarray(exported.call(images)), logits(vit, images))


@pytest.fixture
def libraries():
  """`make test-all` installs them; jax2onnx promotes ranks."""
  for name in onnx.PACKAGES:
    pytest.importorskip(name)
  with jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
  "name",
  [
    pytest.param("vit_token", marks=pytest.mark.slow),
    *(
      pytest.param(name, marks=pytest.mark.nightly)
      for p in sorted(DATA.glob("*.weights.npz"))
      if (name := p.name.split(".")[0]) != "vit_token"
    ),
    *(pytest.param(n, marks=pytest.mark.nightly) for n in MODERN),
  ],
)
def test_onnx_gives_the_same_logits(tmp_path, name):
  """Token, mean and attention pooling, hybrids, BiT, later parts; any batch."""
  if name in MODERN:
    vit = make(**MODELS[name])
  else:
    vit = vit_jax.load(DATA / f"{name}.weights.npz", verbose=False)
  dst = tmp_path / "vit.onnx"
  convert.convert(vit, str(dst), "onnx")
  assert [p.name for p in tmp_path.iterdir()] == ["vit.onnx"]
  again = onnx.read(dst)
  for count in (1, 3):
    images = random_images(vit, count)
    assert_close(again(images), logits(vit, images))


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_opset_and_float16_of_an_onnx_file(tmp_path, capsys):
  import onnx as onnx_lib

  dst = tmp_path / "vit.onnx"
  lines = run(capsys, TOKEN, dst, "--to=onnx", "--opset=17", "--fp16")
  stated = re.fullmatch(
    r"read again      largest difference of logits (\S+), of (\S+)", lines[-1]
  )
  difference, largest = map(float, stated.groups())
  # Each of some 20 layers rounds at 2^-11 of its values.
  assert 2**-14 < difference / largest < 20 * 2**-11
  model = onnx_lib.load(dst)
  onnx_lib.checker.check_model(model)
  assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
  kernels = [a for a in model.graph.initializer if len(a.dims) > 1]
  assert {a.data_type for a in kernels} == {onnx_lib.TensorProto.FLOAT16}
  ends = *model.graph.input, *model.graph.output
  assert {e.type.tensor_type.elem_type for e in ends} == {
    onnx_lib.TensorProto.FLOAT
  }


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_an_onnx_file_says_what_it_is(tmp_path):
  import onnxruntime

  dst, names = tmp_path / "new" / "vit.onnx", tuple("äbcdefghijk")
  vit = vit_jax.load(TOKEN, loss="sigmoid", verbose=False)
  vit = dataclasses.replace(vit, class_names=names)
  with pytest.raises(ValueError, match="^--opset: got 14, .*17 or later"):
    convert.convert(vit, str(dst), "onnx", opset=14)
  assert not dst.parent.exists()
  convert.convert(vit, str(dst), "onnx")
  session = onnxruntime.InferenceSession(str(dst))
  (images,), (output,) = session.get_inputs(), session.get_outputs()
  assert (images.name, images.shape) == ("images", ["batch", 32, 32, 3])
  assert (output.name, output.shape) == ("logits", ["batch", 11])
  properties = session.get_modelmeta().custom_metadata_map
  assert json.loads(properties["class_names"]) == list(names)
  assert json.loads(properties["preprocessing"]) == {
    "ops": "decode|resize(32)",
    "value_range": [-1.0, 1.0],
  }
  assert properties["loss"] == "sigmoid"
  assert json.loads(properties["model"])["variant"] == "B/8"


@pytest.mark.nightly
@pytest.mark.usefixtures("libraries")
def test_onnx_beyond_what_a_protocol_buffer_holds(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(onnx, "MAX_BYTES", 0)
  dst = tmp_path / "vit.onnx"
  lines = run(capsys, TOKEN, dst, "--to=onnx", "--drop_head")
  assert "vit.onnx.data" in lines[-2]
  assert "largest difference of pre_logits" in lines[-1]
  sizes = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
  assert sizes["vit.onnx.data"] > 4 * sizes["vit.onnx"]
