"""Every format is recognised by its content; broken files are refused."""

import json

import foreign
import jax.numpy as jnp
import numpy as np
import pytest
from weight_files import (
  DATA,
  MODEL,
  assert_same,
  hf_folder,
  message,
  nested,
  orbax,
  our_params,
  published,
  save,
)

import vit_jax
from vit_jax import class_names, weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import model_config, to_dict
from vit_jax.weights import safetensors_file
from vit_jax.zoo.files import timm

PILLOW = "decode(dct='accurate')|"  # what follows is Pillow's, too


# What is read.


def test_google():
  path = DATA / "vit_token_prelogits.weights.npz"
  result = weights.read(path)
  assert (result.path, result.format, result.options) == (
    str(path),
    "google",
    {},
  )
  assert (
    result.grid is None and result.image_size is None and result.ops is None
  )
  assert result.class_names is None and result.notes == ()
  assert result.has_cls_row
  result = weights.read(DATA / "bv_gap_sincos2d_rep.weights.npz", grid=(2, 8))
  assert result.grid == (2, 8) and not result.has_cls_row
  result = weights.read(DATA / "bv_token.weights.npz")
  assert result.options == {"cls_row": False} and not result.has_cls_row
  # The caller knows better.
  result = weights.read(
    DATA / "bv_token.weights.npz", options={"cls_row": True}
  )
  assert result.has_cls_row


def test_nothing_is_read_before_it_is_used(monkeypatch):
  reads = []
  read = np.lib.format.read_array
  monkeypatch.setattr(
    np.lib.format,
    "read_array",
    lambda *args, **kw: reads.append(1) or read(*args, **kw),
  )
  result = weights.read(DATA / "vit_linen_names.weights.npz")
  weights.identify(result.params, result.options)
  assert not reads
  result = vit_jax.load(DATA / "vit_linen_names.weights.npz")
  assert len(reads) == len(result.report.loaded)  # each once


@pytest.mark.parametrize(
  "raw, average",
  [
    ("params/", "ema/"),
    ("params/params/", "ema_params/params/"),
    ("params/", "state/params_ema/"),
  ],
)
@pytest.mark.parametrize("is_tree", [False, True])
def test_an_average_beside_the_parameters_is_taken(
  tmp_path, raw, average, is_tree
):
  own = our_params()
  arrays = {raw + name: a + 1 for name, a in own.items()}
  # optax's average of gradients
  arrays |= {f"opt_state/ema/{name}": a - 1 for name, a in own.items()}

  def read():
    if not is_tree:
      np.savez(path := tmp_path / f"{len(arrays)}.npz", **arrays)
    else:
      path = orbax(tmp_path / str(len(arrays)), nested(arrays))
    return weights.read(path)

  result = read()
  assert_same(result, {name: a + 1 for name, a in own.items()})
  assert "the arrays are those of" not in " ".join(result.notes)
  arrays |= {average + name: a for name, a in own.items()}
  result = read()
  assert_same(result, own)
  word = average.removesuffix("params/").strip("/")
  text = f"the arrays are those of {word!r} in the file, and not of '"
  assert text in result.notes[0] and raw.split("/")[0] in result.notes[0]


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
  result = weights.read(path)
  assert result.class_names == class_names.known(num_classes)
  # Google's files of ImageNet-21k were trained with a sigmoid.
  assert result.loss == loss
  (note,) = result.notes
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
  result = weights.read(path, options={"num_heads": 4})
  assert_same(result, our_params())
  assert result.format == "timm" and result.has_cls_row
  assert result.options == {"gelu": "erf", "ln_eps": 1e-6, "num_heads": 4}
  assert result.image_size is None and result.ops is None
  assert "Pass num_heads." in message(path)


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
    ({"crop_pct": 1.0, "crop_mode": "squash"}, "resize_torch(32)", False),
    (  # the centre of the squashed image
      {"crop_pct": 0.9, "crop_mode": "squash", "input_size": [3, 32, 64]},
      "resize_torch((35, 71))|central_crop_torch((32, 64))",
      False,
    ),
    # What timm alone does to images is named.
    ({"crop_pct": 1.0, "crop_mode": "border"}, "resize_torch(32)", True),
    ({"crop_pct": 1.2}, CROP, True),
    ({"crop_pct": 1.0, "interpolation": "lanczos"}, CROP, True),
  ],
)
def test_images_by_timm_s_config(tmp_path, about, ops, is_noted):
  config = {"label_names": list("abcdefghijk"), "pretrained_cfg": HALF | about}
  _timm(tmp_path / "model.safetensors", config)
  # The file, or its folder.
  for path in (tmp_path / "model.safetensors", tmp_path):
    result = weights.read(path, options={"num_heads": 4})
    assert result.image_size == tuple((HALF | about)["input_size"][1:])
    assert result.class_names == tuple("abcdefghijk")
    assert result.ops == f"decode(dct='accurate')|{ops}"
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
    ("", {"num_heads": 6}, {"num_heads": 4}, "erf", 4),
    ("vit_base_patch16_gap_224", {}, {}, "erf", 16),
    (SIGLIP, {"num_heads": 6, "act_layer": None}, {}, "tanh", 6),
    (SIGLIP, {"num_heads": 6, "act_layer": "gelu"}, {}, "erf", 6),
    ("", {"num_heads": 6, "act_layer": "gelu_tanh"}, {}, "tanh", 6),
  ],
)
def test_the_model_by_timm_s_config(
  tmp_path, architecture, args, given, gelu, num_heads
):
  config = {"architecture": architecture, "model_args": args}
  path = _timm(tmp_path / "model.safetensors", config)
  result = weights.read(path, options=given)
  query = "encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
  assert result.params[f"Transformer/{query}"].shape[1] == num_heads
  assert result.options["gelu"] == gelu


