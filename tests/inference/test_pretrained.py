"""Models that are ready to call: parity, options, checks of inputs.

Reading and fitting have tests of their own in tests/weights.
"""

import dataclasses
import functools
import inspect
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.data.preprocessing import image_size
from vit_jax.inference import pretrained
from vit_jax.tools.exporting import convert
from vit_jax.weights import eval_preprocessing

DATA = pathlib.Path(__file__).parents[1] / "data"
PUBLISHED = sorted(
  p.name.split(".")[0]
  for p in DATA.glob("*.weights.npz")
  if p.name.startswith(("vit_", "hybrid_", "bv_", "bit_"))
)
TOKEN = DATA / "vit_linen_names.weights.npz"  # 32 px, 11 classes
MARKS = {
  **{"vit_token": [], "bit_v2": []},
  **{"bv_map": [pytest.mark.slow], "hybrid_root_only": [pytest.mark.slow]},
}


@pytest.fixture(scope="module")
def vit():
  return vit_jax.load(TOKEN)


# Parity.


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=MARKS.get(name, [pytest.mark.nightly]))
    for name in PUBLISHED
  ],
)
def test_outputs_are_those_of_the_original_code(name):
  sizes = {"bv_gap_sincos2d_rep": 32, "bit_v1": 64, "bit_v2": 64}
  vit = vit_jax.load(DATA / f"{name}.weights.npz", image_size=sizes.get(name))
  assert not (vit.report.resized or vit.report.ignored)
  notes = ["no table of positions"] * (name == "bv_gap_sincos2d_rep")
  notes.append("does not state the loss of its head")  # 11 classes
  assert len(vit.report.notes) == len(notes)
  assert all(map(str.__contains__, vit.report.notes, notes))
  io = np.load(DATA / f"{name}.io.npz")
  with jax.default_matmul_precision("highest"):
    logits, out = vit(io["image"])
  # Logits reach 6. Some 20 layers round at 6e-8 of their values, in another
  # order of sums; a norm or a standardised kernel divides by what may be small.
  # Largest differences seen, 1e-6: vit_* 0.5 to 1.9, bv_* 0.1 to 1.4,
  # hybrid_root_only 0.7, hybrid_r 5.7, bit_v1 3.8, bit_v2 1.6; pre_logits 2.0.
  np.testing.assert_allclose(logits, io["logits"], rtol=0, atol=2e-5)
  if "pre_logits" in io:
    np.testing.assert_allclose(
      out["pre_logits"], io["pre_logits"], rtol=0, atol=2e-5
    )


# Loading.


def test_it_is_ready(vit, capsys):
  assert vit.num_classes == 11 and vit.image_size == (32, 32)
  assert vit.ops == "decode|resize(32)" and vit.class_names is None
  assert vit.config.variant == "B/8" and vit.config.dtype == "float32"
  assert vit.report.path == str(TOKEN)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(vit.params))
  capsys.readouterr()
  again = vit_jax.load(str(TOKEN), image_size=48)
  printed = capsys.readouterr().out
  assert printed == weights.format_report(again.report) + "\n"
  assert "\nloaded          40 arrays, 49,643 parameters\n" in printed
  assert "pos_embedding: 4x4 -> 6x6\n" in printed
  vit_jax.load(TOKEN, verbose=False)
  assert not capsys.readouterr().out


TABLE = "Transformer/posembed_input/pos_embedding"
KERNEL = "embedding/kernel"
WIDE = {TABLE: ((4, 4), (2, 6))}
LARGE = {KERNEL: ((8, 8), (16, 16))}
LINEN = "vit_linen_names"


