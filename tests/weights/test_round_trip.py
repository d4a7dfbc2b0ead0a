"""What is written under another library's names is read as it was, bit by bit.

The outputs are compared with the libraries themselves in test_parity.py.
"""

import dataclasses
import json

import foreign
import ml_dtypes
import numpy as np
import pytest
from series_parts import (
  BEIT,
  CLIP,
  DINOV2,
  DINOV3,
  DISTILLED,
  EVA02,
  REGISTERS,
  SWIGLU,
)  # fmt: skip
from weight_files import DATA, TRANSFORMERS, WEIGHTS, assert_same, write

from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.models.posemb import sincos2d
from vit_jax.weights import bit, google
from vit_jax.weights.npz_file import open_npz
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy
from vit_jax.zoo.files import hf, hf_classes, openclip, timm

IMAGE = (24, 32)
VIT = dict(variant="B/8", width=48, depth=2, mlp_dim=192, num_heads=4)
ERF = dict(gelu="erf")
DEIT = ERF | dict(name="modern", registers=1)  # of transformers, not distilled
GATED = SWIGLU | dict(gelu="tanh", mlp_dim=128)  # mlp_dim by transformers' rule
AS_TIMM = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")
HYBRID = ERF | AS_TIMM | dict(variant="R50+B/16", stage_blocks=(1, 1))
BIT = dict(name="bit", variant="R50x0.5", stage_blocks=(1, 1), **AS_TIMM)
# Format, or class of transformers; options beside the size; names in the file.
ROWS = [
  ("timm", ERF, ""),
  ("timm", ERF | dict(pool="map"), "attn_pool.latent"),
  ("timm", HYBRID, "patch_embed.backbone.stages.1.blocks.0.conv1.weight"),
  ("timm", BIT, "stages.0.blocks.0.conv1.weight"),
  ("timm", DISTILLED, "head_dist.bias"),
  ("timm", REGISTERS | SWIGLU, "reg_token blocks.1.mlp.fc1.bias"),
  ("timm", DINOV3 | SWIGLU, "blocks.1.mlp.fc1_g.bias"),
  ("timm", EVA02 | dict(mlp_norm=True), "blocks.1.attn.q_proj.bias"),
  ("timm", BEIT, "blocks.1.attn.relative_position_bias_table"),
  ("meta", DINOV2 | SWIGLU, "blocks.1.mlp.w12.bias mask_token"),
  ("meta", DINOV3, "blocks.1.ls1.gamma blocks.1.attn.qkv.bias_mask"),
  ("openclip", CLIP | dict(projection=9), "visual.proj"),
  ("ViTForImageClassification", ERF | dict(ln_eps=1e-12), ""),
  ("ViTModel", dict(pre_logits=True), "pooler.dense.bias"),
  ("DeiTForImageClassificationWithTeacher", DISTILLED, ""),
  ("Dinov2WithRegistersModel", DINOV2 | GATED | dict(registers=4), ""),
  (
    "DeiTModel",
    dict(name="modern", gelu="erf", registers=1, pre_logits=True),
    "",
  ),
  ("BeitForImageClassification", BEIT, ""),
  ("DINOv3ViTModel", DINOV3, ""),
  ("CLIPVisionModelWithProjection", CLIP | dict(projection=16), ""),
]


def _arrays(kind, params, model, folder, num_classes):
  """Returns arrays under names of the format; writes config.json."""
  if kind in ("timm", "meta"):
    write = {"timm": timm.write, "meta": timm.write_meta}[kind]
    return write(params, model)
  if kind == "openclip":
    return openclip.write(params, model)
  arrays, config = hf_classes.write(
    params, model, num_classes=num_classes, image_size=IMAGE
  )
  assert config["architectures"] == [kind]
  (folder / "config.json").write_text(json.dumps(config))
  return arrays


