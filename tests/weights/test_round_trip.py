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
from weight_files import TRANSFORMERS, WEIGHTS, assert_same, write

from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.models.posemb import sincos2d
from vit_jax.weights.weights_file import POS_EMBEDDING
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
  ("DeiTModel", DEIT | dict(pre_logits=True), ""),
  ("BeitForImageClassification", BEIT, ""),
  ("DINOv3ViTModel", DINOV3, ""),
  ("CLIPVisionModelWithProjection", CLIP | dict(projection=16), ""),
]
WRITERS = {
  "timm": timm.write, "meta": timm.write_meta, "openclip": openclip.write
}  # fmt: skip


def random_params(num_classes=3, image=IMAGE, **options):
  model = model_config(**VIT | options)
  return model, foreign.random_params(model, num_classes, image)


@pytest.mark.parametrize(
  "kind, options, names",
  [pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in ROWS],
)
def test_there_and_back(tmp_path, kind, options, names):
  model = model_config(**options if options is BIT else VIT | options)
  is_hf = kind not in WRITERS
  is_bare = is_hf and "ForImage" not in kind or kind == "openclip"
  num_classes = 0 if is_bare else 3
  image = (64, 64) if model.stages else IMAGE
  params = foreign.random_params(model, num_classes, image)
  if is_hf:
    arrays, config = hf_classes.write(
      params, model, num_classes=num_classes, image_size=image
    )
    assert config["architectures"] == [kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
  else:
    arrays = WRITERS[kind](params, model)
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


# Positions.


@pytest.mark.parametrize(
  "options", [dict(posemb="sincos2d"), dict(cls_row=False)]
)
def test_positions_that_are_no_whole_table_become_one(options):
  """transformers' table has a row for the class token, timm's need not."""
  model, params = random_params(**options)
  table = params.get(POS_EMBEDDING)
  if table is None:
    table = sincos2d(3, 4, 48)[None]
  arrays = timm.write(params, model, grid=(3, 4))
  np.testing.assert_array_equal(arrays["pos_embed"], table)
  arrays, _ = hf_classes.write(params, model, num_classes=3, image_size=IMAGE)
  np.testing.assert_array_equal(
    arrays["vit.embeddings.position_embeddings"],
    np.pad(table, ((0, 0), (1, 0), (0, 0))),
  )


def test_registers_of_timm_have_no_row_for_cls():
  """timm adds it to the class token, and so the sum stays."""
  model, params = random_params(**REGISTERS | dict(cls_row=True))
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
  has_cls = "cls" in tokens
  options = REGISTERS | dict(pool="gap", class_token=has_cls)
  model, params = random_params(image=image, **options)
  arrays = timm.write(params, model)
  counts = [params[name].shape[1] for name in tokens]
  rows = np.random.default_rng(0).normal(size=(1, sum(counts), 48)).astype("f")
  arrays["pos_embed"] = np.concatenate([rows, arrays["pos_embed"]], 1)
  result = weights.read(
    write(tmp_path / WEIGHTS, arrays),
    grid=(2, 5) if has_cls else None,
    options={"num_heads": 4},
  )
  parts = np.split(rows, np.cumsum(counts), 1)[:-1]
  for name, row in zip(tokens, parts, strict=True):
    np.testing.assert_array_equal(result.params[name], params[name] + row)
  np.testing.assert_array_equal(
    result.params[POS_EMBEDDING], params[POS_EMBEDDING]
  )
  assert " and ".join(tokens) in " ".join(result.notes)


# Names and layouts.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_key_has_no_bias_and_periods_have_a_type(dtype):
  model, params = random_params(**DINOV3 | dict(rope_periods=dtype))
  arrays = timm.write_meta(params, model)
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

  def numbered(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

  qkv, bias = numbered(3 * heads * hd, d), numbered(3 * heads * hd)
  out, patches = numbered(d, heads * hd), numbered(d, 3, 2, 2)
  arrays = {
    "pos_embed": np.zeros((1, 4, 5), np.float32),
    "patch_embed.proj.weight": patches,
    "blocks.0.attn.qkv.weight": qkv,
    "blocks.0.attn.qkv.bias": bias,
    "blocks.0.attn.proj.weight": out,
    "blocks.1.attn.qkv.weight": qkv,  # without biases
  }
  read, *_ = foreign.translate(timm.SERIES, arrays, heads)
  read = {name: np.asarray(array) for name, array in read.items()}
  block = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/"
  first, second = block.format(0), block.format(1)
  value, kernel = read[f"{first}value/kernel"], read[f"{first}out/kernel"]
  stem = read["embedding/kernel"]
  shapes = value.shape, kernel.shape, stem.shape
  assert shapes == ((d, heads, hd), (heads, hd, d), (2, 2, 3, d))
  # Third of three; head 1 begins at row 3 of its 6.
  assert value[4, 1, 2] == qkv[12 + 3 + 2, 4]
  assert read[f"{first}key/bias"][1, 0] == bias[6 + 3]
  assert kernel[1, 2, 4] == out[4, 5]
  assert stem[0, 1, 2, 4] == patches[4, 2, 0, 1]
  zeros = read[f"{second}value/bias"]
  assert zeros.shape == (heads, hd) and not zeros.any()


@pytest.mark.parametrize("prefix", ["vit.", ""])
def test_names_of_transformers_in_memory_are_read(prefix):
  model, params = random_params(num_classes=0)
  arrays, config = hf_classes.write(
    params, model, num_classes=0, image_size=IMAGE
  )
  for name, in_file in TRANSFORMERS.items():
    arrays = {k.replace(in_file, name): v for k, v in arrays.items()}
  assert "layers.1.attention.q_proj.weight" in arrays
  arrays = {prefix + k: v for k, v in arrays.items()}
  read, *_ = foreign.translate(hf.SERIES, arrays, config=config)
  assert_same(read, params)
