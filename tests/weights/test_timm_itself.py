"""What timm makes of our weights: the same logits, under its own names."""

import dataclasses

import foreign
import numpy as np
import pytest
import torch_libraries
from timm_models import AS_TIMM, IN_TIMM, RESNETS, SIZE, TINY, VIT

import vit_jax
from vit_jax.config import model_config
from vit_jax.weights.weights_file import lazy
from vit_jax.zoo.files import timm as weights
from vit_jax.zoo.files import timm_names

FULL = {
  "B/16": (dict(variant="B/16"), (224, 224)),
  "R50+B/16": (dict(variant="R50+B/16", gelu="erf", **AS_TIMM), (224, 224)),
  "R50x1": (dict(name="bit", variant="R50x1", **AS_TIMM), (224, 224)),
}


@pytest.fixture(scope="module")
def timm():
  return torch_libraries.load("timm")


def _compare(timm, model, image_size, name, kwargs, num_heads=None):
  """Checks both directions; returns errors by type."""
  kwargs = {"num_classes": 11} | kwargs
  theirs = timm.create_model(name, **kwargs)
  foreign.randomise(theirs)
  grid = None
  if getattr(model, "posemb", None) == "sincos2d":
    grid = (image_size[0] // 8, image_size[1] // 8)
    params = foreign.random_params(model, 11, image_size)
    table = weights.write(params, model, grid=grid)["pos_embed"]
    theirs.load_state_dict({"pos_embed": _tensor(table)}, strict=False)
  stated = {"posemb": "none"} if getattr(model, "posemb", "") == "none" else {}
  params, options, _ = foreign.translate(
    weights.SERIES, foreign.state(theirs), num_heads, **stated
  )
  options.pop("gelu", None)  # timm's default; the call may have stated tanh
  assert options.items() <= dataclasses.asdict(model).items()
  if getattr(model, "posemb", None) == "sincos2d":
    params.pop(weights.POS_EMBEDDING)
  assert not timm_names.differences(model)

  written = weights.write(
    {k: np.asarray(v) for k, v in params.items()}, model, grid=grid
  )
  again = timm.create_model(name, **kwargs)
  again.load_state_dict({k: _tensor(v) for k, v in written.items()})
  for key, array in theirs.state_dict().items():
    np.testing.assert_array_equal(again.state_dict()[key], array, key)

  images, errors = foreign.image(image_size), {}
  for dtype in ("float32", "float64"):
    ours = foreign.our_logits(
      dataclasses.replace(model, dtype=dtype), 11, params, images
    )
    expected = foreign.torch_logits(again, images, dtype)
    errors[dtype] = foreign.error(ours, expected)
  print(name, errors)
  return errors


def _tensor(array):
  import torch

  return torch.from_numpy(array)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIT)
def test_logits_are_timm_s(timm, name):
  model = model_config(**VIT[name])
  errors = _compare(timm, model, SIZE, *IN_TIMM[name], num_heads=3)
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name,
      marks=pytest.mark.nightly
      if name in ("hybrid_26", "bit")
      else pytest.mark.slow,
    )
    for name in RESNETS
  ],
)
def test_logits_are_those_of_timm_s_resnets(timm, name):
  fields, image_size = RESNETS[name]
  model = model_config(**fields)
  errors = _compare(timm, model, image_size, *IN_TIMM[name], num_heads=3)
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.nightly
@pytest.mark.parametrize("name", FULL)
def test_logits_are_timm_s_at_full_size(timm, name):
  fields, image_size = FULL[name]
  model = model_config(**fields)
  call = timm_names.create_call(model, 11, image_size)
  errors = _compare(timm, model, image_size, *call)
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.slow
def test_the_stated_norm_makes_other_eps_equal(timm):
  import functools

  model = model_config(**TINY, ln_eps=0.1, dtype="float64")
  name, kwargs = IN_TIMM["token"]
  kwargs = kwargs | {"num_classes": 11}
  norm = functools.partial(timm.layers.LayerNorm, eps=0.1)
  theirs = timm.create_model(name, **kwargs, norm_layer=norm)
  foreign.randomise(theirs)
  params, *_ = foreign.translate(weights.SERIES, foreign.state(theirs), 3)
  images = foreign.image(SIZE)
  ours = foreign.our_logits(model, 11, params, images)
  expected = foreign.torch_logits(theirs, images, "float64")
  assert foreign.error(ours, expected) < 5e-6


