"""Every format is recognised by its content; broken files are refused."""

import json

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict
from weight_files import (
  DATA,
  MODEL,
  assert_same,
  hf_folder,
  message,
  nested,
  orbax,
  our_params,
  save,
)

import vit_jax
from vit_jax import class_names, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import model_config, to_dict
from vit_jax.weights import safetensors_file, timm

PILLOW = "decode(dct='accurate')|"  # what follows is Pillow's, too


# What is read.


def test_google():
  path = DATA / "vit_token_prelogits.weights.npz"
  found = weights.read(path)
  assert (found.path, found.format, found.options) == (str(path), "google", {})
  assert found.grid is None and found.image_size is None and found.ops is None
  assert found.class_names is None and found.notes == ()
  assert found.has_cls_row
  found = weights.read(DATA / "bv_gap_sincos2d_rep.weights.npz", grid=(2, 8))
  assert found.grid == (2, 8) and not found.has_cls_row
  found = weights.read(DATA / "bv_token.weights.npz")
  assert found.options == {"cls_row": False} and not found.has_cls_row
  # The caller knows better.
  found = weights.read(DATA / "bv_token.weights.npz", options={"cls_row": True})
  assert found.has_cls_row


def test_nothing_is_read_before_it_is_looked_at(monkeypatch):
  looked = []
  read = np.lib.format.read_array
  monkeypatch.setattr(
    np.lib.format,
    "read_array",
    lambda *args, **kw: looked.append(1) or read(*args, **kw),
  )
  found = weights.read(DATA / "vit_linen_names.weights.npz")
  weights.identify(found.params, found.options)
  assert not looked
  found = vit_jax.load(DATA / "vit_linen_names.weights.npz")
  assert len(looked) == len(found.report.loaded)  # each once


@pytest.mark.parametrize(
  "num_classes, loss, sentence",
  [(1000, None, "ImageNet-1k"), (21_843, "sigmoid", "Google's ImageNet-21k")],
)
def test_a_width_that_has_names(tmp_path, num_classes, loss, sentence):
  path = save(
    tmp_path / "x.npz",
    head__kernel=np.zeros((48, num_classes), "f"),
    head__bias=np.zeros(num_classes, "f"),
  )
  found = weights.read(path)
  assert found.class_names == class_names.known(num_classes)
  # Google's files of ImageNet-21k were trained with a sigmoid.
  assert found.loss == loss
  (note,) = found.notes
  assert note == class_names.describe(num_classes) and sentence in note


def _timm(path, about=None, metadata=None, params=None):
  arrays = timm.write(params or our_params(), MODEL)
  safetensors_file.write(path, arrays, metadata or {})
  if about is not None:
    (path.parent / "config.json").write_text(json.dumps(about))
  return path


HALF = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 32, 32]}


def test_timm(tmp_path):
  path = _timm(tmp_path / "model.safetensors")
  found = weights.read(path, options={"num_heads": 4})
  assert_same(found, our_params())
  assert found.format == "timm" and found.has_cls_row
  assert found.options == {"gelu": "erf", "ln_eps": 1e-6, "num_heads": 4}
  assert found.image_size is None and found.ops is None
  assert "State it: num_heads." in message(path)


@pytest.mark.parametrize(
  "about, ops",
  [
    (
      {"interpolation": "bicubic", "crop_pct": 0.9},
      "decode(dct='accurate')|resize_small_torch(35)|central_crop_torch(32)",
    ),
    (  # a share of 1 keeps the aspect ratio as well
      {"interpolation": "bilinear", "crop_pct": 1.0},
      "decode(dct='accurate')|resize_small_torch(32, 'bilinear')"
      "|central_crop_torch(32)",
    ),
    (
      {"crop_pct": 1.0, "crop_mode": "squash"},
      "decode(dct='accurate')|resize_torch(32)",
    ),
    (  # the centre of the squashed image
      {"crop_pct": 0.9, "crop_mode": "squash"},
      "decode(dct='accurate')|resize_torch(35)|central_crop_torch(32)",
    ),
    (
      {"crop_pct": 0.9, "crop_mode": "squash", "input_size": [3, 32, 64]},
      "decode(dct='accurate')|resize_torch((35, 71))"
      "|central_crop_torch((32, 64))",
    ),
  ],
)
def test_timm_s_config(tmp_path, about, ops):
  config = {"label_names": list("abcdefghijk"), "pretrained_cfg": HALF | about}
  _timm(tmp_path / "model.safetensors", config)
  # The file, or its folder.
  for path in (tmp_path / "model.safetensors", tmp_path):
    found = weights.read(path, options={"num_heads": 4})
    assert found.image_size == tuple((HALF | about)["input_size"][1:])
    assert found.class_names == tuple("abcdefghijk")
    assert found.ops == ops and found.notes == ()
    share = None if "crop_mode" in about else about["crop_pct"]
    assert found.crop_share == share


