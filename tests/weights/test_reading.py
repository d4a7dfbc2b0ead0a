"""Every format is recognised by its content, and what files state is read."""

import json

import numpy as np
import pytest
from weight_files import (
  DATA,
  MODEL,
  TOWER,
  WEIGHTS,
  assert_same,
  hf_folder,
  message,
  nested,
  openclip_folder,
  orbax,
  our_params,
  save,
  timm_file,
  trunk_folder,
)

from vit_jax import class_names, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import model_config, to_dict
from vit_jax.weights import safetensors_file, source_file
from vit_jax.zoo.files import openclip, publishers

PILLOW = "decode(dct='accurate')|"  # what follows is Pillow's, too
HEADS = {"num_heads": 4}


def model_of(read):
  return weights.identify(read.params, read.options)


# Google's.


def test_google():
  path = DATA / "vit_token_prelogits.weights.npz"
  result = weights.read(path)
  stated = result.path, result.format, result.options
  assert stated == (str(path), "google", {})
  stated = result.grid, result.image_size, result.ops, result.class_names
  assert not any(stated) and result.notes == () and result.has_cls_row
  result = weights.read(DATA / "bv_gap_sincos2d_rep.weights.npz", grid=(2, 8))
  assert result.grid == (2, 8) and not result.has_cls_row
  path = DATA / "bv_token.weights.npz"
  result = weights.read(path)
  assert result.options == {"cls_row": False} and not result.has_cls_row
  # The caller knows better.
  assert weights.read(path, options={"cls_row": True}).has_cls_row


def test_nothing_is_read_before_it_is_used(monkeypatch):
  reads = []
  read = np.lib.format.read_array
  monkeypatch.setattr(
    np.lib.format,
    "read_array",
    lambda *args, **kw: reads.append(1) or read(*args, **kw),
  )
  result = weights.read(DATA / "vit_linen_names.weights.npz")
  model_of(result)
  assert not reads
  source_file.of_weights(result, None)
  assert len(reads) == len(result.params)  # each once


@pytest.mark.parametrize(
  "raw, average",
  [("params/", "ema/"), ("params/params/", "ema_params/params/")],
)
def test_an_average_beside_the_parameters_is_taken(tmp_path, raw, average):
  own, path = our_params(), tmp_path / "x.npz"
  arrays = {raw + name: a + 1 for name, a in own.items()}
  # optax's average of gradients
  arrays |= {f"opt_state/ema/{name}": a - 1 for name, a in own.items()}
  np.savez(path, **arrays)
  assert_same(weights.read(path), {name: a + 1 for name, a in own.items()})
  np.savez(path, **arrays, **{average + name: a for name, a in own.items()})
  result = weights.read(path)
  assert_same(result, own)
  assert repr(average.split("/")[0]) in result.notes[0]


def test_widths_that_have_names(tmp_path):
  """Google's files of ImageNet-21k were trained with a sigmoid."""

  def read(num_classes, bias):
    kernel = np.zeros((48, num_classes), "f")
    bias = np.full(num_classes, bias, "f")
    path = save(tmp_path / "x.npz", head__kernel=kernel, head__bias=bias)
    return weights.read(path)

  for num_classes, loss in ((1000, None), (21_843, "sigmoid")):
    result = read(num_classes, -10.0)
    assert result.class_names == class_names.known(num_classes)
    assert result.loss == loss
    assert result.notes == (class_names.describe(num_classes),)
  # The head of those without AugReg is all zeros: none.
  result = read(21_843, 0.0)
  assert not any(name.startswith("head/") for name in result.params)
  assert result.class_names is None and "zeros" in result.notes[0]


# timm's config.json.


def test_timm(tmp_path):
  result = weights.read(timm_file(tmp_path), options=HEADS)
  assert_same(result, our_params())
  assert result.format == "timm" and result.has_cls_row
  assert result.options == {"gelu": "erf", "ln_eps": 1e-6, **HEADS}
  assert result.image_size is None and result.ops is None
  config = {
    "model_args": {"img_size": [16, 64]},
    "pretrained_cfg": {"input_size": [3, 224, 224]},
  }
  result = weights.read(timm_file(tmp_path, config), options=HEADS)
  assert (result.image_size, result.grid) == ((16, 64), (2, 8))


