"""Forward passes written for others: ONNX and StableHLO."""

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from converting import MODELS, make
from etils import epath

import vit_jax
from vit_jax.commands import convert as convert_command
from vit_jax.tools.exporting import convert, onnx

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = DATA / "vit_token.weights.npz"
# float32 holds 7 digits; sums in another order lose one or two, and a ResNet
# that divides by deviations, three.
ROUNDING = 2e-5


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
  lines = run(capsys, TOKEN, dst, "--to=stablehlo")
  assert lines[-3].strip() == (
    "images float32 [1 or more, 32, 32, 3] in [-1, 1] -> logits [as many, 11]"
  )
  assert lines[-1].startswith("read again      largest difference of logits ")
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
  ],
)
def test_onnx_gives_the_same_logits(tmp_path, name):
  """Token, mean and attention pooling, hybrids, both BiT; any batch."""
  vit = vit_jax.load(DATA / f"{name}.weights.npz", verbose=False)
  dst = tmp_path / "vit.onnx"
  convert.convert(vit, str(dst), "onnx")
  assert [p.name for p in tmp_path.iterdir()] == ["vit.onnx"]
  again = onnx.read(dst)
  for count in (1, 3):
    images = random_images(vit, count)
    assert_close(again(images), logits(vit, images))


@pytest.mark.usefixtures("libraries")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["swiglu", "distilled"])
def test_onnx_of_every_part(tmp_path, name):
  vit = make(**MODELS[name])
  dst = tmp_path / "vit.onnx"
  convert.convert(vit, str(dst), "onnx")
  images = random_images(vit, 3)
  assert_close(onnx.read(dst)(images), logits(vit, images))


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


@pytest.mark.parametrize(
  "name, opset",
  [
    pytest.param("vit_token", 14, marks=pytest.mark.slow),
    pytest.param("bit_v2", 17, marks=pytest.mark.nightly),
  ],
)
@pytest.mark.usefixtures("libraries")
def test_an_old_opset_is_refused_before_a_file_is_written(
  tmp_path, name, opset
):
  vit = vit_jax.load(DATA / f"{name}.weights.npz", verbose=False)
  dst = tmp_path / "new" / "vit.onnx"
  expected = rf"^--opset: got {opset}, expected .*17 or later for a ViT, 21"
  with pytest.raises(ValueError, match=expected):
    convert.convert(vit, str(dst), "onnx", opset=opset)
  assert not dst.parent.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_an_opset_that_onnx_does_not_know(tmp_path):
  folder = tmp_path / "new"
  with pytest.raises(ValueError, match=r"--opset: got 99, expected at most \d"):
    onnx.write(
      folder / "x.onnx",
      lambda images: images,
      image_shape=(1, 1, 1),
      output="y",
      num_bytes=0,
      properties={},
      opset=99,
    )
  assert not folder.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_an_onnx_file_says_what_it_is(tmp_path, capsys):
  import onnxruntime

  folder, dst = tmp_path / "named", tmp_path / "new" / "vit.onnx"
  vit = vit_jax.load(TOKEN, loss="sigmoid", verbose=False)
  names = tuple("äbcdefghijk")
  vit = dataclasses.replace(vit, class_names=names)
  convert.convert(vit, str(folder), "orbax")
  capsys.readouterr()
  lines = run(capsys, folder, dst, "--to=onnx")
  assert lines[-3].strip() == (
    f"onnxruntime.InferenceSession('{dst}').run(None, {{'images': images}})"
  )
  assert lines[-2].strip() == (
    "images float32 [1 or more, 32, 32, 3] in [-1, 1] -> logits [as many, 11]"
  )
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
  assert lines[-2].strip() == "vit.onnx.data holds the weights; keep it beside"
  assert lines[-1].startswith(
    "read again      largest difference of pre_logits"
  )
  sizes = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
  assert sizes["vit.onnx.data"] > 4 * sizes["vit.onnx"]


@pytest.mark.nightly
@pytest.mark.usefixtures("libraries")
def test_onnx_in_a_bucket():
  vit = vit_jax.load(TOKEN, verbose=False)
  with pytest.raises(
    ValueError, match="got 'gs://b/x.onnx', expected a path on"
  ):
    convert.WRITERS["onnx"].write(vit, {}, epath.Path("gs://b/x.onnx"))


@pytest.mark.nightly
@pytest.mark.usefixtures("libraries")
def test_onnx_of_b16(tmp_path):
  """At the size that people use, with random weights."""
  vit = make(1000, (224, 224), None, variant="B/16")
  dst = tmp_path / "vit.onnx"
  convert.convert(vit, str(dst), "onnx")
  difference, largest = convert.largest_difference(vit, onnx.read(dst))
  assert difference < ROUNDING * largest
  assert abs(dst.stat().st_size - 346.4e6) < 1e6