@pytest.mark.parametrize(
  "name, options, size, resized",
  [
    # The size that weights were trained for.
    ("vit_gap", {}, (32, 32), {}),
    ("hybrid_root_only", {}, (64, 64), {}),  # 4 x 4 patches of 16 pixels
    ("bv_gap_sincos2d_rep", {}, (224, 224), {}),  # the file states none
    # Another one, and a grid that the caller states.
    (LINEN, dict(image_size=(16, 48)), (16, 48), WIDE),
    (LINEN, dict(image_size=(16, 48), grid=4), (16, 48), WIDE),
    (LINEN, dict(grid=(2, 8)), (16, 64), {}),
    # Another patch: without a size it stays what it was, and the grid changes.
    (LINEN, dict(patch=16, image_size=64), (64, 64), LARGE),
    (LINEN, dict(patch=16), (32, 32), LARGE | {TABLE: ((4, 4), (2, 2))}),
  ],
)
def test_sizes(name, options, size, resized):
  path = DATA / f"{name}.weights.npz"
  vit = vit_jax.load(path, verbose=False, **options)
  assert vit.image_size == size and vit.report.resized == resized
  assert image_size(vit.ops) == size


@pytest.mark.parametrize(
  "ops, size, expected, is_noted",
  [
    (
      "decode(dct='accurate')|resize_small_torch(36)|central_crop_torch(32)",
      (64, 64),
      "decode(dct='accurate')|resize_small_torch(72)|central_crop_torch(64)",
      False,
    ),
    (  # 36 rows of 64 could be too few
      "decode|resize_small(36)|central_crop(32)",
      (32, 64),
      "decode|resize((32, 64), 'area')",
      True,
    ),
    (
      "decode(exif=False)|resize((36, 40), 'area')|central_crop(32)",
      (64, 64),
      "decode(exif=False)|resize((72, 80), 'area')|central_crop(64)",
      False,
    ),
    ("decode|resize(40)|random_crop(32)", (8, 8), "decode|resize(8)", False),
    ("decode|resize(28)|pad(2)", (64, 64), "decode|resize(64)", True),
    ("decode_inception_crop(32)|flip_lr", (32, 32), "decode|resize(32)", False),
  ],
)
def test_the_preprocessing_of_another_size(ops, size, expected, is_noted):
  result = weights.Weights("x", "checkpoint", {}, ops=ops)
  got, notes = pretrained.preprocessing(result, size)
  assert got == expected
  assert len(notes) == is_noted and all(expected in note for note in notes)


def test_a_share_of_the_crop_is_that_of_the_file():
  # floor(224 / 0.9) = 248, floor(384 / 0.9) = 426; 248 * 384 / 224 is 425.1.
  ops = eval_preprocessing.timm((224, 224), 0.9).ops
  result = weights.Weights("x", "timm", {}, ops=ops, crop_share=0.9)
  got, notes = pretrained.preprocessing(result, (384, 384))
  assert (got, notes) == (eval_preprocessing.timm((384, 384), 0.9).ops, ())


def test_options(vit):
  """Also as the text of a command line."""
  options = dict(gelu="erf", ln_eps="1e-5", num_heads="4", dtype="bfloat16")
  other = vit_jax.load(TOKEN, **options).config
  assert (other.gelu, other.ln_eps, other.num_heads) == ("erf", 1e-5, 4)
  stacked = vit_jax.load(TOKEN, scan=True)
  assert "encoderblock" in stacked.params["Transformer"]
  _, *own, _ = inspect.signature(pretrained.load).parameters
  assert tuple(own) == pretrained.ARGUMENTS


# File, options, words of the message.
WRONG = [
  ("vit_linen_names", {"gele": "erf", "heads": 3}, "gele, heads", "patch"),
  ("vit_linen_names", {"img_size": 4}, "img_size", "image_size"),
  (
    "vit_linen_names",
    {"dtype": "float12", "num_heads": "three"},
    *("config.model.dtype", "'float32'", "config.model.num_heads", "'three'"),
  ),
  ("vit_linen_names", {"posemb": "learn", "root_pad": "zero"}, "root_pad"),
  ("vit_linen_names", {"num_classes": -1}, "num_classes", "-1"),
  ("vit_linen_names", {"image_size": (32, -32)}, "image_size", "(32, -32)"),
  ("vit_linen_names", {"image_size": 33}, "image_size", "33 x 33", "side 8"),
  ("vit_linen_names", {"background": "no"}, "background", "'no'"),
  ("vit_linen_names", {"posemb_filter": "bicubik"}, "posemb_f", "'bicubic'"),
  ("vit_linen_names", {"pool": "gap"}, "in the weights of"),
  ("vit_linen_names", {"loss": "sigmoids"}, "loss", "sigmoid, bce"),
  ("bit_v2", {"name": "bit_v1"}, "name", "'bit'"),
  ("hybrid_r", {"patch": 16}, "patch", "none"),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: str(row[1]))
