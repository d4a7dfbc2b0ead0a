"""Finding the model of a set of parameters."""

import dataclasses
import pathlib

import foreign
import jax
import numpy as np
import pytest
from weight_files import DATA, SIZE

from vit_jax import weights
from vit_jax.config import cli, model_config
from vit_jax.families import FAMILIES
from vit_jax.families.vit import ViTConfig
from vit_jax.weights.weights_file import lazy

MODERN = dict(name="modern")
# What the files of tests/data hold, as their makers documented it.
KNOWN = {
  "vit_token": dict(SIZE, depth=3),
  "vit_token_prelogits": dict(SIZE, pre_logits=True),
  "vit_gap": dict(SIZE, num_heads=3, pool="gap"),
  "vit_linen_names": SIZE,
  "hybrid_r": dict(
    SIZE, variant="R50+B/16", stage_width=0.5, stage_blocks=(1, 2, 1)
  ),
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


def shapes(model):
  """Shapes of the parameters for 5 classes."""
  side = 56 if "/14" in model.variant else 64
  return {
    name: jax.ShapeDtypeStruct(shape, np.float32)
    for name, shape in foreign.shapes(model, 5, (side, side)).items()
  }


@pytest.mark.parametrize("name", KNOWN)
def test_published_files(name):
  result = weights.read(DATA / f"{name}.weights.npz")
  model = weights.identify(result.params, result.options)
  assert model == model_config(**KNOWN[name])


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
  expected = 7 if name.startswith("bit") else 11
  assert weights.num_classes(result.params, model) == expected


def test_fine_tuning_begins_with_the_defaults_of_the_family():
  """DeiT III has another rule of stochastic depth in its training."""
  model = model_config("modern", variant="Ti/16", layer_scale=1e-5)
  options = dict(stochastic_depth=0.1, stochastic_depth_rule="constant")
  params = {k: lazy(np.zeros(v.shape, "f")) for k, v in shapes(model).items()}
  file = weights.Weights("x", "checkpoint", params, options)
  assert weights.model_to_finetune(file) == model


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


@pytest.mark.parametrize(
  "lost", ["encoder_norm/scale", "_1/LayerScale_0/scale", "embedding/bias"]
)
def test_what_a_cut_file_lacks_is_no_option(lost):
  model = model_config("modern", variant="Ti/16", layer_scale=1e-5)
  params = shapes(model)
  (name,) = (k for k in params if k.endswith(lost))
  del params[name]
  assert weights.identify(params, {}) == model


def test_what_is_no_model():
  params = shapes(model_config(**SIZE))
  kernel = params.pop("embedding/kernel")
  with pytest.raises(ValueError, match="encoder_norm"):
    weights.identify(params, {})
  oblong = jax.ShapeDtypeStruct((8, 4, 3, 48), kernel.dtype)
  with pytest.raises(ValueError, match="embedding/kernel"):
    weights.identify(params | {"embedding/kernel": oblong}, {})


@pytest.mark.parametrize("name", ["hybrid_r", "bv_gap_sincos2d_rep", "bit_v2"])
def test_the_description_is_a_command_line_that_makes_the_model(name):
  model = model_config(**KNOWN[name])
  flags = weights.describe(model).split()
  config = pathlib.Path(__file__).parents[2] / "configs" / "glyphs.py"
  families = reversed(FAMILIES.values())  # vit last, as the name
  fields = (f for cls in families for f in dataclasses.fields(cls))
  reset = [f"--config.model.{f.name}={f.default}" for f in fields]
  args = cli.parse("train", {}, [f"--config={config}", *reset, *flags])
  assert not args.errors
  assert args.config.model == model


def test_a_plain_vit_is_of_another_family_if_it_is_said():
  model = model_config("modern", variant="Ti/16", pool="gap")
  params = shapes(model)
  assert weights.identify(params, {}).name == "vit"
  assert weights.identify(params, {"gelu": "erf"}).gelu == "erf"
  options = {"name": "modern", "pool": "gap"}
  assert weights.identify(params, options) == model
  with pytest.raises(ValueError, match="name: got 'vit', expected 'modern'"):
    params |= {"registers": jax.ShapeDtypeStruct((1, 4, 192), np.float32)}
    weights.identify(params, {"name": "vit"})
