"""Google's names, of three generations, and the model that arrays are of."""

import dataclasses
import pathlib

import foreign
import jax
import numpy as np
import pytest
from weight_files import DATA, SIZE, assert_same

from vit_jax import weights
from vit_jax.config import cli, model_config
from vit_jax.families import FAMILIES
from vit_jax.families.vit import ViTConfig
from vit_jax.weights import bit, google
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.weights_file import lazy

GLYPHS = pathlib.Path(__file__).parents[2] / "configs" / "glyphs.py"
MODERN = dict(name="modern")
STAGES = dict(stage_width=0.5, stage_blocks=(1, 2, 1))
# What the files of tests/data hold, as their makers documented it.
KNOWN = {
  "vit_token": dict(SIZE, depth=3),
  "vit_token_prelogits": dict(SIZE, pre_logits=True),
  "vit_gap": dict(SIZE, num_heads=3, pool="gap"),
  "vit_linen_names": SIZE,
  "hybrid_r": dict(SIZE, variant="R50+B/16", **STAGES),
  # Patches of 4 on the feature map, as in R+B/8.
  "hybrid_root_only": dict(SIZE, variant="R+B/8", stage_width=0.5),
  "bv_gap_sincos2d_rep": dict(
    SIZE, pool="gap", posemb="sincos2d", pre_logits=True
  ),
  "bv_token": dict(SIZE, cls_row=False),
  "bv_map": dict(SIZE, pool="map"),
  "bv_scan": dict(SIZE, pool="gap"),
  "bit_v1": dict(name="bit_v1", variant="R50x0.5", stage_blocks=(1, 2, 1)),
  "bit_v2": dict(
    name="bit", variant="R50x0.5", stage_blocks=(1, 2, 1), root_pad="nothing"
  ),
}
# Whose names are those that we write.
LATEST = ("vit_token_prelogits", "hybrid_r", "bv_map", "bit_v1")


def opened(name):
  return open_npz(DATA / f"{name}.weights.npz")


def read(arrays):
  return google.read({k: lazy(np.asarray(v)) for k, v in arrays.items()})


def written(params, **options):
  return google.write({k: np.asarray(v) for k, v in params.items()}, **options)


def shapes(model):
  """Shapes of the parameters for 5 classes."""
  side = 56 if "/14" in model.variant else 64
  return {
    name: jax.ShapeDtypeStruct(shape, np.float32)
    for name, shape in foreign.shapes(model, 5, (side, side)).items()
  }


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_file_is_identified_and_written_again(name):
  file = opened(name)
  params, options = google.read(file)
  model = weights.identify(params, options)
  assert model == model_config(**KNOWN[name])
  arrays = written(params, is_big_vision=name.startswith("b"))
  assert google.looks_like(file) and google.looks_like(arrays)
  again, options_again = read(arrays)
  assert options_again == options
  assert_same(again, params)
  of_file, ours = ({k: v.shape for k, v in x.items()} for x in (file, arrays))
  assert name not in LATEST or ours == of_file
  if name == "vit_linen_names":
    paper = opened("vit_token")
    assert ours.keys() == {n for n in paper if "encoderblock_2" not in n}


def test_the_tower_of_images_is_found_beside_that_of_texts(tmp_path):
  """SigLIP of big_vision has both: img, txt, temperature t, bias b."""
  file, path = opened("bv_map"), tmp_path / "siglip.npz"
  two_towers = {
    n.replace("params/", "params/img/"): np.asarray(a) for n, a in file.items()
  }
  texts = {"params/b": 0.0, "params/t": 1.0, "params/txt/head/bias": [0.0]}
  np.savez(path, **two_towers, **texts)
  result = weights.read(path)
  assert_same(result, google.read(file)[0])
  assert all(name in result.notes[0] for name in texts)