@pytest.mark.parametrize(
  "about, ops",
  [
    ({"input_size": [3, 32, 64]}, "resize_torch((32, 64))"),
    ({"crop_pct": 1.0, "crop_mode": "border"}, "resize_torch(32)"),
    ({"crop_pct": 1.2}, "resize_small_torch(32)|central_crop_torch(32)"),
    (
      {"crop_pct": 1.0, "interpolation": "lanczos"},
      "resize_small_torch(32)|central_crop_torch(32)",
    ),
  ],
)
def test_what_timm_alone_does_to_images_is_named(tmp_path, about, ops):
  _timm(tmp_path / "model.safetensors", {"pretrained_cfg": HALF | about})
  found = weights.read(tmp_path, options={"num_heads": 4})
  assert found.ops == f"decode(dct='accurate')|{ops}"
  (note,) = found.notes
  assert all(f"{key}={value!r}" in note for key, value in about.items())


@pytest.mark.parametrize(
  "config, given, gelu, num_heads",
  [
    ({"architecture": "vit_tiny_patch16_224"}, {"num_heads": 4}, "erf", 4),
    ({"model_args": {"num_heads": 6}}, {}, "erf", 6),
    ({"model_args": {"num_heads": 6}}, {"num_heads": 4}, "erf", 4),
    ({"architecture": "vit_base_patch16_gap_224"}, {}, "erf", 16),
    (
      {
        "architecture": "vit_so400m_patch16_siglip_gap_384.v2_webli",
        "model_args": {"num_heads": 6, "act_layer": None},
      },
      {},
      "tanh",
      6,
    ),
    (
      {
        "architecture": "vit_base_patch32_siglip_256",
        "model_args": {"num_heads": 6, "act_layer": "gelu"},
      },
      {"gelu": "tanh"},
      "tanh",
      6,
    ),
    (
      {"model_args": {"num_heads": 6, "act_layer": "gelu_tanh"}},
      {},
      "tanh",
      6,
    ),
  ],
)
def test_timm_s_config_of_the_model(tmp_path, config, given, gelu, num_heads):
  path = _timm(tmp_path / "model.safetensors", config)
  found = weights.read(path, options=given)
  query = "encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
  assert found.params[f"Transformer/{query}"].shape[1] == num_heads
  assert found.options["gelu"] == gelu


def test_timm_s_activations_are_gelus(tmp_path):
  args = {"num_heads": 4, "act_layer": "quick_gelu"}
  path = _timm(tmp_path / "model.safetensors", {"model_args": args})
  assert message(path) == (
    f"{path}: weights of timm: config.json: model_args.act_layer: got"
    " 'quick_gelu', expected gelu or gelu_tanh: no other activation is here."
    " Take other weights."
  )
  # Our own header says what the arrays are.
  metadata = {"vit_jax": {"model": to_dict(MODEL), "image_size": [32, 32]}}
  path = _timm(path, {"model_args": args}, metadata)
  assert weights.read(path).options["gelu"] == MODEL.gelu


@pytest.mark.parametrize(
  "config, key, got, expected",
  [
    ({"global_pool": "avg"}, "global_pool", "avg", "'token'"),
    (
      {"model_args": {"global_pool": "avg", "fc_norm": False}},
      "model_args.global_pool",
      "avg",
      "'token'",
    ),
    (
      {"model_args": {"pos_embed": "none"}},
      "model_args.pos_embed",
      "none",
      "'learn'",
    ),
  ],
)
def test_timm_s_config_of_another_model(tmp_path, config, key, got, expected):
  config = {"architecture": "vit_base_patch16_gap_224"} | config
  path = _timm(tmp_path / "model.safetensors", config)
  assert message(path) == (
    f"{path}: config.json: {key}: got {got!r}, expected {expected}, which is"
    " what a model of these arrays computes here. Take other weights, or"
    " correct config.json."
  )


