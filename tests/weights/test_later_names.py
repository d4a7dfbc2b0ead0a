"""Later models under timm's, Meta's and OpenCLIP's names, out and back."""

import json

import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from foreign import random_params, translate
from weight_files import message

import vit_jax
from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.tools.exporting import convert
from vit_jax.weights import identify, safetensors_file
from vit_jax.zoo.files import openclip, publishers, timm

TINY = dict(
  name="modern", variant="B/8", width=32, depth=2, mlp_dim=64, num_heads=2
)
SIZE = (16, 16)
SCALED = dict(layer_scale=1e-5, gelu="erf")
REGISTERS = SCALED | dict(registers=3, cls_row=False)
DINOV3 = SCALED | dict(
  registers=3, posemb="none", rope="dinov3", ln_eps=1e-5, qkv_bias="no_key"
)
CLIP = dict(pre_norm=True, patch_bias=False, ln_eps=1e-5, gelu="erf")
EVA02 = dict(
  mlp="swiglu",
  rope="eva02",
  qkv_bias="no_key",
  pool="gap",
  final_norm="pooled",
  gelu="erf",
)
# Name -> options, and names of some arrays of a block in timm and Meta's files.
MODELS = {
  "DeiT": (
    dict(distilled=True, gelu="erf"), ["attn.qkv.bias"], ["mlp.fc1.bias"]
  ),
  "DeiT III": (SCALED | dict(cls_row=False), ["ls1.gamma"], ["gamma_1"]),
  "DINOv2": (SCALED, ["ls2.gamma"], ["ls2.gamma"]),
  "DINOv2-g": (SCALED | dict(mlp="swiglu"), ["mlp.fc1.bias"], ["mlp.w12.bias"]),
  "registers": (REGISTERS, ["ls1.gamma"], None),
  "DINOv3": (
    DINOV3,
    ["gamma_1", "attn.q_bias", "attn.v_bias"],
    ["ls1.gamma", "attn.qkv.bias", "attn.qkv.bias_mask"],
  ),
  "DINOv3-S+": (
    DINOV3 | dict(mlp="swiglu"),
    ["mlp.fc1_g.bias"],
    ["mlp.w1.bias", "mlp.w3.bias"],
  ),
  "DINOv3-7B": (DINOV3 | dict(qkv_bias="none"), ["gamma_2"], ["ls2.gamma"]),
  "CLIP": (CLIP, ["norm1.bias"], None),
  "EVA-02 S": (EVA02, ["mlp.fc1.bias", "attn.q_bias"], None),
  "EVA-02 B": (
    EVA02 | dict(mlp_norm=True), ["attn.q_proj.bias", "mlp.norm.bias"], None
  ),
}  # fmt: skip


def _assert_back(arrays, model, params):
  read, options, _ = translate(timm.SERIES, arrays, 2)
  assert read.keys() == params.keys()
  for name, array in params.items():
    np.testing.assert_array_equal(read[name], array, name)
  if "cls_row" in model.__dict__ and not model.cls_row:
    options["cls_row"] = False  # by the length of the table
  # Its initial value is in no array.
  options["layer_scale"] = model.layer_scale
  assert identify(read, options) == model


@pytest.mark.parametrize("name", MODELS)
def test_out_and_back(name):
  options, of_timm, of_meta = MODELS[name]
  model = model_config(**TINY | options)
  params = random_params(model, 3, SIZE)
  arrays = timm.write(params, model)
  assert {f"blocks.1.{n}" for n in of_timm} <= arrays.keys()
  _assert_back(arrays, model, params)
  if of_meta is None:
    if name != "registers":
      with pytest.raises(ValueError, match="Meta's models cannot hold it"):
        timm.write_meta(params, model)
    return
  arrays = timm.write_meta(params, model)
  assert {f"blocks.1.{n}" for n in of_meta} <= arrays.keys()
  _assert_back(arrays, model, params)


