"""timm's names, layouts and numbers; the slow ones against timm itself."""

import dataclasses

import foreign
import numpy as np
import pytest
from timm_models import AS_TIMM, RESNETS, SIZE, TINY, VIT

from vit_jax.config import model_config
from vit_jax.zoo.files import timm as weights
from vit_jax.zoo.files import timm_names


def translate(arrays, num_heads=None, **options):
  return foreign.translate(weights.SERIES, arrays, num_heads, **options)


@pytest.mark.parametrize("name", VIT)
def test_a_vit_comes_back_as_it_was(name):
  model = model_config(**VIT[name])
  params = foreign.random_params(model, 5, SIZE)
  written = weights.write(params, model, grid=(3, 4))
  assert weights.looks_like(written)
  none = {"posemb": "none"} if model.posemb == "none" else {}
  read, options, _ = translate(written, 3, **none)
  assert options == {"gelu": "erf", "ln_eps": 1e-6} | none
  if model.posemb == "sincos2d":
    assert read.pop(weights.POS_EMBEDDING).shape == (1, 12, 24)
  _assert_same(read, params)


@pytest.mark.parametrize("name", ["hybrid_root", "hybrid_50", "bit"])
def test_a_resnet_comes_back_as_it_was(name):
  fields, size = RESNETS[name]
  model = model_config(**fields)
  params = foreign.random_params(model, 5, size)
  written = weights.write(params, model)
  assert weights.looks_like(written)
  read, options, _ = translate(written, 3)
  assert AS_TIMM.items() <= options.items()
  other = {"root_pad"} if model.name == "bit" else {"gelu", "ln_eps"}
  assert options.keys() == {*AS_TIMM, *other}
  _assert_same(read, params)


def _assert_same(read, params):
  assert read.keys() == params.keys()
  for name, array in params.items():
    assert read[name].shape == array.shape, name
    np.testing.assert_array_equal(np.asarray(read[name]), array, name)


def test_layouts():
  heads, hd, d = 2, 3, 5
  qkv = np.arange(3 * heads * hd * d, dtype=np.float32).reshape(-1, d)
  bias = np.arange(3 * heads * hd, dtype=np.float32)
  out = np.arange(d * heads * hd, dtype=np.float32).reshape(d, -1)
  patches = np.arange(d * 3 * 2 * 2, dtype=np.float32).reshape(d, 3, 2, 2)
  read, *_ = translate(
    {
      "pos_embed": np.zeros((1, 4, 5), np.float32),
      "patch_embed.proj.weight": patches,
      "blocks.0.attn.qkv.weight": qkv,
      "blocks.0.attn.qkv.bias": bias,
      "blocks.0.attn.proj.weight": out,
    },
    heads,
  )
  block = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0"
  value = np.asarray(read[f"{block}/value/kernel"])
  assert value.shape == (d, heads, hd)
  # Third of three; head 1 begins at row 3 of its 6.
  assert value[4, 1, 2] == qkv[12 + 3 + 2, 4]
  assert np.asarray(read[f"{block}/key/bias"])[1, 0] == bias[6 + 3]
  kernel = np.asarray(read[f"{block}/out/kernel"])
  assert kernel.shape == (heads, hd, d) and kernel[1, 2, 4] == out[4, 5]
  kernel = np.asarray(read["embedding/kernel"])
  assert (
    kernel.shape == (2, 2, 3, d) and kernel[0, 1, 2, 4] == patches[4, 2, 0, 1]
  )


def test_attention_without_biases_gets_zeros():
  arrays = {"blocks.0.attn.qkv.weight": np.ones((12, 4), np.float32)}
  read, *_ = translate(arrays, 2)
  block = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0"
  bias = np.asarray(read[f"{block}/value/bias"])
  assert bias.shape == (2, 2) and not bias.any()


def test_arrays_without_a_place_are_named():
  names = [f"blocks.{i}.attn.q_norm.weight" for i in range(7)] + ["rope.freqs"]
  with pytest.raises(ValueError, match="got 8 arrays .*'blocks.0.attn.q_norm"):
    translate({n: np.zeros(4, np.float32) for n in names}, 1)


@pytest.mark.parametrize(
  "name",
  ["cls_token", "pos_embed", "head.weight"]
  + [f"blocks.0.{n}.weight" for n in ("norm1", "mlp.fc1", "mlp.fc2")]
  + ["blocks.0.attn.qkv.weight"],
)
def test_a_scalar_is_named_once(name):
  model = model_config(**TINY)
  arrays = weights.write(foreign.random_params(model, 3, SIZE), model)
  with pytest.raises(ValueError) as e:
    translate(arrays | {name: np.ones((), "f")})
  lines = str(e.value).splitlines()
  assert any(f"{name}: got shape (), " in n for n in lines) or "norm" in name
  assert len(set(lines)) == len(lines)


def test_heads_must_be_known():
  model = model_config(**TINY)
  written = weights.write(foreign.random_params(model, 5, SIZE), model)
  with pytest.raises(ValueError) as e:
    translate(written)
  assert str(e.value) == (
    "weights of timm: got width 24, depth 2 and mlp_dim 40, which is none of"
    " the sizes Ti, S, B, L, H, g, G, e, So400m, M, H+, 7B, g2, gopt, so that"
    " the number of attention heads is unknown. Pass num_heads."
  )
  with pytest.raises(ValueError, match="D a multiple of the 7 heads. State"):
    translate(written, 7)