HALF = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 32, 32]}
CROP = "resize_small_torch(32)|central_crop_torch(32)"


@pytest.mark.parametrize(
  "about, ops, is_noted",
  [
    (
      {"interpolation": "bicubic", "crop_pct": 0.9},
      "resize_small_torch(35)|central_crop_torch(32)",
      False,
    ),
    (  # a share of 1 keeps the aspect ratio as well
      {"interpolation": "bilinear", "crop_pct": 1.0},
      "resize_small_torch(32, 'bilinear')|central_crop_torch(32)",
      False,
    ),
    (  # the centre of the squashed image
      {"crop_pct": 0.9, "crop_mode": "squash", "input_size": [3, 32, 64]},
      "resize_torch((35, 71))|central_crop_torch((32, 64))",
      False,
    ),
    # What timm alone does to images is named.
    ({"crop_pct": 1.0, "crop_mode": "border"}, "resize_torch(32)", True),
    ({"crop_pct": 1.0, "interpolation": "lanczos"}, CROP, True),
  ],
)
def test_images_by_timm_s_config(tmp_path, about, ops, is_noted):
  config = {"label_names": list("abcdefghijk"), "pretrained_cfg": HALF | about}
  timm_file(tmp_path, config)
  for path in (tmp_path / WEIGHTS, tmp_path):  # the file, or its folder
    result = weights.read(path, options=HEADS)
    assert [3, *result.image_size] == (HALF | about)["input_size"]
    assert result.class_names == tuple("abcdefghijk")
    assert result.ops == PILLOW + ops
    assert len(result.notes) == is_noted
    for key, value in about.items() if is_noted else ():
      assert f"{key}={value!r}" in result.notes[0]
    if not is_noted:
      share = None if "crop_mode" in about else about["crop_pct"]
      assert result.crop_share == share


SIGLIP = "vit_so400m_patch16_siglip_gap_384.v2_webli"


@pytest.mark.parametrize(
  "architecture, args, given, gelu, num_heads",
  [
    ("", {"num_heads": 6}, HEADS, "erf", 4),
    ("vit_base_patch16_gap_224", {}, {}, "erf", 16),
    (SIGLIP, {"num_heads": 6, "act_layer": None}, {}, "tanh", 6),
    (SIGLIP, {"num_heads": 6, "act_layer": "gelu"}, {}, "erf", 6),
    # What is stated of the model that it is.
    ("", HEADS | {"depth": 2, "qk_norm": False, "reg_tokens": 0}, {}, "erf", 4),
    # Virchow's; its users take the class token from timm's tokens.
    ("vit", HEADS | {"global_pool": ""}, {}, "erf", 4),
  ],
)
def test_the_model_by_timm_s_config(
  tmp_path, architecture, args, given, gelu, num_heads
):
  config = {"architecture": architecture, "model_args": args}
  model = model_of(weights.read(timm_file(tmp_path, config), options=given))
  assert (model.size.num_heads, model.gelu) == (num_heads, gelu)
  assert model.pool == "token"


@pytest.mark.parametrize("library", ["timm", "hf"])
@pytest.mark.parametrize(
  "problem, outputs, loss",
  [
    (None, 3, None),
    ("single_label_classification", 3, "softmax"),
    ("multi_label_classification", 1, "sigmoid"),
    ("regression", 3, "regression"),
  ],
)
def test_a_head_is_read_as_it_was_trained(
  tmp_path, library, problem, outputs, loss
):
  """transformers' class TimmWrapper writes the problem, too."""
  names = [f"LABEL_{i}" for i in range(outputs)]  # which are none
  if library == "timm":
    config = {"problem_type": problem, "label_names": names, **HALF}
    timm_file(tmp_path, config, num_classes=outputs)
  else:
    hf_folder(tmp_path, num_classes=outputs, problem_type=problem)
  read = weights.read(tmp_path, options=HEADS)
  assert (read.loss, read.class_names) == (loss, None)
  is_said = any("regression" in note for note in read.notes)
  assert is_said == (loss == "regression")


# transformers' config.json.