def test_rotary_positions_without_a_class_token_are_not_dinov3_s(tmp_path):
  """Its arrays are those of timm's vit_*_patch16_rope_reg1_gap_256."""
  model = model_config(**TINY | DINOV3)
  arrays = timm.write(random_params(model, 3, SIZE), model)
  path = tmp_path / "model.safetensors"
  safetensors_file.write(path, arrays, {})
  assert vit_jax.load(path, num_heads=2, verbose=False).config.rope == "dinov3"
  (tmp_path / "config.json").write_text('{"architecture": "vit_rope_x"}')
  assert "got 'vit_rope_x', expected another" in message(path, num_heads=2)
  (tmp_path / "config.json").unlink()
  del arrays["cls_token"]
  safetensors_file.write(path, arrays, {})
  assert "the arrays of timm's _rope_ models, without" in message(
    path, num_heads=2
  )


@pytest.mark.parametrize("options", [REGISTERS, SCALED, CLIP])
def test_no_table_does_not_mean_dinov3(tmp_path, options):
  model = model_config(
    **TINY | options | dict(cls_row=True, posemb="none", rope=None)
  )
  arrays = timm.write(random_params(model, 3, SIZE), model)
  path = tmp_path / "model.safetensors"
  safetensors_file.write(path, arrays, {})
  assert "missing, expected a position table" in message(path, num_heads=2)
  about = {"model_args": {"num_heads": 2, "pos_embed": "none"}}
  (tmp_path / "config.json").write_text(json.dumps(about))
  vit = vit_jax.load(path, image_size=16, mean="half", verbose=False)
  assert (vit.config.posemb, vit.config.rope) == ("none", None)


def test_both_heads_of_a_distilled_model_are_left_out(tmp_path):
  model = model_config(**TINY, distilled=True, gelu="erf")
  arrays = timm.write(random_params(model, 3, SIZE), model)
  path = tmp_path / "x.safetensors"
  safetensors_file.write(path, arrays, {})
  vit = vit_jax.load(path, num_heads=2, verbose=False)
  left = convert.without_head(vit, "timm")
  assert vit.params.keys() - left.params.keys() == {"head", "head_dist"}


def test_registers_of_timm_have_no_row_for_cls():
  """timm adds it to the class token, and so the sum stays."""
  model = model_config(**TINY | REGISTERS | dict(cls_row=True))
  params = random_params(model, 3, SIZE)
  arrays = timm.write(params, model)
  table = params[timm.POS_EMBEDDING]
  np.testing.assert_array_equal(arrays["pos_embed"], table[:, 1:])
  np.testing.assert_array_equal(
    arrays["cls_token"], params["cls"] + table[:, :1]
  )
  _assert_back(timm.write_meta(params, model), model, params)


@pytest.mark.parametrize("tokens", [["registers"], ["cls", "registers"]])
@pytest.mark.parametrize("size", [(16, 16), (16, 40)])
def test_rows_of_registers_become_part_of_them(tmp_path, tokens, size):
  """timm's table has them, unless no_embed_class is True."""
  options = REGISTERS | dict(pool="gap", class_token="cls" in tokens)
  model = model_config(**TINY | options)
  params = random_params(model, 3, size)
  arrays = timm.write(params, model)
  count = sum(params[name].shape[1] for name in tokens)
  rows = np.random.default_rng(0).normal(size=(1, count, 32)).astype("f")
  arrays["pos_embed"] = np.concatenate([rows, arrays["pos_embed"]], 1)
  path = tmp_path / "model.safetensors"
  safetensors_file.write(path, arrays, {})
  grid = None if size == (16, 16) else (2, 5)
  result = weights.read(path, grid=grid, options={"num_heads": 2})
  for name in ("cls", "registers")[-len(tokens) :]:
    first, rows = np.split(rows, [params[name].shape[1]], 1)
    np.testing.assert_array_equal(result.params[name], params[name] + first)
  table = result.params[timm.POS_EMBEDDING]
  np.testing.assert_array_equal(table, params[timm.POS_EMBEDDING])
  assert f"rows has {count} for {' and '.join(tokens)}" in " ".join(
    result.notes
  )
  if grid:
    text = message(path, num_heads=2)
    assert "patches, expected a square number" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_key_has_no_bias_and_periods_have_a_type(dtype):
  model = model_config(**TINY | DINOV3 | dict(rope_periods=dtype))
  arrays = timm.write_meta(random_params(model, 3, SIZE), model)
  mask = arrays["blocks.0.attn.qkv.bias_mask"]
  np.testing.assert_array_equal(mask, np.repeat([1, 0, 1], 32))
  periods = np.float32([1, 10**0.5, 10, 10**1.5])
  rounded = periods.astype(getattr(ml_dtypes, dtype, dtype))
  np.testing.assert_allclose(
    arrays[timm.PERIODS], rounded.astype("f"), rtol=1e-6
  )
  arrays["blocks.0.attn.qkv.bias"][32:64] = 5  # the mask takes it away
  read, options, _ = translate(timm.SERIES, arrays, 2)
  assert options["rope_periods"] == dtype
  assert not any(name.endswith("key/bias") for name in read)
  arrays[timm.PERIODS] = arrays[timm.PERIODS] * 2
  with pytest.raises(ValueError, match="rope_embed.periods: got"):
    translate(timm.SERIES, arrays, 2)