GAP = {"architecture": "vit_base_patch16_gap_224"}
PREFIX = {"pool_include_prefix": True}


@pytest.mark.parametrize(
  "args, top, error",
  [
    ({"act_layer": "silu"}, {}, "model_args.act_layer: got 'silu', expected"),
    ({}, GAP | {"global_pool": "avgmax"}, "global_pool: got 'avgmax', expect"),
    ({"use_rot_pos_emb": True}, {}, "model_args.use_rot_pos_emb: got True"),
    (PREFIX, {"global_pool": "avg"}, "model_args.pool_include_prefix: got Tr"),
    ({}, {"architecture": "vit_b_rpn_224.sw"}, "got 'vit_b_rpn_224.sw"),
    (
      {"attn_layer": "diff"},
      {},
      "model_args.attn_layer: got 'diff', a key",
    ),
    ({"depth": 3}, {}, "model_args.depth: got 3, expected 2"),
    ({"reg_tokens": 4}, {}, "model_args.reg_tokens: got 4, expected 0"),
    ({"num_reg_tokens": 1}, {}, "model_args.num_reg_tokens: got 1, expected 0"),
    ({"init_values": 1e-5}, {}, "model_args.init_values: got True, expected F"),
    ({"pre_norm": True}, {}, "model_args.pre_norm: got True, expected False"),
    ({"qk_norm": True}, {}, "model_args.qk_norm: got True, expected False"),
  ],
)
def test_timm_s_config_of_another_model(tmp_path, args, top, error):
  config = {"model_args": {"num_heads": 4} | args} | top
  path = _timm(tmp_path / "model.safetensors", config)
  assert message(path).startswith(f"{path}: ")
  assert f"config.json: {error}" in message(path)
  # Our own header states what the arrays are.
  metadata = {"vit_jax": {"model": to_dict(MODEL), "image_size": [32, 32]}}
  _timm(path, config, metadata)
  assert weights.read(path).options["gelu"] == MODEL.gelu


@pytest.mark.parametrize(
  "args",
  [
    {"depth": 2, "reg_tokens": 0, "qk_norm": False, "norm": None},
    {"reg_tokens": 0, "init_values": None, "class_token": True},
  ],
)
def test_timm_s_config_of_the_same_model(tmp_path, args):
  config = {"model_args": {"num_heads": 4} | args}
  path = _timm(tmp_path / "model.safetensors", config)
  assert_same(weights.read(path), our_params())