def test_hugging_face(tmp_path):
  folder = hf_folder(tmp_path / "m", hidden_act="gelu", layer_norm_eps=1e-12)
  result = weights.read(folder)
  assert_same(result, our_params((32, 48)))
  assert result.format == "hf" and result.has_cls_row
  assert result.options == {"gelu": "erf", "ln_eps": 1e-12}
  assert (result.grid, result.image_size) == ((4, 6), (32, 48))
  assert result.ops == PILLOW + "resize_torch((32, 48), 'bilinear')"
  assert result.class_names is None  # LABEL_0 is no name
  file = weights.read(folder / WEIGHTS)
  assert file.grid == (4, 6) and file.ops == result.ops
  names = {str(i): f"n{i}" for i in range(11)}
  result = weights.read(hf_folder(folder, id2label=names, model_type=None))
  assert result.class_names == tuple(names.values())
  # One output of transformers is a regression.
  hf_folder(folder, num_classes=1, problem_type=None)
  assert weights.read(folder).loss == "regression"


def test_a_model_in_parts(tmp_path):
  folder = hf_folder(tmp_path / "m")
  file = folder / WEIGHTS
  arrays, _ = safetensors_file.open_safetensors(file)
  parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
  of = {name: parts[i % 2] for i, name in enumerate(arrays)}
  for part in parts:
    own = {n: np.asarray(a) for n, a in arrays.items() if of[n] == part}
    safetensors_file.write(folder / part, own, {})
  file.rename(tmp_path / "whole.safetensors")
  index = folder / safetensors_file.INDEX
  index.write_text(json.dumps({"metadata": {}, "weight_map": of}))
  for path in (folder, index):
    assert_same(weights.read(path), our_params((32, 48)))
  (folder / parts[1]).unlink()
  assert parts[1] in message(folder)
  out = {"weight_map": {"a": "../whole.safetensors"}}
  for text, words in (
    ("{", safetensors_file.INDEX),
    ('{"weight_map": [1]}', safetensors_file.INDEX),
    (json.dumps(out), "expected a file in that folder"),
  ):
    index.write_text(text)
    assert words in message(folder)


def test_what_pre_training_needs_is_listed(tmp_path):
  changes = {n: np.ones(3, "f") for n in ("mask_token", "decoder_embed.bias")}
  path = timm_file(tmp_path, changes=changes)
  note, *_ = weights.read(path, options=HEADS).notes
  assert all(name in note for name in changes)


def test_images_are_multiples_of_the_patch(tmp_path):
  """So400m/14 has 27 x 27 positions for images of 384 pixels."""
  folder = hf_folder(tmp_path, (32, 32), about={}, image_size=37)
  read = weights.read(folder, mean="half")
  assert read.image_size == (32, 32) and read.grid == (4, 4)
  (note,) = read.notes
  assert "[37, 37]" in note and "[32, 32]" in note


# open_clip_config.json.


@pytest.mark.parametrize("gelu", ["erf", "quick"])
def test_the_tower_of_clip(tmp_path, gelu):
  texts = ("transformer.resblocks.0.ln_1.bias", "positional_embedding")
  more = {name: np.ones((2, 2), "f") for name in texts}
  folder = openclip_folder(tmp_path, changes=more)
  about = {"model_cfg": {"quick_gelu": gelu == "quick"}}
  (folder / openclip.CONFIG).write_text(json.dumps(about))
  read = weights.read(folder, options=HEADS, mean="half")
  assert_same(read, our_params(num_classes=0, model=TOWER))
  assert read.options["gelu"] == gelu
  assert all(name in " ".join(read.notes) for name in texts)
  (folder / openclip.CONFIG).unlink()
  bare = weights.read(folder / "x.safetensors", options=HEADS, mean="half")
  assert bare.options["gelu"] == "erf" and "gelu='erf'" in str(bare.notes)


@pytest.mark.parametrize(
  "options, stated",
  [
    (dict(num_heads=8), dict(head_width=6)),
    (dict(ln_eps=1e-3), dict(norm_kwargs={"eps": 1e-3})),
    (dict(gelu="tanh"), dict(act_kwargs={"approximate": "tanh"})),
    (dict(pool="gap"), dict(pool_type="avg")),
    (
      dict(pool="gap", final_norm="pooled"),
      dict(pool_type="avg", final_ln_after_pool=True),
    ),
    (dict(), dict(final_ln_after_pool=True)),  # the norm of one token
  ],
)
def test_what_a_config_of_openclip_states(tmp_path, options, stated):
  model = model_config(**to_dict(TOWER) | options)
  read = weights.read(openclip_folder(tmp_path, stated), mean="half")
  assert model_of(read) == model
  assert ("pooled_norm/scale" in read.params) == ("pooled" in str(options))
  assert "CLIP's are assumed" in " ".join(read.notes)
  # The user knows better.
  read = weights.read(tmp_path, options={"num_heads": 3}, mean="half")
  assert model_of(read).size.num_heads == 3