@pytest.mark.parametrize(
  "kind, options, names",
  [pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in ROWS],
)
def test_there_and_back(tmp_path, kind, options, names):
  model = model_config(**options if options is BIT else VIT | options)
  is_hf = kind not in ("timm", "meta", "openclip")
  is_bare = is_hf and "ForImage" not in kind or kind == "openclip"
  num_classes = 0 if is_bare else 3
  image = (64, 64) if model.stages else IMAGE
  params = foreign.random_params(model, num_classes, image)
  arrays = _arrays(kind, params, model, tmp_path, num_classes)
  assert all(a.flags.c_contiguous for a in arrays.values())
  assert all(name in arrays for name in names.split())
  file = write(tmp_path / WEIGHTS, arrays)
  stated = {}
  if not is_hf and options is not BIT:  # what the arrays alone do not show
    stated = {"num_heads": 4, "gelu": options["gelu"]}
    stated |= {k: options[k] for k in ("cls_row",) if k in options}
  read = weights.read(
    tmp_path if is_hf else file,
    mean="half",
    grid=None if model.stages else (3, 4),
    options=stated,
  )
  assert_same(read, params)
  got = weights.identify(read.params, read.options)
  if getattr(model, "layer_scale", None) and not is_hf:
    got = dataclasses.replace(got, layer_scale=1e-5)  # its start is in no array
  assert got == model
  assert not is_hf or read.image_size == IMAGE


@pytest.mark.parametrize("kind", ["timm", "ViTForImageClassification"])
@pytest.mark.parametrize(
  "options", [dict(posemb="sincos2d"), dict(cls_row=False)]
)
def test_positions_that_are_no_whole_table_become_one(tmp_path, kind, options):
  """transformers' table has a row for the class token, timm's need not."""
  model = model_config(**VIT | options)
  params = foreign.random_params(model, 3, IMAGE)
  table = params.get(POS_EMBEDDING)
  if options == dict(posemb="sincos2d"):
    table = sincos2d(3, 4, 48)[None]
  if kind == "timm":
    arrays = timm.write(params, model, grid=(3, 4))
    got = arrays.get("pos_embed")
  else:
    arrays = _arrays(kind, params, model, tmp_path, 3)
    got = arrays["vit.embeddings.position_embeddings"]
    table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
  np.testing.assert_array_equal(got, table)


def test_registers_of_timm_have_no_row_for_cls():
  """timm adds it to the class token, and so the sum stays."""
  model = model_config(**VIT | REGISTERS | dict(cls_row=True))
  params = foreign.random_params(model, 3, IMAGE)
  arrays = timm.write(params, model)
  table = params[POS_EMBEDDING]
  np.testing.assert_array_equal(arrays["pos_embed"], table[:, 1:])
  np.testing.assert_array_equal(
    arrays["cls_token"], params["cls"] + table[:, :1]
  )