def test_stacked_blocks_are_taken_apart():
  file = opened("bv_scan")
  params, _ = google.read(file)
  name = "Transformer/encoderblock{}/MlpBlock_0/Dense_0/kernel"
  stacked = np.asarray(file["params/" + name.format("")])
  assert len(stacked) == 2
  for i, expected in enumerate(stacked):
    np.testing.assert_array_equal(params[name.format(f"_{i}")], expected)
  assert not any("encoderblock/" in n for n in params)
  with pytest.raises(ValueError, match="a scalar"):
    read({name.format(""): 3.0})


def test_odd_arrays_of_google_s():
  """Norms of four dimensions, the optimizer's moments, a name twice."""
  params, _ = read({"gn_root/scale": np.arange(4.0).reshape(1, 1, 1, 4)})
  assert params["gn_root/scale"].shape == (4,)
  assert written(params)["gn_root/scale"].shape == (1, 1, 1, 4)
  moments = {
    "opt/state/step": 7, "opt/param_states/cls/grad_ema": np.ones((1, 1, 4)),
  }  # fmt: skip
  for prefix in ("opt/target/", "params/"):
    cls = {f"{prefix}cls": np.ones((1, 1, 4))}
    assert read(cls | moments)[0].keys() == {"cls"}
  twice = [f"Transformer/encoderblock_0/LayerNorm_{i}/scale" for i in (1, 2)]
  with pytest.raises(ValueError, match=twice[1]):
    read(dict.fromkeys(twice, np.ones(4)))


def test_bit_s_own_files(tmp_path):
  for theirs, ours in {
    "root_block/standardized_conv2d/kernel": "conv_root/kernel",
    "block4/unit12/c/standardized_conv2d_52/kernel": (
      "block4/unit12/conv3/kernel"
    ),
    "block2/unit01/a/proj/standardized_conv2d/kernel": (
      "block2/unit1/conv_proj/kernel"
    ),
    "block3/unit23/b/group_norm/gamma": "block3/unit23/gn2/scale",
    "group_norm/beta": "norm-pre-head/bias",
    "head/conv2d/bias": "head/bias",
    "block1/unit01/d/group_norm/beta": None,
  }.items():
    assert bit.rename(f"resnet/{theirs}") == ours
  params, _ = google.read(opened("bit_v2"))
  expected = {k: np.asarray(v) for k, v in params.items()}
  arrays = bit.write(expected)
  assert arrays["resnet/head/conv2d/kernel"].shape == (1, 1, 512, 7)
  np.savez(tmp_path / "BiT-M.npz", **arrays)
  result = weights.read(tmp_path / "BiT-M.npz")
  assert_same(result, expected)
  assert (result.format, result.options) == ("bit", {"root_pad": "zero"})
  model = weights.identify(result.params, result.options)
  assert (model.name, model.stage_blocks) == ("bit", (1, 2, 1))
  unit = "resnet/block3/unit02/"  # two digits
  assert bit.write({"block3/unit2/gn3/bias": np.zeros(4)}).keys() == {
    unit + "c/group_norm/beta"
  }
  name = "resnet/block1/unit01/a/standardized_conv2d/kernel"
  extra = dict.fromkeys((name, "momentum", "extra"), lazy(np.zeros(3)))
  with pytest.raises(ValueError, match="'extra', 'momentum'"):
    bit.read(extra)
  assert not bit.looks_like(["block1/unit1/conv1/kernel"])


# test_round_trip.py identifies the other parts.
SHAPES = [
  dict(variant="So400m/14"),
  dict(name="bit_v1", variant="R50x3", stage_blocks=(1, 1)),
  dict(variant="S/16", pool="gap", posemb="none"),
  dict(variant="Ti/16", pool="map", posemb="learn2d"),
  dict(variant="Ti/16", posemb="relative", pre_logits=True),
  dict(variant="Ti/16", posemb="learn2d", posemb_at="blocks"),
  MODERN | dict(variant="g2/14", layer_scale=1e-5, mlp="swiglu"),
  MODERN | dict(variant="gopt/16", pool="map", class_token=False, registers=1),
  MODERN | dict(variant="Ti/16", registers=2, pool="token_gap"),
  MODERN | dict(variant="R+Ti/16", registers=1),
]