@pytest.mark.parametrize(
  "config, size, grid",
  [
    ({"input_size": [3, 16, 64]}, (16, 64), (2, 8)),
    ({"model_args": {"img_size": [64, 16]}}, (64, 16), (8, 2)),
    ({"model_args": {"img_size": 32}}, (32, 32), None),
    (
      {
        "model_args": {"img_size": [16, 64]},
        "pretrained_cfg": {"input_size": [3, 224, 224]},
      },
      (16, 64),
      (2, 8),
    ),
  ],
)
def test_timm_s_config_tells_the_grid(tmp_path, config, size, grid):
  path = _timm(tmp_path / "model.safetensors", config)
  found = weights.read(path, options={"num_heads": 4})
  assert (found.image_size, found.grid) == (size, grid)
  vit = vit_jax.load(path, num_heads=4, verbose=False)
  assert vit.image_size == size and not vit.report.resized


def test_timm_s_config_of_a_size_that_is_none(tmp_path):
  config = {"model_args": {"num_heads": 4, "img_size": [16, 64, 3]}}
  path = _timm(tmp_path / "model.safetensors", config)
  assert "config.json: model_args.img_size: got" in message(path)


def test_timm_s_config_of_unknown_arguments(tmp_path):
  args = {"num_heads": 4, "attn_layer": "diff", "img_size": 32, "norm": None}
  path = _timm(tmp_path / "model.safetensors", {"model_args": args})
  assert message(path) == (
    f"{path}: config.json: model_args.attn_layer: got 'diff', expected no such"
    " key: timm's model may compute otherwise by it. If its logits are the same"
    " without it, remove it from config.json."
  )


def test_names_of_another_number_are_left_out(tmp_path):
  config = {"label_names": ["cat", "ox"]}
  path = _timm(tmp_path / "model.safetensors", config)
  found = weights.read(path, options={"num_heads": 4})
  assert found.class_names is None
  assert found.notes == ("got 2 names for a head of 11 classes: left out.",)


@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16])
def test_another_normalisation_moves_into_the_patch_embedding(tmp_path, dtype):
  mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
  config = {"pretrained_cfg": {"mean": mean, "std": std}}
  own = {k: np.asarray(v, dtype) for k, v in our_params().items()}
  path = _timm(tmp_path / "x.safetensors", config, params=own)
  found = weights.read(path, options={"num_heads": 4})
  pixels = np.random.default_rng(0).uniform(0, 1, (8, 8, 3))

  def embed(x, params):
    kernel, bias = (
      np.asarray(params[f"embedding/{n}"], np.float64)
      for n in ("kernel", "bias")
    )
    return np.einsum("hwi,hwio->o", x, kernel) + bias

  # Sums of 192 products of about 1 / sqrt(192) times 2, rounded at 6e-8.
  np.testing.assert_allclose(
    embed(2 * pixels - 1, found.params),
    embed((pixels - mean) / std, own),
    atol=5e-6,
  )
  assert found.notes == (
    f"images were normalised with mean {mean} and deviation {std}; this is now"
    " part of the patch embedding, which gets images in [-1, 1].",
  )


def test_a_standardised_convolution_cannot_take_it(tmp_path):
  model = model_config(name="bit", variant="R26x0.5")
  params = foreign.random_params(model, 3, (32, 32))
  path = tmp_path / "model.safetensors"
  safetensors_file.write(path, timm.write(params, model), {})
  found = weights.read(path)
  assert_same(found, params)
  assert found.options["root_pad"] == "zero"
  config = {"mean": [0.4] * 3, "std": [0.5] * 3}
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert message(path) == (
    f"{path}: got images normalised with mean [0.4, 0.4, 0.4] and deviation"
    " [0.5, 0.5, 0.5], expected 0.5 and 0.5 for a model that does not begin"
    " with a patch embedding, kernel and bias."
  )