@pytest.mark.parametrize(
  "vision, images, size, noted",
  [
    ({}, {"size": [32, 32], "resize_mode": "squash"}, (32, 32), None),
    ({}, {"size": None}, (32, 32), None),  # by the table
    ({"image_size": [16, 64]}, {"size": 32}, (16, 64), None),  # the tower's
    ({}, {"resize_mode": "longest"}, (32, 32), "resize_mode='longest'"),
    ({}, {"interpolation": "nearest"}, (32, 32), "interpolation='nearest'"),
  ],
)
def test_the_images_of_clip(tmp_path, vision, images, size, noted):
  about = {"mean": [0.5] * 3, "std": [0.25] * 3, **images}
  read = weights.read(openclip_folder(tmp_path, vision, preprocess_cfg=about))
  assert read.image_size == size
  assert read.pixels == ((0.5,) * 3, (0.25,) * 3)
  notes = " ".join(read.notes)
  assert ("resized otherwise" in notes) == (noted is not None)
  assert (noted or "") in notes


def test_a_tower_of_timm_s_in_a_file_of_openclip_s(tmp_path):
  for vision, pool, gelu in (
    ({"timm_pool": "token"}, "token", "erf"),
    ({"timm_model_name": "vit_base_patch32_siglip_256"}, "gap", "tanh"),
  ):
    read = weights.read(trunk_folder(tmp_path, vision), options=HEADS)
    model = model_of(read)
    assert (model.pool, model.gelu) == (pool, gelu)
    assert read.pixels == (publishers.CLIP.mean, (0.25,) * 3)
    assert "only arrays" not in " ".join(read.notes)


# Checkpoints, ours and others'.


def test_a_run(tmp_path):
  params = nested(our_params((16, 32)))
  metadata = {
    "config": {"model": to_dict(MODEL), "seed": 3},  # as train.py writes it
    "grid": [2, 4],
    "image_size": [16, 32],
    "class_names": list("abcdefghijk"),
    "preprocessing": {"ops": "decode|resize((16, 32))"},
  }
  for step in (5, 7):
    path = str(tmp_path / "checkpoints" / str(step))
    checkpointer.write_params(path, params, metadata | {"step": step})
  result = weights.read(tmp_path)
  assert_same(result, our_params((16, 32)))
  assert result.format == "checkpoint" and result.metadata["step"] == 7
  assert (result.grid, result.image_size) == ((2, 4), (16, 32))
  assert result.class_names == tuple("abcdefghijk")
  assert result.ops == "decode|resize((16, 32))"
  assert model_of(result) == MODEL
  # Also by the path of its arrays.
  inside = weights.read(tmp_path / "checkpoints/7/params")
  assert_same(inside, our_params((16, 32)))


def test_a_checkpoint_has_no_names_but_its_own(tmp_path):
  """A head of 1000 is not always ImageNet's; a run knows its data."""
  params = nested(our_params(num_classes=1000))
  metadata = {"model": to_dict(MODEL), "class_names": None}
  checkpointer.write_params(str(tmp_path / "x"), params, metadata)
  result = weights.read(tmp_path / "x")
  assert result.class_names is None and result.notes == ()


@pytest.mark.parametrize("steps", [("5/default", "10/state"), ("10/model",)])
def test_checkpoints_of_another_program(tmp_path, steps, capsys):
  """As orbax's CheckpointManager writes them: an item or several in a step."""
  for step in steps:
    orbax(tmp_path / step, {"params": nested(our_params())})
  inner = tmp_path / steps[-1]
  assert str(inner) in message(tmp_path)
  if inner.name == "state":
    assert_same(weights.read(inner.parent), our_params())
  else:
    assert str(inner) in message(inner.parent)
  assert_same(weights.read(inner), our_params())
  assert "damaged" not in capsys.readouterr().err