@pytest.mark.parametrize("gelu", ["erf", "quick"])
def test_the_tower_of_clip(tmp_path, gelu):
  model = model_config(**TINY | CLIP | dict(gelu=gelu, projection=9))
  params = random_params(model, 0, SIZE)
  arrays = openclip.write(params, model)
  assert arrays["visual.proj"].shape == (32, 9)
  assert arrays["visual.class_embedding"].shape == (32,)
  texts = ("transformer.resblocks.0.ln_1.bias", "positional_embedding")
  path = tmp_path / "open_clip_model.safetensors"
  safetensors_file.write(
    path, arrays | {n: np.ones((2, 2), "f") for n in texts}, {}
  )
  options = {"num_heads": 2, "mean": "half"}
  vit = vit_jax.load(path, verbose=False, **options)
  text = " ".join(vit.report.notes)
  assert "and left out 'positional_embedding', 'transformer.resblocks.0" in text
  assert "gelu='erf' is assumed, as in OpenCLIP's models; OpenAI's" in text
  about = '{"model_cfg": {"quick_gelu": true}}'
  (tmp_path / openclip.CONFIG).write_text(about)
  quick = vit_jax.load(tmp_path, verbose=False, **options)
  assert (vit.config.gelu, quick.config.gelu) == ("erf", "quick")
  for name, array in params.items():
    got = vit.params
    for key in name.split("/"):
      got = got[key]
    np.testing.assert_array_equal(got, array, name)
  with pytest.raises(ValueError, match="expected 'modern'"):
    openclip.write(params, model_config(variant="B/8"))


def _write(folder, arrays, **vision):
  """Writes a tower, and a config without images."""
  safetensors_file.write(folder / "x.safetensors", arrays, {})
  text = json.dumps({"model_cfg": {"vision_cfg": vision}})
  (folder / openclip.CONFIG).write_text(text)
  return folder


@pytest.mark.parametrize(
  "options, stated",
  [
    (dict(num_heads=4), dict(head_width=8)),
    (dict(ln_eps=1e-3), dict(norm_kwargs={"eps": 1e-3})),
    (dict(gelu="tanh"), dict(act_kwargs={"approximate": "tanh"})),
    (dict(pool="gap"), dict(pool_type="avg")),
    (
      dict(pool="gap", final_norm="pooled"),
      dict(pool_type="avg", final_ln_after_pool=True),
    ),
    (dict(), dict(final_ln_after_pool=True)),  # the norm of one token
    (dict(pre_norm=False), dict(no_ln_pre=True)),
  ],
)
def test_what_a_config_of_openclip_states(tmp_path, options, stated):
  model = model_config(**TINY | CLIP | options)
  params = random_params(model, 0, SIZE)
  clip = model_config(**TINY | CLIP)
  ours = {n.replace("pooled_", "Transformer/encoder_"): n for n in params}
  arrays = openclip.write({n: params[ours[n]] for n in ours}, clip)
  folder = _write(tmp_path, arrays, **{"head_width": 16} | stated)
  vit = vit_jax.load(folder, verbose=False, mean="half")
  assert vit.config == model
  assert ": CLIP's are assumed, decode" in " ".join(vit.report.notes)
  for name, array in flatten_dict(vit.params, sep="/").items():
    np.testing.assert_array_equal(array, params[name], name)