@pytest.mark.parametrize(
  "fields, error, has_call",
  [
    (dict(pre_logits=True), "pre_logits: got a .* --drop_head", True),
    (
      dict(posemb="relative"),
      "posemb: got 'relative', expected 'learn', 'sincos2d' or 'none'.*\ngot"
      " 'Transformer/encoderblock_0/.*/offsets', .* which timm has no place",
      False,
    ),
    (dict(posemb_at="shared"), "posemb_at: got 'shared', expected 'stem':", 0),
    (dict(posemb="sincos2d"), r"grid: got None, expected \(rows", True),
    (
      dict(name="bit_v1", variant="R50x1"),
      "got 'bit_v1', expected 'bit', 'vit' or 'modern'",
      False,
    ),
    (
      dict(name="modern", distilled=True, registers=1),
      "config.model.registers: got 1, expected 0:",
      False,
    ),
  ],
)
def test_what_timm_cannot_hold(fields, error, has_call):
  model = model_config(**fields if "name" in fields else TINY | fields)
  params = {}
  if model.name == "vit":
    params = foreign.random_params(model, 5, SIZE)
  with pytest.raises(ValueError, match=f"(?s){error}"):
    weights.write(params, model)
  assert bool(timm_names.create_call(model, 5, SIZE)[0]) == bool(has_call)


@pytest.mark.parametrize(
  "fields, image_size, name, kwargs",
  [
    (dict(variant="B/16"), 224, "vit_base_patch16_224", {}),
    (dict(variant="S/14"), 224, "vit_small_patch16_224", dict(patch_size=14)),
    (dict(variant="L/14"), 224, "vit_large_patch14_224", {}),
    (dict(variant="G/14"), 224, "vit_gigantic_patch14_224", {}),
    (
      dict(variant="e/14"),
      224,
      "vit_base_patch16_224",
      dict(
        patch_size=14,
        embed_dim=1792,
        depth=56,
        num_heads=16,
        mlp_ratio=15360 / 1792,
      ),
    ),
    (
      dict(variant="So400m/14", pool="map"),
      224,
      "vit_so400m_patch14_siglip_224",
      {},
    ),
    (
      dict(variant="So400m/14", pool="gap"),
      384,
      "vit_so400m_patch14_siglip_224",
      dict(
        img_size=[384, 384],
        global_pool="avg",
        fc_norm=False,
      ),
    ),
    (
      dict(variant="B/32", cls_row=False),
      224,
      "vit_base_patch32_224",
      dict(no_embed_class=True),
    ),
    (
      dict(variant="H/14", pool="map", posemb="none"),
      224,
      "vit_huge_patch14_224",
      dict(class_token=False, global_pool="map", pos_embed="none"),
    ),
    (dict(variant="R+Ti/16"), 224, "vit_tiny_r_s16_p8_224", {}),
    (dict(variant="R26+S/32"), 224, "vit_small_r26_s32_224", {}),
    (dict(variant="R50+B/16"), 224, "vit_base_r50_s16_224", {}),
    (
      dict(variant="R50+B/32"),
      224,
      "vit_large_r50_s32_224",
      dict(embed_dim=768, depth=12, num_heads=12),
    ),
    (dict(variant="R101+B/32"), 224, None, None),
    (dict(name="bit", variant="R152x4"), 480, "resnetv2_152x4_bit", {}),
    (dict(name="bit", variant="R50x2"), 480, None, None),
  ],
)
def test_the_call_that_makes_the_model(fields, image_size, name, kwargs):
  gelu = {} if "name" in fields else dict(gelu="erf")
  model = model_config(**fields, **gelu)
  call = timm_names.create_call(model, 7, (image_size, image_size))
  expected = {} if kwargs is None else {"num_classes": 7} | kwargs
  assert call == (name, expected)
  if gelu and name:
    tanh = dataclasses.replace(model, gelu="tanh")
    _, kwargs = timm_names.create_call(tanh, 7, (image_size, image_size))
    assert kwargs == expected | {"act_layer": "gelu_tanh"}


def test_differences():
  assert timm_names.differences(model_config()) == []
  assert timm_names.differences(model_config(ln_eps=1e-12)) == [
    "LayerNorm adds 1e-06 to the variance, this model 1e-12; the argument"
    " norm_layer=functools.partial(timm.layers.LayerNorm, eps=1e-12) makes it"
    " equal."
  ]
  assert timm_names.differences(model_config(variant="R50+B/16")) == [
    "GroupNorm adds 1e-05 to the variance, this model 1e-06.",
    "weight standardisation adds 1e-08 to the variance, this model 1e-05 to"
    " the standard deviation.",
  ]
  model = model_config(variant="R50+B/16", **AS_TIMM)
  assert timm_names.differences(model) == []
  model = model_config(name="bit", variant="R50x1", root_pad="nothing")
  assert timm_names.differences(model) == [
    "the maximum after the first convolution sees zeros beyond the border, this"
    " model nothing.",
    "weight standardisation adds 1e-08 to the variance, this model 1e-10 to"
    " the variance.",
  ]