def test_wrong_options(row):
  name, options, *words = row
  with pytest.raises(ValueError) as e:
    vit_jax.load(DATA / f"{name}.weights.npz", verbose=False, **options)
  text = str(e.value)
  assert [word for word in words if word not in text] == [], text


@pytest.mark.slow
def test_a_new_head():
  path = DATA / "vit_token_prelogits.weights.npz"
  load = functools.partial(vit_jax.load, path, verbose=False)
  vit = load()
  images = np.zeros((2, *vit.image_shape), np.float32)
  logits, out = vit(images)
  for num_classes in (5, vit.num_classes):
    new = load(num_classes=num_classes)
    assert new.num_classes == num_classes and new.loss == "softmax"
    assert new.report.reinitialised and not vit.report.reinitialised
    assert not new.report.notes
    got, others = new(images)
    np.testing.assert_array_equal(got, np.zeros((2, num_classes)))
    np.testing.assert_array_equal(others["pre_logits"], out["pre_logits"])
  without = load(num_classes=0)
  np.testing.assert_array_equal(without(images)[0], out["pre_logits"])
  assert not without.report.reinitialised and without.report.ignored
  with pytest.raises(ValueError, match="without a head"):
    without.predict([np.zeros((32, 32, 3), np.uint8)])
  assert load(num_classes=2, loss="regression").is_regression


@pytest.mark.slow
def test_a_loss_that_nothing_states_is_noted(vit, tmp_path):
  (note,) = vit.report.notes
  assert "does not state the loss" in note and "loss='regression'" in note
  assert not vit_jax.load(TOKEN, loss="regression").report.notes
  arrays = dict(np.load(TOKEN))
  for width, text in ((1, "softmax of one output"), (1000, "1,000")):
    bias = np.arange(width, dtype="f")  # that of class k is k
    head = {"head/kernel": np.zeros((48, width), "f"), "head/bias": bias}
    np.savez(tmp_path / f"{width}.npz", **arrays | head)
    other = vit_jax.load(tmp_path / f"{width}.npz")
    (note,) = other.report.notes
    assert text in note and "does not state" not in note
  (best,) = other.predict([np.zeros((8, 8, 3), np.uint8)], top=1)[0]
  assert best.name == "toilet tissue (n15075141)"  # the last of ImageNet
  # A tree of arrays as another program writes them, and one of ours.
  for name, metadata, count in (("a", {}, 1), ("b", vit.metadata(), 0)):
    checkpointer.write_params(str(tmp_path / name), vit.params, metadata)
    notes = vit_jax.load(tmp_path / name).report.notes
    assert sum("state the loss" in n for n in notes) == count


def test_metadata_goes_round(vit, tmp_path):
  metadata = vit.metadata()
  assert metadata["grid"] == [4, 4] and metadata["has_cls_row"]
  assert metadata["source"] == str(TOKEN) and metadata["num_classes"] == 11
  named = dataclasses.replace(vit, class_names=tuple("abcdefghijk"))
  checkpointer.write_params(str(tmp_path / "x"), vit.params, named.metadata())
  again = vit_jax.load(tmp_path / "x")
  assert again.config == vit.config and again.ops == vit.ops
  assert again.class_names == named.class_names
  jax.tree.map(np.testing.assert_array_equal, again.params, vit.params)
  # A new head has none of the old one's.
  assert vit_jax.load(tmp_path / "x", num_classes=11).class_names is None


# Calling.


class Tensor:
  """What a tensor of torch is to numpy."""

  def __init__(self, values):
    self.values, self.dtype = values, f"torch.{values.dtype}"
    self.shape, self.ndim = values.shape, values.ndim

  def __array__(self, dtype=None, copy=None):
    return self.values