@pytest.mark.parametrize(
  "fields", SHAPES, ids=lambda fields: "-".join(map(str, fields.values()))
)
def test_shapes_decide_the_model(fields):
  model = model_config(**fields)
  # Nothing tells that there are no positions.
  options = {"posemb": "none"} if "none" in fields.values() else {}
  params = shapes(model)
  assert weights.identify(params, options) == model
  assert weights.num_classes(params, ViTConfig) == 5
  without_head = {k: v for k, v in params.items() if "head" not in k}
  assert weights.num_classes(without_head, ViTConfig) == 0


def test_an_option_is_neither_lost_with_an_array_nor_contradicts_one():
  model = model_config("modern", variant="Ti/16", layer_scale=1e-5)
  for lost in ("encoder_norm/scale", "_1/LayerScale_0/scale", "embedding/bias"):
    cut = {k: v for k, v in shapes(model).items() if not k.endswith(lost)}
    assert weights.identify(cut, {}) == model

  model = model_config("modern", variant="Ti/16", pool="gap")
  params = shapes(model)
  assert weights.identify(params, {}).name == "vit"
  options = {"name": "modern", "pool": "gap"}
  assert weights.identify(params, options) == model
  params["registers"] = jax.ShapeDtypeStruct((1, 4, 192), np.float32)
  with pytest.raises(ValueError, match="name: got 'vit', expected 'modern'"):
    weights.identify(params, {"name": "vit"})

  kernel = params.pop("embedding/kernel")
  with pytest.raises(ValueError, match="encoder_norm"):
    weights.identify(params, {})
  oblong = jax.ShapeDtypeStruct((8, 4, 3, 192), kernel.dtype)
  with pytest.raises(ValueError, match="embedding/kernel"):
    weights.identify(params | {"embedding/kernel": oblong}, {})


@pytest.mark.parametrize("name", ["vit_gap", "bv_gap_sincos2d_rep", "bit_v2"])
def test_fine_tuning_keeps_size_and_numerics(name):
  is_bit = name.startswith("bit")
  numerics = dict(gn_eps=1e-4) if is_bit else dict(gelu="erf", ln_eps=1e-12)
  training = dict(dtype="bfloat16") | ({} if is_bit else dict(dropout=0.1))
  result = weights.read(
    DATA / f"{name}.weights.npz", options=numerics | training
  )
  model = weights.model_to_finetune(result)
  numerics |= {} if is_bit else dict(pre_logits=False)
  assert model == model_config(**KNOWN[name] | numerics)
  assert weights.num_classes(result.params, model) == (7 if is_bit else 11)


def test_fine_tuning_begins_with_the_defaults_of_the_family():
  """DeiT III has another rule of stochastic depth in its training."""
  model = model_config("modern", variant="Ti/16", layer_scale=1e-5)
  options = dict(stochastic_depth=0.1, stochastic_depth_rule="constant")
  params = {k: lazy(np.zeros(v.shape, "f")) for k, v in shapes(model).items()}
  file = weights.Weights("x", "checkpoint", params, options)
  assert weights.model_to_finetune(file) == model


@pytest.mark.parametrize("name", ["hybrid_r", "bv_gap_sincos2d_rep", "bit_v2"])
def test_the_description_is_a_command_line_that_makes_the_model(name):
  model = model_config(**KNOWN[name])
  flags = weights.describe(model).split()
  families = reversed(FAMILIES.values())  # vit last, as the name
  fields = (f for cls in families for f in dataclasses.fields(cls))
  reset = [f"--config.model.{f.name}={f.default}" for f in fields]
  args = cli.parse("train", {}, [f"--config={GLYPHS}", *reset, *flags])
  assert not args.errors
  assert args.config.model == model
