"""The call that makes our model in timm, and timm's own names."""

import dataclasses

import foreign
import numpy as np
import pytest
import torch_libraries

from vit_jax.config import model_config
from vit_jax.weights.weights_file import lazy
from vit_jax.zoo.files import timm as weights
from vit_jax.zoo.files import timm_names

timm = torch_libraries.Later("timm")
AS_TIMM = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")
B16 = dict(variant="B/16", gelu="erf")


@pytest.mark.parametrize(
  "fields, side, name, kwargs",
  [
    (B16, 224, "vit_base_patch16_224", {}),
    (B16, 384, "vit_base_patch16_224", {}),
    (
      B16 | dict(pool="map", posemb="sincos2d"),
      224,
      "vit_base_patch16_siglip_256",
      {},
    ),
    (B16 | dict(channels=1), 224, "vit_base_patch16_224", dict(in_chans=1)),
    (dict(name="bit", variant="R152x4"), 480, "resnetv2_152x4_bit", {}),
    # Each differs in one part from a published model.
    (B16 | dict(variant="S/14"), 224, None, None),
    (B16 | dict(num_heads=6), 224, None, None),
    (B16 | dict(pool="gap"), 224, None, None),
    (dict(name="bit", variant="R50x2"), 480, None, None),
  ],
)
def test_the_call_that_makes_the_model(fields, side, name, kwargs):
  call = timm_names.create_call(model_config(**fields), 7, (side, side))
  if name is None:
    assert call == (None, {})
    return
  if "gelu" in fields:
    kwargs = kwargs | {"act_layer": "gelu", "img_size": [side, side]}
  assert call == (name, {"num_classes": 7} | kwargs)


def test_options_in_which_timm_s_model_differs_and_known_heads():
  bit = dict(name="bit", variant="R50x1", root_pad="nothing")
  for fields, options in (
    (dict(), []),
    (dict(ln_eps=1e-12), ["ln_eps"]),
    (dict(variant="R50+B/16"), ["gn_eps", "ws_eps", "ws_eps_on"]),
    (dict(variant="R50+B/16", **AS_TIMM), []),
    (bit, ["ws_eps", "root_pad"]),
  ):
    texts = timm_names.differences(model_config(**fields))
    named = [t.split("=")[0].rpartition(".")[2] for t in texts]
    assert named == options, fields
  for size, heads in (
    ((384, 12, 1536), 6),
    ((256, 14, 1280), 4),  # timm's vit_wee
    ((1280, 32, 3416), 16),  # Virchow
  ):
    assert timm_names.known_heads(*size) == (heads, None)
    width, depth, mlp_dim = size
    assert timm_names.known_heads(width, depth + 1, mlp_dim)[1]


SMALL = dict(width=24, depth=2, mlp_dim=48, num_heads=3)
# Name in timm -> our model, arguments in timm.
RESNETS = {
  "vit_base_r50_s16_224": (
    dict(SMALL, variant="R50+B/16", **AS_TIMM),
    dict(embed_dim=24, depth=2, num_heads=3, mlp_ratio=2.0, img_size=64)
    | dict(act_layer="gelu_tanh"),
  ),
  "resnetv2_50x1_bit": (dict(name="bit", variant="R50x1", **AS_TIMM), {}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RESNETS)
def test_resnets_differ_by_rounding_alone(name):
  fields, kwargs = RESNETS[name]
  theirs = timm.create_model(name, num_classes=11, **kwargs)
  foreign.randomise(theirs)
  params, *_ = foreign.translate(weights.SERIES, foreign.state(theirs), 3)
  images = foreign.image((64, 64))
  model = model_config(**fields, dtype="float64")
  ours = foreign.our_logits(model, 11, params, images)
  expected = foreign.torch_logits(theirs, images, "float64")
  assert foreign.error(ours, expected) < 5e-6


def _without_memory(name, **kwargs):
  import torch

  with torch.device("meta"):
    return timm.create_model(name, **kwargs)


def _meta(module):
  return {
    k: dataclasses.replace(lazy(np.zeros(0, np.float32)), shape=tuple(v.shape))
    for k, v in module.state_dict().items()
  }


GELUS = {"GELU": "erf", "GELUTanh": "tanh", "QuickGELU": "quick"}
MODULES = "vision_transformer vision_transformer_hybrid deit eva beit".split()


@pytest.mark.nightly  # it builds all transformers of timm
def test_architectures_tell_heads_and_gelu():
  read = set()
  for name in [n for m in MODULES for n in timm.list_models(module=m)]:
    if "radio" in name or "_rope_" in name:
      continue  # without the last norm, or refused by their names
    theirs = _without_memory(name)
    about = {"architecture": f"{name}.tag", "global_pool": theirs.global_pool}
    try:
      params, options, _ = foreign.translate(
        weights.SERIES, _meta(theirs), config=about
      )
    except ValueError:
      continue  # it has parts of its own, or is of no known size
    read.add(name)
    block = theirs.blocks[0]
    if act := GELUS.get(type(getattr(block.mlp, "act", None)).__name__):
      assert options["gelu"] == act, name
    assert options["ln_eps"] == theirs.blocks[0].norm1.eps, name
    query = "encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
    heads = params[f"Transformer/{query}"].shape[1]
    assert heads == block.attn.num_heads, name
    rope = getattr(theirs, "rope", None)
    assert bool(options.get("rope")) == (rope is not None), name
    count = sum(x.numel() for x in theirs.parameters())
    if name != "vit_base_patch16_224_miil":  # has no biases: it gets zeros
      assert sum(x.size for x in params.values()) == count, name
  assert {*weights.TANH, *weights.HEADS} <= read
  named = {name for _, theirs in timm_names.published() for name in theirs}
  assert {n for n in named if "resnetv2" not in n} <= read


# timm's name of a published model, one of each series.
PUBLISHED = {n: model for model, names in timm_names.published() for n in names}
SLOW = ("vit_base_patch14_dinov2", "vit_small_plus_patch16_dinov3_qkvb")
NIGHTLY = (
  *("vit_huge_patch14_224", "vit_base_r50_s16_224", "resnetv2_50x1_bit"),
  *("deit_tiny_distilled_patch16_224", "vit_giant_patch14_reg4_dinov2"),
  *("vit_base_patch32_clip_quickgelu_224", "vit_7b_patch16_dinov3"),
  *("eva02_tiny_patch14_224", "beit_base_patch16_224"),
)


@pytest.mark.parametrize(
  "expected",
  [
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY),
  ],
)
def test_the_call_makes_the_published_model(expected):
  """Every parameter has the shape that timm's model has."""
  model = PUBLISHED[expected]
  if model.stages:
    model = dataclasses.replace(model, **AS_TIMM)
  name, kwargs = timm_names.create_call(model, 3, (224, 224))
  assert name == expected and not timm_names.differences(model)
  theirs = _without_memory(name, **kwargs)
  params, options, *_ = foreign.translate(weights.SERIES, _meta(theirs))
  shapes = foreign.shapes(model, 3, (224, 224))
  assert {k: v.shape for k, v in params.items()} == shapes
  assert options.get("ln_eps", 0) == getattr(model, "ln_eps", 0)
  if getattr(model, "mlp", None) == "gelu":
    assert GELUS[type(theirs.blocks[0].mlp.act).__name__] == model.gelu