@pytest.mark.parametrize(
  "tokens, image",
  [(["registers"], (32, 32)), (["cls", "registers"], (16, 40))],
)
def test_rows_of_registers_become_part_of_them(tmp_path, tokens, image):
  """timm's table has them, unless no_embed_class is True."""
  options = VIT | REGISTERS | dict(pool="gap", class_token="cls" in tokens)
  model = model_config(**options)
  params = foreign.random_params(model, 3, image)
  arrays = timm.write(params, model)
  count = sum(params[name].shape[1] for name in tokens)
  rows = np.random.default_rng(0).normal(size=(1, count, 48)).astype("f")
  arrays["pos_embed"] = np.concatenate([rows, arrays["pos_embed"]], 1)
  path = write(tmp_path / WEIGHTS, arrays)
  grid = None if image == (32, 32) else (2, 5)
  result = weights.read(path, grid=grid, options={"num_heads": 4})
  for name in tokens:
    first, rows = np.split(rows, [params[name].shape[1]], 1)
    np.testing.assert_array_equal(result.params[name], params[name] + first)
  np.testing.assert_array_equal(
    result.params[POS_EMBEDDING], params[POS_EMBEDDING]
  )
  assert " and ".join(tokens) in " ".join(result.notes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_key_has_no_bias_and_periods_have_a_type(dtype):
  model = model_config(**VIT | DINOV3 | dict(rope_periods=dtype))
  arrays = timm.write_meta(foreign.random_params(model, 3, IMAGE), model)
  mask = arrays["blocks.0.attn.qkv.bias_mask"]
  np.testing.assert_array_equal(mask, np.repeat([1, 0, 1], 48))
  periods = np.float32([1, 100 ** (1 / 3), 100 ** (2 / 3)])
  rounded = periods.astype(getattr(ml_dtypes, dtype, dtype))
  np.testing.assert_allclose(
    arrays[timm.PERIODS], rounded.astype("f"), rtol=1e-6
  )
  arrays["blocks.0.attn.qkv.bias"][48:96] = 5  # the mask takes it away
  read, options, _ = foreign.translate(timm.SERIES, arrays, 4)
  assert options["rope_periods"] == dtype
  assert not any(name.endswith("key/bias") for name in read)
  arrays[timm.PERIODS] = arrays[timm.PERIODS] * 2
  with pytest.raises(ValueError, match=timm.PERIODS):
    foreign.translate(timm.SERIES, arrays, 4)


def test_layouts_of_timm():
  heads, hd, d = 2, 3, 5
  qkv = np.arange(3 * heads * hd * d, dtype=np.float32).reshape(-1, d)
  bias = np.arange(3 * heads * hd, dtype=np.float32)
  out = np.arange(d * heads * hd, dtype=np.float32).reshape(d, -1)
  patches = np.arange(d * 3 * 2 * 2, dtype=np.float32).reshape(d, 3, 2, 2)
  read, *_ = foreign.translate(
    timm.SERIES,
    {
      "pos_embed": np.zeros((1, 4, 5), np.float32),
      "patch_embed.proj.weight": patches,
      "blocks.0.attn.qkv.weight": qkv,
      "blocks.0.attn.qkv.bias": bias,
      "blocks.0.attn.proj.weight": out,
      "blocks.1.attn.qkv.weight": qkv,  # without biases
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
  zeros = np.asarray(read[f"{block.replace('_0/', '_1/', 1)}/value/bias"])
  assert zeros.shape == (heads, hd) and not zeros.any()


@pytest.mark.parametrize("prefix", ["vit.", ""])
def test_names_of_transformers_in_memory_are_read(prefix):
  model = model_config(**VIT)
  params = foreign.random_params(model, 0, IMAGE)
  arrays, config = hf_classes.write(
    params, model, num_classes=0, image_size=IMAGE
  )
  for name, in_file in TRANSFORMERS.items():
    arrays = {k.replace(in_file, name): v for k, v in arrays.items()}
  assert "layers.1.attention.q_proj.weight" in arrays
  arrays = {prefix + k: v for k, v in arrays.items()}
  read, *_ = foreign.translate(hf.SERIES, arrays, config=config)
  assert_same(read, params)


# Google's names: three generations, odd arrays.


PUBLISHED = sorted(
  p.name.split(".")[0]
  for p in DATA.glob("*.weights.npz")
  if p.name.startswith(("vit_", "hybrid_", "bv_", "bit_"))
)
# Whose names are those that we write.
LATEST = ("vit_token_prelogits", "hybrid_r", "bv_map", "bit_v1")


def _lazy(arrays):
  return {k: lazy(np.asarray(v)) for k, v in arrays.items()}


def _google(params, **options):
  return google.write({k: np.asarray(v) for k, v in params.items()}, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_google_s_files(name):
  result = open_npz(DATA / f"{name}.weights.npz")
  params, options = google.read(result)
  file = _google(params, is_big_vision=name.startswith("b"))
  assert google.looks_like(result) and google.looks_like(file)
  again, options_again = google.read(_lazy(file))
  assert options_again == options
  assert_same(again, params)
  shapes = [{k: v.shape for k, v in x.items()} for x in (file, result)]
  if name in LATEST:
    assert shapes[0] == shapes[1]
  if name == "vit_linen_names":
    paper = open_npz(DATA / "vit_token.weights.npz")
    assert file.keys() == {n for n in paper if "encoderblock_2" not in n}


def test_the_tower_of_images_is_found_beside_that_of_texts(tmp_path):
  """SigLIP of big_vision has both: img, txt, temperature t, bias b."""
  file, path = open_npz(DATA / "bv_map.weights.npz"), tmp_path / "siglip.npz"
  two_towers = {
    n.replace("params/", "params/img/"): np.asarray(a) for n, a in file.items()
  }
  texts = {"params/b": 0.0, "params/t": 1.0, "params/txt/head/bias": [0.0]}
  np.savez(path, **two_towers, **texts)
  result = weights.read(path)
  assert_same(result, google.read(file)[0])
  assert weights.identify(result.params, result.options).pool == "map"
  assert all(name in result.notes[0] for name in texts)


def test_stacked_blocks_are_taken_apart():
  result = open_npz(DATA / "bv_scan.weights.npz")
  params, _ = google.read(result)
  name = "Transformer/encoderblock{}/MlpBlock_0/Dense_0/kernel"
  stacked = np.asarray(result["params/" + name.format("")])
  assert len(stacked) == 2
  for i, expected in enumerate(stacked):
    np.testing.assert_array_equal(params[name.format(f"_{i}")], expected)
  assert not any("encoderblock/" in n for n in params)
  with pytest.raises(ValueError, match="a scalar"):
    google.read(_lazy({name.format(""): 3.0}))


def test_odd_arrays_of_google_s():
  """Norms of four dimensions, the optimizer's moments, a name twice."""
  norm = {"gn_root/scale": np.arange(4.0).reshape(1, 1, 1, 4)}
  params, _ = google.read(_lazy(norm))
  assert params["gn_root/scale"].shape == (4,)
  assert _google(params)["gn_root/scale"].shape == (1, 1, 1, 4)
  moments = {
    "opt/state/step": 7, "opt/param_states/cls/grad_ema": np.ones((1, 1, 4)),
  }  # fmt: skip
  for prefix in ("opt/target/", "params/"):
    cls = {f"{prefix}cls": np.ones((1, 1, 4))}
    assert google.read(_lazy(cls | moments))[0].keys() == {"cls"}
  twice = [f"Transformer/encoderblock_0/LayerNorm_{i}/scale" for i in (1, 2)]
  with pytest.raises(ValueError, match=twice[1]):
    google.read(_lazy(dict.fromkeys(twice, np.ones(4))))


@pytest.mark.parametrize(
  "published, ours",
  [
    ("root_block/standardized_conv2d/kernel", "conv_root/kernel"),
    (
      "block4/unit12/c/standardized_conv2d_52/kernel",
      "block4/unit12/conv3/kernel",
    ),
    (
      "block2/unit01/a/proj/standardized_conv2d/kernel",
      "block2/unit1/conv_proj/kernel",
    ),
    ("block3/unit23/b/group_norm/gamma", "block3/unit23/gn2/scale"),
    ("group_norm/beta", "norm-pre-head/bias"),
    ("head/conv2d/bias", "head/bias"),
    ("block1/unit01/d/group_norm/beta", None),
  ],
)
def test_names_of_bit(published, ours):
  assert bit.rename(f"resnet/{published}") == ours


def test_bit_s_own_files(tmp_path):
  result = weights.read(DATA / "bit_v2.weights.npz")
  expected = {k: np.asarray(v) for k, v in result.params.items()}
  written = bit.write(expected)
  assert written["resnet/head/conv2d/kernel"].shape == (1, 1, 512, 7)
  np.savez(tmp_path / "BiT-M.npz", **written)
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
  with pytest.raises(ValueError, match="'extra', 'momentum'"):
    bit.read(_lazy(dict.fromkeys((name, "momentum", "extra"), np.zeros(3))))
  assert not bit.looks_like(["block1/unit1/conv1/kernel"])