@pytest.mark.parametrize(
  "stated, error",
  [
    (dict(pool_type="none"), "pool_type: got 'none', expected 'tok' or 'avg'"),
    (dict(global_average_pool=True), "global_average_pool: got True, expected"),
    (dict(act_kwargs={"approximate": "x"}), "act_kwargs.approximate: got 'x'"),
    (dict(head_width=5), "head_width: got 5, expected a divisor of the width"),
    (dict(no_ln_pre=True), "no_ln_pre: got True, expected False, which"),
    (dict(norm_kwargs={"eps": "x"}), "norm_kwargs.eps: got 'x', expected a"),
  ],
)
def test_a_tower_of_openclip_s_that_is_refused(tmp_path, stated, error):
  model = model_config(**TINY | CLIP)
  arrays = openclip.write(random_params(model, 0, SIZE), model)
  folder = _write(tmp_path, arrays, **{"head_width": 16} | stated)
  assert f"{openclip.CONFIG}: model_cfg.vision_cfg.{error}" in message(folder)


@pytest.mark.parametrize("head_width", [5, 16])
def test_heads_that_the_user_states_come_first(tmp_path, head_width):
  model = model_config(**TINY | CLIP)
  arrays = openclip.write(random_params(model, 0, SIZE), model)
  folder = _write(tmp_path, arrays, head_width=head_width)
  options = {"num_heads": 4}
  files = [folder / "x.safetensors", folder / "ours.safetensors"]
  safetensors_file.write(files[1], arrays, {"vit_jax": {"model": TINY | CLIP}})
  for file in files:
    read = weights.read(file, options=options, mean="half")
    kernels = [a for n, a in read.params.items() if n.endswith("query/kernel")]
    assert [kernel.shape for kernel in kernels] == [(32, 4, 8)] * 2
    assert weights.identify(read.params, read.options).size.num_heads == 4


@pytest.mark.parametrize("writer", [openclip, timm])
@pytest.mark.parametrize(
  "ours, error",
  [
    ([1], "vit_jax in its header: got [1], expected options by name."),
    ({"model": {"name": "bit", "variant": "R50x1"}}, "Pass num_heads."),
  ],
)
def test_wrong_metadata_in_a_header(tmp_path, writer, ours, error):
  model = model_config(**TINY | CLIP)
  arrays = writer.write(random_params(model, 0, SIZE), model)
  path = tmp_path / "x.safetensors"
  safetensors_file.write(path, arrays, {"vit_jax": ours})
  assert error in message(path)


def test_a_norm_that_a_tower_lacks(tmp_path):
  model = model_config(**TINY | CLIP)
  arrays = openclip.write(random_params(model, 0, SIZE), model)
  arrays = {n: a for n, a in arrays.items() if "ln_pre" not in n}
  text = message(_write(tmp_path, arrays, head_width=16))
  assert "no_ln_pre: got False, expected True" in text


def test_another_epsilon_is_said(tmp_path):
  path = tmp_path / "x.safetensors"
  options = TINY | CLIP
  arrays = openclip.write(
    random_params(model_config(**options), 0, SIZE), model_config(**options)
  )
  safetensors_file.write(path, arrays, {})
  notes = [
    convert.convert(
      vit_jax.load(path, num_heads=2, ln_eps=eps, verbose=False),
      str(tmp_path / f"{eps}.safetensors"),
      "openclip",
    )
    for eps in (1e-5, 1e-6)
  ]
  *same, note = notes[1]
  assert same == notes[0] and note.startswith("config.model.ln_eps=1e-06 here")


def test_the_images_of_clip(tmp_path):
  model = model_config(**TINY | CLIP)
  arrays = openclip.write(random_params(model, 0, SIZE), model)
  safetensors_file.write(tmp_path / "x.safetensors", arrays, {})

  def read(**images):
    about = {"mean": [0.5] * 3, "std": [0.25] * 3, "size": 16} | images
    text = json.dumps({"preprocess_cfg": about})
    (tmp_path / openclip.CONFIG).write_text(text)
    return weights.read(tmp_path, options={"num_heads": 2})

  assert read().image_size == read(size=[16, 16]).image_size == (16, 16)
  notes = lambda **images: " ".join(read(**images).notes)
  assert "resized otherwise" not in notes() + notes(resize_mode="squash")
  assert "got resize_mode='longest'" in notes(resize_mode="longest")
  assert "interpolation='nearest', which" in notes(interpolation="nearest")
  assert read(size=None).image_size == (16, 16)  # by the table
  assert read(size=None).pixels == ((0.5,) * 3, (0.25,) * 3)
  assert read(size=None, std=None).pixels.std == publishers.CLIP.std
  for size, error in (("big", "size: got 'big'"), ([9, 9, 9], "side or two")):
    with pytest.raises(ValueError, match=error):
      read(size=size)