def test_hugging_face(tmp_path):
  folder = hf_folder(tmp_path / "m", hidden_act="gelu", layer_norm_eps=1e-12)
  found = weights.read(folder)
  assert_same(found, our_params((32, 48)))
  assert found.format == "hf" and found.has_cls_row
  assert found.options == {"gelu": "erf", "ln_eps": 1e-12}
  assert (found.grid, found.image_size) == ((4, 6), (32, 48))
  assert found.ops == PILLOW + "resize_torch((32, 48), 'bilinear')"
  assert found.class_names is None  # LABEL_0 is no name
  file = weights.read(folder / "model.safetensors")
  assert file.grid == (4, 6) and file.ops == found.ops


def test_hugging_face_in_several_files(tmp_path):
  folder = hf_folder(tmp_path / "m")
  whole = folder / "model.safetensors"
  arrays = {
    k: np.asarray(v)
    for k, v in safetensors_file.open_safetensors(whole)[0].items()
  }
  whole.unlink()
  files = {k: f"model-{i % 2}.safetensors" for i, k in enumerate(arrays)}
  for file in set(files.values()):
    part = {k: v for k, v in arrays.items() if files[k] == file}
    safetensors_file.write(folder / file, part, {})
  index = json.dumps({"weight_map": files})
  (folder / safetensors_file.INDEX).write_text(index)
  assert_same(weights.read(folder), our_params((32, 48)))


# Checkpoints, ours and others'.


@pytest.mark.parametrize(
  "inside", ["", "checkpoints", *("checkpoints/7", "checkpoints/7/params")]
)
def test_a_run(tmp_path, inside):
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
  found = weights.read(tmp_path / inside)
  assert_same(found, our_params((16, 32)))
  assert found.format == "checkpoint" and found.metadata["step"] == 7
  assert (found.grid, found.image_size) == ((2, 4), (16, 32))
  assert found.class_names == tuple("abcdefghijk")
  assert found.ops == "decode|resize((16, 32))"
  vit = vit_jax.load(tmp_path / inside)
  assert (vit.config, vit.image_size, vit.ops) == (MODEL, (16, 32), found.ops)


def test_paths_from_here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  checkpointer.write_params("run", nested(our_params()), {})
  orbax(tmp_path / "tree", nested(our_params()))
  save("x.npz")
  for path in ("run", "tree"):
    assert_same(weights.read(path), our_params())
  assert weights.read("x.npz").params.keys() == our_params().keys()


def test_a_checkpoint_has_no_names_but_its_own(tmp_path):
  """A head of 1000 is not always ImageNet's; a run knows its data."""
  params = nested(our_params(num_classes=1000))
  metadata = {"model": to_dict(MODEL), "class_names": None}
  checkpointer.write_params(str(tmp_path / "x"), params, metadata)
  found = weights.read(tmp_path / "x")
  assert found.class_names is None and found.notes == ()


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"params": x}])
def test_a_tree_of_another_program(tmp_path, wrap):
  path = orbax(tmp_path / "x", wrap(nested(our_params())))
  found = weights.read(path)
  assert_same(found, our_params())
  assert found.format == "checkpoint" and found.metadata == {}
  assert weights.identify(found.params, found.options) == MODEL


def test_a_tree_in_its_item_folder(tmp_path):
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler("default")) as writer:
    tree = ocp.args.StandardSave(nested(our_params()))
    writer.save(tmp_path / "x", ocp.args.Composite(default=tree))
  assert_same(weights.read(tmp_path / "x"), our_params())


def test_metadata_of_another_program(tmp_path):
  metadata = {"author": "me"}
  checkpointer.write_params(str(tmp_path / "x"), nested(our_params()), metadata)
  found = weights.read(tmp_path / "x")
  assert found.metadata == {} and found.options == {}
  assert_same(found, our_params())


def test_the_samples_are_a_whole_model():
  """What the tests above change must be right before."""
  vit = vit_jax.load(DATA / "vit_linen_names.weights.npz")
  assert vit.config == MODEL
  shapes = {k: v.shape for k, v in flatten_dict(vit.params, sep="/").items()}
  assert shapes == foreign.shapes(MODEL, 11, (32, 32))
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(vit.params))