@pytest.mark.slow
def test_timm_has_the_names(timm):
  names = set(timm_names._names().values())
  assert len(names) > 50 and names <= set(timm.list_models())


GELUS = {"GELU": "erf", "GELUTanh": "tanh", "QuickGELU": "quick"}
MODULES = "vision_transformer vision_transformer_hybrid deit eva beit".split()


@pytest.mark.nightly  # it builds all transformers of timm
def test_architectures_tell_heads_and_gelu(timm):
  read = set()
  for name in [n for m in MODULES for n in timm.list_models(module=m)]:
    if "radio" in name or "_rope_" in name:
      continue  # without the last norm, or refused by their names
    theirs = _without_memory(timm, name)
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


def _without_memory(timm, name, **kwargs):
  import torch

  with torch.device("meta"):
    return timm.create_model(name, **kwargs)


def _meta(module):
  return {
    k: dataclasses.replace(lazy(np.zeros(0, np.float32)), shape=tuple(v.shape))
    for k, v in module.state_dict().items()
  }


# Options of a model -> timm's name for it, one of each series.
PUBLISHED = {
  "vit_huge_patch14_224": dict(variant="H/14", gelu="erf"),
  "vit_so400m_patch14_siglip_378": dict(variant="So400m/14", pool="map"),
  "vit_giantopt_patch16_siglip_256": dict(
    variant="gopt/16", class_token=False, pool="map", gelu="erf"
  ),
  "vit_base_r50_s16_224": dict(variant="R50+B/16", **AS_TIMM),
  "resnetv2_50x1_bit": dict(name="bit", variant="R50x1", **AS_TIMM),
  "deit_tiny_distilled_patch16_224": dict(
    name="modern", variant="Ti/16", distilled=True, gelu="erf"
  ),
  "deit3_medium_patch16_224": dict(
    variant="M/16", layer_scale=1e-6, cls_row=False, gelu="erf"
  ),
  "vit_base_patch14_dinov2": dict(
    name="modern", variant="B/14", layer_scale=1.0, gelu="erf"
  ),
  "vit_giant_patch14_reg4_dinov2": dict(
    variant="g2/14", layer_scale=1.0, registers=4, cls_row=False, mlp="swiglu"
  ),
  "vit_base_patch32_clip_quickgelu_224": dict(
    name="modern", variant="B/32", pre_norm=True, patch_bias=False, ln_eps=1e-5,
    gelu="quick",
  ),
  "vit_small_patch16_dinov3_qkvb": dict(
    name="modern", variant="S/16", rope="dinov3", posemb="none", registers=4,
    layer_scale=1.0, qkv_bias="no_key", ln_eps=1e-5, gelu="erf",
  ),
  "vit_huge_plus_patch16_dinov3": dict(
    variant="H+/16", rope="dinov3", posemb="none", registers=4, mlp="swiglu",
    layer_scale=1.0, qkv_bias="none", ln_eps=1e-5, pool="gap",
  ),
  "eva02_tiny_patch14_224": dict(
    name="modern", variant="Ti/14", mlp_dim=512, rope="eva02", mlp="swiglu",
    qkv_bias="no_key", pool="gap", final_norm="pooled",
  ),
  "beit_base_patch16_224": dict(
    name="modern", variant="B/16", posemb="relative_bias", layer_scale=0.1,
    qkv_bias="no_key", pool="gap", final_norm="pooled", gelu="erf",
  ),
}  # fmt: skip
ACTS = {"tanh": "GELUTanh", "erf": "GELU", "quick": "QuickGELU"}