@pytest.mark.parametrize(
  "config, size, grid",
  [
    ({"input_size": [3, 16, 64]}, (16, 64), (2, 8)),
    ({"model_args": {"img_size": [16, 64]}}, (16, 64), (2, 8)),
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
def test_timm_s_config_states_the_grid(tmp_path, config, size, grid):
  path = _timm(tmp_path / "model.safetensors", config)
  result = weights.read(path, options={"num_heads": 4})
  assert (result.image_size, result.grid) == (size, grid)
  got = "input_size=[" if "input_size" in str(config) else "the defaults of in"
  assert f"config.json: got {got}" in result.notes[0]
  vit = vit_jax.load(path, num_heads=4, verbose=False)
  assert vit.image_size == size and not vit.report.resized


@pytest.mark.parametrize(
  "problem, loss",
  [
    (None, "softmax"),
    ("single_label_classification", "softmax"),
    ("multi_label_classification", "sigmoid"),
    ("regression", "regression"),
  ],
)
def test_a_model_of_timm_s_in_transformers(tmp_path, problem, loss):
  """Its class TimmWrapper writes the problem, and names that are none."""
  names = [f"LABEL_{i}" for i in range(11)]
  config = {"problem_type": problem, "label_names": names, **HALF}
  path = _timm(tmp_path / "model.safetensors", config)
  vit = vit_jax.load(path, num_heads=4, verbose=False)
  assert (vit.loss, vit.class_names) == (loss, None)
  text = "the head is a regression"
  assert (text in str(vit.report.notes)) == (loss == "regression")
  _timm(path, config | {"problem_type": "x"})
  assert "config.json: problem_type: got 'x', expected" in message(
    path, num_heads=4
  )


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
def test_another_normalisation_moves_into_the_patch_embedding(tmp_path, dtype):
  mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
  config = {"pretrained_cfg": {"mean": mean, "std": std}}
  own = {k: np.asarray(v, dtype) for k, v in our_params().items()}
  path = _timm(tmp_path / "x.safetensors", config, params=own)
  result = weights.read(path, options={"num_heads": 4})
  pixels = np.random.default_rng(0).uniform(0, 1, (8, 8, 3))

  def embed(x, params):
    kernel, bias = (
      np.asarray(params[f"embedding/{n}"], np.float64)
      for n in ("kernel", "bias")
    )
    return np.einsum("hwi,hwio->o", x, kernel) + bias

  # Sums of 192 products of about 1 / sqrt(192) times 2, rounded at 6e-8.
  np.testing.assert_allclose(
    embed(2 * pixels - 1, result.params),
    embed((pixels - mean) / std, own),
    atol=5e-6,
  )
  assert result.notes == (
    f"images were normalised with mean {mean} and deviation {std}; this is now"
    " part of the patch embedding.",
  )


def test_a_standardised_convolution_cannot_take_it(tmp_path):
  model = model_config(name="bit", variant="R26x0.5")
  params = foreign.random_params(model, 3, (32, 32))
  path = tmp_path / "model.safetensors"
  safetensors_file.write(path, timm.write(params, model), {})
  result = weights.read(path)
  assert_same(result, params)
  assert result.options["root_pad"] == "zero"
  config = {"mean": [0.4] * 3, "std": [0.5] * 3}
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert "got [0.4, 0.4, 0.4], [0.5, 0.5, 0.5], expected 0.5" in (message(path))


def test_hugging_face(tmp_path):
  folder = hf_folder(tmp_path / "m", hidden_act="gelu", layer_norm_eps=1e-12)
  result = weights.read(folder)
  assert_same(result, our_params((32, 48)))
  assert result.format == "hf" and result.has_cls_row
  assert result.options == {"gelu": "erf", "ln_eps": 1e-12}
  assert (result.grid, result.image_size) == ((4, 6), (32, 48))
  assert result.ops == PILLOW + "resize_torch((32, 48), 'bilinear')"
  assert result.class_names is None  # LABEL_0 is no name
  file = weights.read(folder / "model.safetensors")
  assert file.grid == (4, 6) and file.ops == result.ops


def test_a_model_type_that_is_none_or_no_text(tmp_path):
  result = weights.read(hf_folder(tmp_path / "a", model_type=None))
  assert_same(result, our_params((32, 48)))
  text = message(hf_folder(tmp_path / "b", model_type=["vit"]))
  assert "config.json: model_type: got " in text


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


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/7/params"])
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
  result = weights.read(tmp_path / inside)
  assert_same(result, our_params((16, 32)))
  assert result.format == "checkpoint" and result.metadata["step"] == 7
  assert (result.grid, result.image_size) == ((2, 4), (16, 32))
  assert result.class_names == tuple("abcdefghijk")
  assert result.ops == "decode|resize((16, 32))"
  vit = vit_jax.load(tmp_path / inside)
  assert (vit.config, vit.image_size, vit.ops) == (MODEL, (16, 32), result.ops)


@pytest.mark.parametrize("steps", [("5/default", "10/state"), ("10/model",)])
def test_checkpoints_of_another_program(tmp_path, steps, capsys):
  """As orbax's CheckpointManager writes them: an item or several in a step."""
  tree = nested(our_params())
  for step in steps:
    orbax(tmp_path / step, {"params": tree})
  inner = tmp_path / steps[-1]
  for path in (tmp_path, inner.parent):
    if inner.name == "state" and path != tmp_path:
      assert_same(weights.read(path), our_params())
      continue
    assert str(inner) in message(path)
  assert_same(weights.read(inner), our_params())
  assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize(
  "name, options",
  [
    ("bit_v2", {"root_pad": "nothing"}),
    ("bv_token", {"cls_row": False}),
  ],
)
def test_a_tree_states_what_its_names_state(tmp_path, name, options):
  """The same as a `.npz` of big_vision with these names."""
  tree = orbax(tmp_path / "tree", nested(published(name)))
  for path in (tree, DATA / f"{name}.weights.npz"):
    assert weights.read(path).options == options


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
  result = weights.read(tmp_path / "x")
  assert result.class_names is None and result.notes == ()


def test_metadata_of_another_program(tmp_path):
  metadata = {"author": "me"}
  checkpointer.write_params(str(tmp_path / "x"), nested(our_params()), metadata)
  result = weights.read(tmp_path / "x")
  assert result.metadata == {} and result.options == {}
  assert_same(result, our_params())