RAMP = np.linspace(0, 1, 3072, dtype="f").reshape(1, 32, 32, 3)


def test_images_of_another_kind_are_refused(vit):
  """Arrays of numpy and jax, and tensors of torch."""
  for images, text in (
    (np.zeros((2, 48, 32, 3), "f"), "shape: got (2, 48, 32, 3), expected "),
    (RAMP[0], "expected [b, 32, 32, 3]"),
    (np.uint8(RAMP), "uint8, expected floats"),
    (255 * RAMP, "values from 0 to 255"),
  ):
    for put in (np.asarray, jax.numpy.asarray, Tensor):
      with pytest.raises(ValueError) as e:
        vit(put(images))
      assert text in str(e.value)
  with pytest.raises(ValueError, match=r"\(3, 48, 48\)"):  # channels first
    vit.predict(Tensor(np.zeros((3, 48, 48), np.uint8)))
  images = np.load(DATA / "vit_linen_names.io.npz")["image"]
  np.testing.assert_array_equal(vit(Tensor(images))[0], vit(images)[0])


def test_values_of_another_range_are_said(vit):
  for put in (np.asarray, jax.numpy.asarray):
    with pytest.warns(UserWarning, match=r"from 0 to 1, "):
      vit(put(RAMP))
    with pytest.warns(UserWarning, match="from -2.12 to 2.64, .* mean and sta"):
      vit(put(4.76 * RAMP - 2.12))  # ImageNet's mean and deviation
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      for images in (2 * RAMP - 1, 0 * RAMP, np.nan * RAMP):
        vit(put(images))
      jax.eval_shape(vit, put(RAMP))  # a tracer has no values


@pytest.mark.slow
def test_features_are_the_layers_of_a_call(vit):
  pixels = np.random.default_rng(0).integers(0, 256, (17, 32, 32, 3), np.uint8)
  floats = pixels / np.float32(127.5) - 1
  _, out = vit(floats)
  for layer in ("pre_logits", "encoderblock_1/after_mlp"):
    expected = functools.reduce(lambda o, k: o[k], layer.split("/"), out)
    # Another batch shape may sum in another order.
    for images in (floats, pixels):
      np.testing.assert_allclose(
        vit.features(images, layer), expected, atol=1e-5
      )
  np.testing.assert_array_equal(
    vit.features(pixels), vit.features(pixels, "pre_logits")
  )
  tokens = vit.forward_features(pixels)
  assert tokens.shape == (17, 17, 48)
  np.testing.assert_allclose(tokens, out["encoded"], atol=1e-5)


def test_an_unknown_layer_is_refused(vit):
  images = np.zeros((1, 32, 32, 3), np.float32)
  for layer in ("norm", "encoded/x"):
    with pytest.raises(ValueError, match=f"'{layer}', expected .*encoded"):
      vit.features(images, layer)


@pytest.mark.slow
def test_only_what_is_needed_is_imported_and_printed(tmp_path, vit):
  """No warnings of TensorFlow, absl or Orbax either."""
  code = """if True:
    import sys
    import vit_jax
    print("jax" in sys.modules, "numpy" in sys.modules)
    import numpy as np
    for path in sys.argv[1:]:
      vit = vit_jax.load(path, verbose=False)
      print(vit.predict(np.full((40, 40, 3), 9, np.uint8), top=1)[0][0].name)
    heavy = "jax torch tensorboard tensorflow tensorflow_datasets sklearn"
    print(*set(heavy.split()) & set(sys.modules))
  """
  paths = [TOKEN, tmp_path / "vit.safetensors", tmp_path / "run"]
  convert.convert(vit, str(paths[1]), "timm")
  convert.convert(vit, str(paths[2]), "orbax")
  best = vit.predict(np.full((40, 40, 3), 9, np.uint8), top=1)[0][0].name
  done = subprocess.run(
    [sys.executable, "-c", code, *map(str, paths)],
    capture_output=True,
    text=True,
    check=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
  )
  expected = f"False False\n{best}\n{best}\n{best}\njax\n"
  assert (done.stdout, done.stderr) == (expected, "")