@pytest.mark.slow
@pytest.mark.parametrize("expected", PUBLISHED)
def test_the_call_makes_the_published_model(timm, expected):
  fields = PUBLISHED[expected]
  if fields["variant"].split("/")[0] in ("M", "gopt", "g2", "H+"):
    fields = {"name": "modern", **fields}
  model = model_config(**fields)
  name, kwargs = timm_names.create_call(model, 3, (224, 224))
  assert name == expected and not timm_names.differences(model)
  theirs = _without_memory(timm, name, **kwargs)
  params, options, *_ = foreign.translate(weights.SERIES, _meta(theirs))
  shapes = foreign.shapes(model, 3, (224, 224))
  assert {k: v.shape for k, v in params.items()} == shapes
  assert options.get("ln_eps", 0) == getattr(model, "ln_eps", 0)
  act = getattr(getattr(theirs, "blocks", [None])[0], "mlp", None)
  if getattr(model, "mlp", None) == "gelu":
    assert type(act.act).__name__ == ACTS[model.gelu]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, fields",
  [
    ("vit_large_patch14_224", dict(variant="L/14")),
    ("vit_giant_patch14_224", dict(variant="g/14")),
    ("vit_gigantic_patch14_224", dict(variant="G/14")),
    ("vit_base_patch16_siglip_gap_224", dict(variant="B/16", pool="gap")),
  ],
)
def test_timm_s_sizes_are_ours(timm, name, fields):
  theirs = _without_memory(timm, name, num_classes=3)
  params, *_ = foreign.translate(weights.SERIES, _meta(theirs))
  shapes = foreign.shapes(model_config(**fields), 3, (224, 224))
  assert {k: v.shape for k, v in params.items()} == shapes


SMALL_VIT = dict(
  img_size=SIZE,
  patch_size=8,
  embed_dim=24,
  depth=2,
  num_heads=3,
  num_classes=11,
)


def _saved(timm, tmp_path, name, kwargs):
  """A folder as timm pushes it to the hub, and its model."""
  model = timm.create_model(name, **kwargs)
  foreign.randomise(model)
  safetensors = pytest.importorskip("safetensors.torch")
  safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
  hub = torch_libraries.load("timm.models._hub")
  hub.save_config_for_hf(model, str(tmp_path / "config.json"))
  return model


@pytest.mark.slow
@pytest.mark.parametrize(
  "kwargs",
  [
    {},
    {"class_token": False, "global_pool": "avg", "fc_norm": False},
    {"class_token": False, "global_pool": "map", "act_layer": "gelu_tanh"},
    {"pos_embed": "none"},
    {"no_embed_class": True},
    {"dynamic_img_size": True, "drop_path_rate": 0.1},
  ],
)
def test_a_folder_of_timm_s(timm, tmp_path, kwargs):
  theirs = _saved(timm, tmp_path, "vit_base_patch16_224", SMALL_VIT | kwargs)
  vit = vit_jax.load(tmp_path, verbose=False)
  assert vit.image_size == SIZE
  images = foreign.image(SIZE)
  expected = foreign.torch_logits(theirs, images, "float32")
  assert foreign.error(vit(images)[0], expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, kwargs, key",
  [
    ("vit", {"global_pool": "avgmax", "fc_norm": False}, "global_pool"),
    ("resnetv2_50x1_bit", {"output_stride": 16}, "output_stride"),
    ("resnetv2_50x1_bit", {"act_layer": "silu"}, "act_layer"),
  ],
)
def test_a_folder_of_timm_s_of_another_model(timm, tmp_path, name, kwargs, key):
  if name == "vit":
    name, kwargs = "vit_base_patch16_224", SMALL_VIT | kwargs
  _saved(timm, tmp_path, name, kwargs)
  with pytest.raises(ValueError, match=f"config.json: model_args.{key}: got"):
    vit_jax.load(tmp_path, verbose=False)
