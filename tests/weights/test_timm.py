"""timm's names, layouts and numbers; the slow ones against timm itself."""

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
    "weights of timm: got width 24, depth 2 and mlp_dim 40, of no known number"
    " of heads. Pass num_heads."
  )
  with pytest.raises(ValueError, match="D a multiple of num_heads=7"):
    translate(written, 7)


@pytest.mark.parametrize(
  "fields, error",
  [
    (dict(pre_logits=True), "got 'pre_logits/bias', .* --drop_head"),
    (
      dict(posemb="relative"),
      "posemb: got 'relative', expected 'learn', 'sincos2d' or 'none'.*\ngot"
      " 'Transformer/encoderblock_0/.*/offsets', .* has no place for",
    ),
    (dict(posemb_at="shared"), "posemb_at: got 'shared', expected 'stem'"),
    (
      dict(name="bit_v1", variant="R50x1"),
      "got 'bit_v1', expected 'bit', 'vit' or 'modern'",
    ),
    (
      dict(name="modern", distilled=True, registers=1),
      "config.model.registers: got 1, expected 0",
    ),
    (
      dict(name="modern", rope="dinov3", posemb="none", qkv_bias="none"),
      "config.model.gelu: got 'tanh', expected 'erf'",
    ),
  ],
)
def test_what_timm_cannot_hold(fields, error):
  model = model_config(**fields if "name" in fields else TINY | fields)
  params = {}
  if model.name == "vit":
    params = foreign.random_params(model, 5, SIZE)
  with pytest.raises(ValueError, match=f"(?s){error}"):
    weights.write(params, model)


@pytest.mark.parametrize(
  "fields, image_size, name, kwargs",
  [
    (dict(variant="B/16"), 224, "vit_base_patch16_224", {}),
    (dict(variant="B/16", posemb="learn"), 384, "vit_base_patch16_224", {}),
    (
      dict(variant="B/16", pool="map", posemb="sincos2d"),
      224,
      "vit_base_patch16_siglip_256",
      {},
    ),
    (
      dict(variant="B/32", channels=1),
      224,
      "vit_base_patch32_224",
      dict(in_chans=1),
    ),
    (dict(variant="R26+S/32"), 224, "vit_small_r26_s32_224", {}),
    (dict(name="bit", variant="R152x4"), 480, "resnetv2_152x4_bit", {}),
    # Each differs in one part from a published model.
    (dict(variant="S/14"), 224, None, None),
    (dict(variant="B/16", num_heads=6), 224, None, None),
    (dict(variant="B/16", pool="gap"), 224, None, None),
    (dict(variant="B/16", depth=11), 224, None, None),
    (dict(variant="B/32", cls_row=False), 224, None, None),
    (dict(variant="B/16", posemb="none"), 224, None, None),
    (dict(variant="R101+B/32"), 224, None, None),
    (dict(name="bit", variant="R50x2"), 480, None, None),
  ],
)
def test_the_call_that_makes_the_model(fields, image_size, name, kwargs):
  gelu = {} if "name" in fields else dict(gelu="erf")
  model = model_config(**fields, **gelu)
  call = timm_names.create_call(model, 7, (image_size, image_size))
  if name is None:
    assert call == (None, {})
    return
  if gelu:
    kwargs = kwargs | {"act_layer": "gelu", "img_size": [image_size] * 2}
  assert call == (name, {"num_classes": 7} | kwargs)


def test_differences():
  def keys(**fields):
    texts = timm_names.differences(model_config(**fields))
    return [text.split("=")[0].rpartition(".")[2] for text in texts]

  assert keys() == []
  assert keys(ln_eps=1e-12) == ["ln_eps"]
  assert keys(variant="R50+B/16") == ["gn_eps", "ws_eps", "ws_eps_on"]
  assert keys(variant="R50+B/16", **AS_TIMM) == []
  bit = dict(name="bit", variant="R50x1")
  assert keys(**bit, root_pad="nothing") == ["ws_eps", "root_pad"]