def test_the_size_of_the_tower_comes_first(tmp_path):
  model = model_config(**TINY | CLIP)
  arrays = openclip.write(random_params(model, 0, (16, 24)), model)
  folder = _write(tmp_path, arrays)
  about = {
    "model_cfg": {"vision_cfg": {"head_width": 16, "image_size": [16, 24]}},
    "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3, "size": 32},
  }
  (folder / openclip.CONFIG).write_text(json.dumps(about))
  vit = vit_jax.load(folder, verbose=False)
  assert (vit.image_size, vit.report.resized) == ((16, 24), {})
  assert "deviation [0.25, 0.25, 0.25]; this is now" in vit.report.notes[-1]


def test_positions_that_a_tower_lacks(tmp_path):
  model = model_config(**TINY | CLIP)
  arrays = openclip.write(random_params(model, 0, SIZE), model)
  del arrays["visual.positional_embedding"]
  folder = _write(tmp_path, arrays, head_width=16)
  assert "pos_embedding: missing, expected a position" in message(folder)
  vit = vit_jax.load(folder, posemb="none", mean="half", verbose=False)
  assert (vit.config.posemb, vit.config.rope) == ("none", None)


def _trunk(folder, **vision):
  """Writes a tower of timm's, and a config of OpenCLIP's."""
  model = model_config(**TINY | dict(name="vit"))
  arrays = timm.write(random_params(model, 0, SIZE), model)
  arrays = {openclip.TRUNK + name: a for name, a in arrays.items()}
  safetensors_file.write(folder / "x.safetensors", arrays, {})
  about = {
    "model_cfg": {"vision_cfg": {"timm_model_name": "a_vit"} | vision},
    "preprocess_cfg": {"std": [0.25] * 3, "resize_mode": "squash"},
  }
  (folder / openclip.CONFIG).write_text(json.dumps(about))
  return folder


def test_a_tower_of_timm_s_in_a_file_of_openclip_s(tmp_path):
  def load(**vision):
    return vit_jax.load(_trunk(tmp_path, **vision), num_heads=2, verbose=False)

  vit = load(timm_pool="token", image_size=16)
  assert (vit.config.pool, vit.config.gelu) == ("token", "erf")
  assert vit.ops == "decode(dct='accurate')|resize_torch(16)"
  text = " ".join(vit.report.notes)
  assert "mean [0.48145466, 0.4578275, 0.40821073] and deviation [0.25" in text
  assert "only arrays" not in text
  vit = load(timm_model_name="vit_base_patch32_siglip_256")
  assert (vit.config.pool, vit.config.gelu) == ("gap", "tanh")
  assert vit.image_size == (16, 16)


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("layer", ["head.proj", "head.mlp.fc1"])
def test_layers_after_a_tower_of_timm_s_are_refused(tmp_path, wrapper, layer):
  file = _trunk(tmp_path) / "x.safetensors"
  arrays = {
    k: np.asarray(a)
    for k, a in safetensors_file.open_safetensors(file)[0].items()
  }
  arrays[f"visual.{layer}.weight"] = np.ones((8, 32), "f")
  arrays["logit_scale"] = np.ones((), "f")
  arrays = {wrapper + name: a for name, a in arrays.items()}
  safetensors_file.write(file, arrays, {})
  text = message(tmp_path, num_heads=2)
  assert f"got '{wrapper}visual.{layer}.weight', layers of OpenCLIP" in text


@pytest.mark.parametrize(
  "stated, error",
  [
    (dict(timm_pool="tok"), "timm_pool: got 'tok', expected 'token' or 'avg'"),
    (
      dict(timm_model_kwargs={"a": 1}),
      "timm_model_kwargs.a: got 1, a key that",
    ),
    (
      dict(timm_model_kwargs={"depth": 3}),
      "timm_model_kwargs.depth: got 3, expected 2",
    ),
    (dict(timm_model_name="vit_rope_x"), "got 'vit_rope_x', expected another"),
  ],
)
def test_a_tower_of_timm_s_that_is_refused(tmp_path, stated, error):
  text = message(_trunk(tmp_path, **stated), num_heads=2)
  assert f"{openclip.CONFIG}: {error}" in text
