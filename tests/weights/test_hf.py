"""Hugging Face's names and configs; the slow ones against transformers."""

import dataclasses
import json

import foreign
import numpy as np
import pytest
import torch_libraries
from PIL import Image
from safetensors.numpy import save_file
from weight_files import hf_folder

import vit_jax
from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.data import pixels
from vit_jax.models.posemb import sincos2d
from vit_jax.weights import safetensors_file, weights_file
from vit_jax.zoo.files import hf, hf_classes, hf_names, hf_preprocessing

TINY = dict(variant="B/8", width=24, depth=2, mlp_dim=40, num_heads=3)
SIZE = (24, 32)
CASES = {
  "token": dict(ln_eps=1e-12, gelu="erf"),
  "tanh": dict(),
  "without_row": dict(cls_row=False),
  "sincos2d": dict(posemb="sincos2d"),
  "no_positions": dict(posemb="none"),
  "pre_logits": dict(pre_logits=True),
}


def translate(arrays, config):
  return foreign.translate(hf.SERIES, arrays, config=config)


def _write(model, params, **options):
  options = dict(num_classes=5, image_size=SIZE) | options
  return hf_classes.write(params, model, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_vit_comes_back_as_it_was(tmp_path, name):
  model = model_config(**TINY | CASES[name])
  params = foreign.random_params(model, 5, SIZE)
  given = _without_head(params) if model.pre_logits else params
  arrays, config = _write(model, given, class_names="abcde")
  assert hf_names.looks_like(arrays)
  assert all(a.flags.c_contiguous for a in arrays.values())
  _save(tmp_path, arrays, config)
  result = weights.read(tmp_path, mean="half")
  assert result.options == {"gelu": model.gelu, "ln_eps": model.ln_eps}
  assert (result.image_size, result.grid) == (SIZE, (3, 4))
  assert result.class_names == (None if model.pre_logits else tuple("abcde"))
  read = dict(result.params)
  table = np.asarray(read.pop(weights_file.POS_EMBEDDING))
  expected = np.zeros_like(table)
  if model.posemb == "sincos2d":
    expected[0, 1:] = sincos2d(3, 4, 24)
  elif model.posemb == "learn":
    expected[0, int(not model.cls_row) :] = params.pop(
      weights_file.POS_EMBEDDING
    )
  np.testing.assert_array_equal(table, expected)
  if model.pre_logits:
    del params["head/kernel"], params["head/bias"]
  assert read.keys() == params.keys()
  for key, array in params.items():
    assert read[key].shape == array.shape, key
    np.testing.assert_array_equal(np.asarray(read[key]), array, key)


def test_the_names_of_transformers_5_in_memory_are_read():
  heads, hd, d = 2, 3, 6
  query = np.arange(36, dtype=np.float32).reshape(heads * hd, d)
  out = query + 100
  for prefix in ("vit.", ""):
    read, *_ = translate(
      {
        f"{prefix}layers.1.attention.q_proj.weight": query,
        f"{prefix}layers.1.attention.o_proj.weight": out,
        f"{prefix}layers.1.mlp.fc2.weight": out,
        f"{prefix}layers.1.layernorm_after.weight": query[0],
      },
      {"hidden_size": d, "num_attention_heads": heads},
    )
    block = "Transformer/encoderblock_1"
    attention = f"{block}/MultiHeadDotProductAttention_0"
    # Without a bias in the file it is zero.
    assert read.keys() == {
      f"{attention}/query/kernel",
      f"{attention}/query/bias",
      f"{attention}/out/kernel",
      f"{block}/MlpBlock_0/Dense_1/kernel",
      f"{block}/LayerNorm_1/scale",
    }
    kernel = np.asarray(read[f"{attention}/query/kernel"])
    assert kernel.shape == (d, heads, hd) and kernel[4, 1, 2] == query[5, 4]
    kernel = np.asarray(read[f"{attention}/out/kernel"])
    assert kernel.shape == (heads, hd, d) and kernel[1, 2, 4] == out[4, 5]
    assert not np.asarray(read[f"{attention}/query/bias"]).any()
  assert hf_names.looks_like(
    [
      "vit.layers.0.mlp.fc1.weight",
      "vit.embeddings.patch_embeddings.projection.weight",
    ]
  )
  assert not hf_names.looks_like(
    ["patch_embed.proj.weight", "blocks.0.norm1.bias"]
  )


@pytest.mark.parametrize("name", ["LABEL_{}", "n{}"])
def test_labels_without_names_are_none(tmp_path, name):
  names = {str(i): name.format(i) for i in range(11)}
  result = weights.read(hf_folder(tmp_path / "x", id2label=names))
  is_named = name == "n{}"
  assert result.class_names == (tuple(names.values()) if is_named else None)


def test_a_pooler_of_another_width_is_refused():
  """transformers' pooler_output_size; our layer keeps the width."""
  arrays = {
    "encoder.layer.0.layernorm_before.weight": np.zeros(4, np.float32),
    "pooler.dense.weight": np.zeros((2, 4), np.float32),
    "pooler.dense.bias": np.zeros(2, np.float32),
  }
  error = "pooler: got shape .4, 2., expected a square"
  with pytest.raises(ValueError, match=error):
    translate(arrays, {"num_attention_heads": 2})


def test_all_that_cannot_be_read_is_one_error():
  square = np.zeros((4, 4), np.float32)
  arrays = {
    "vit.encoder.layer.0.q_norm.weight": square[0],
    "vit.encoder.layer.0.attention.attention.query.weight": square,
    "vit.encoder.layer.0.output.dense.weight": square[0],
    "vit.pooler.dense.weight": square,
    "classifier.weight": square,
  }
  config = {
    "hidden_act": "relu",
    "patch_size": [16, 8],
    "num_attention_heads": 3,
    "pooler_act": "relu",
  }
  with pytest.raises(ValueError) as e:
    translate(arrays, config)
  text = str(e.value)
  assert len(text.splitlines()) == 7
  for part in (
    "patch_size: got [16, 8], expected a square",
    "query.weight: got shape (4, 4), expected [D, in] with D a multiple of",
    "0.output.dense.weight: got shape (4,), expected [out, in]",
    "got 1 arrays that no model of vit_jax has: 'encoder.layer.0.q_norm",
    "hidden_act: got 'relu', expected 'gelu' or",
    "pooler_act: got 'relu', expected 'tanh'",
    "got both pooler and classifier",
  ):
    assert part in text
  with pytest.raises(ValueError, match="model_type: got 'swin', expected one"):
    translate(arrays, {"model_type": "swin"})


@pytest.mark.parametrize(
  "model, params, expected",
  [
    (
      dict(variant="S/32", pool="map", posemb="relative", pre_logits=True),
      {"pre_logits/kernel": 0, "head/kernel": 0},
      ["pre_logits: got True, expe", "posemb: got 'relative', expected 'learn'"]
      + ["pool: got 'map'", "class_names: got 1, expected 5"],
    ),
    (dict(variant="R26+S/32"), {}, ["variant: got the hybrid 'R26+S/32'"]),
    (
      dict(name="modern", pool="map", class_token=True),
      {},
      ["pool: got 'map', expected 'token'"],
    ),
    (dict(name="bit", variant="R50x1"), {}, ["name: got 'bit', expected 'vit"]),
    (
      TINY | dict(posemb_at="shared"),
      {},
      ["posemb_at: got 'shared', expected"],
    ),
    (TINY, {"more": 0}, ["got 'more', which the library has no place for"]),
  ],
)
def test_all_that_cannot_be_written_is_one_error(model, params, expected):
  model = model_config(**model)
  if model.variant == "B/8":
    params = foreign.random_params(model, 5, SIZE) | params
  with pytest.raises(ValueError, match="transformers' models cannot hold") as e:
    _write(model, params, class_names="a" if len(params) == 2 else "abcde")
  for text in expected:
    assert f"\n  - config.model.{text}" in str(e.value) or (
      f"\n  - {text}" in str(e.value)
    )


def test_the_configs():
  model = model_config(**TINY)
  params = foreign.random_params(model, 2, (32, 32))
  _, config = _write(
    model, params, num_classes=2, image_size=(32, 32), class_names=["cat", "ox"]
  )
  assert config == {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "encoder_stride": 8,
    "qkv_bias": True,
    "pooler_act": "tanh",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "id2label": {"0": "cat", "1": "ox"},
    "label2id": {"cat": 0, "ox": 1},
  }
  _, config = _write(model, params, num_classes=2, image_size=(32, 32))
  assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}


@pytest.fixture(scope="module")
def transformers():
  return torch_libraries.load("transformers")


def _save(folder, arrays, config):
  save_file(arrays, folder / "model.safetensors", {"format": "pt"})
  (folder / "config.json").write_text(json.dumps(config))


def _without_head(params):
  return {k: v for k, v in params.items() if not k.startswith("head/")}


def _compare(transformers, folder, model, image_size, drop_head=False):
  """Loads what we write from a folder; returns errors by type."""
  params = foreign.random_params(model, 11, image_size)
  _save(
    folder,
    *hf_classes.write(
      _without_head(params) if drop_head else params,
      model,
      num_classes=11,
      image_size=image_size,
    ),
  )
  kind = "ViTModel" if drop_head else "ViTForImageClassification"
  theirs, report = getattr(transformers, kind).from_pretrained(
    folder, local_files_only=True, output_loading_info=True
  )
  assert not any(report[k] for k in ("missing_keys", "unexpected_keys"))
  output = "pooler_output" if drop_head else "logits"
  images, errors = foreign.image(image_size), {}
  for dtype in ("float32", "float64"):
    ours = foreign.our_logits(
      dataclasses.replace(model, dtype=dtype),
      11,
      params,
      images,
      "pre_logits" if drop_head else "logits",
    )
    expected = foreign.torch_logits(theirs, images, dtype)[output]
    errors[dtype] = foreign.error(ours, expected)
  print(errors)
  return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_we_write_is_loaded(transformers, tmp_path, name):
  model = model_config(**TINY | CASES[name])
  errors = _compare(transformers, tmp_path, model, SIZE, model.pre_logits)
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.nightly
def test_b_16_is_loaded(transformers, tmp_path):
  errors = _compare(transformers, tmp_path, model_config(), (224, 224))
  assert errors["float32"] < 1e-4 and errors["float64"] < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize(
  "act, qkv_bias", [("gelu", True), ("gelu_new", False), ("gelu_fast", True)]
)
def test_what_they_save_is_read(transformers, tmp_path, act, qkv_bias):
  config = transformers.ViTConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    image_size=list(SIZE),
    patch_size=8,
    num_labels=11,
    hidden_act=act,
    qkv_bias=qkv_bias,
    layer_norm_eps=1e-3,  # so that it matters
  )
  theirs = transformers.ViTForImageClassification(config)
  _assert_read(theirs, tmp_path, SIZE)


@pytest.mark.nightly
def test_their_b_16_is_read(transformers, tmp_path):
  config = transformers.ViTConfig(num_labels=11)
  _assert_read(
    transformers.ViTForImageClassification(config), tmp_path, (224, 224)
  )


def _assert_read(theirs, folder, image_size):
  from safetensors.numpy import load_file

  foreign.randomise(theirs)
  theirs.save_pretrained(folder)
  saved = load_file(folder / "model.safetensors")
  config = json.loads((folder / "config.json").read_text())
  params, options, stated = translate(saved, config)
  in_memory, *_ = translate(foreign.state(theirs), config)
  about = stated.config.about
  assert params.keys() == in_memory.keys()
  for name, array in params.items():
    np.testing.assert_array_equal(array, in_memory[name], name)
  model = model_config(
    variant=f"B/{about.patch_size[0]}",
    width=config["hidden_size"],
    depth=config["num_hidden_layers"],
    mlp_dim=config["intermediate_size"],
    num_heads=stated.num_heads,
    **options,
  )
  images = foreign.image(image_size)
  for dtype, limit in (("float32", 1e-4), ("float64", 5e-6)):
    ours = foreign.our_logits(
      dataclasses.replace(model, dtype=dtype), 11, params, images
    )
    logits = foreign.torch_logits(theirs, images, dtype).logits
    error = foreign.error(ours, logits)
    print(dtype, error)
    assert error < limit


@pytest.mark.slow
@pytest.mark.parametrize(
  "ops",
  [
    "resize_torch((24, 32))",
    "resize_small_torch(36, 'bilinear')|central_crop((24, 32))",
  ],
)
def test_the_preprocessor_is_ours(transformers, tmp_path, ops):
  ops = f"decode(dct='accurate')|{ops}"
  about, read = hf_preprocessing.write(ops, SIZE)
  assert read == ops
  (tmp_path / hf_preprocessing.FILE).write_text(json.dumps(about))
  processor = transformers.AutoImageProcessor.from_pretrained(
    tmp_path, local_files_only=True
  )
  values = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
  image = Image.fromarray(values)
  got = processor(image, return_tensors="np")["pixel_values"][0]
  off = np.abs((got + 1) * 127.5 - pixels.apply(values, ops).transpose(2, 0, 1))
  # torchvision, where it is installed, has weights of 16 bits for bytes.
  assert off.max() < 1.001 and off.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, about",
  [
    ("ViT", {}),
    ("DeiT", {}),
    ("CLIP", {}),
    ("Bit", {}),
    ("Bit", {"size": 256, "resample": 2}),
    (  # DINOv2's
      "Bit",
      {"size": {"shortest_edge": 256}, "image_mean": [0.485, 0.456, 0.406]},
    ),
    ("Siglip", {}),
    ("Siglip", {"size": {"height": 224, "width": 224}, "resample": 2}),
    ("DINOv3ViT", {}),
    ("DINOv3ViT", {"size": {"height": 224, "width": 224}, "resample": 3}),
    ("Beit", {}),
    ("DeiT", {"size": 230, "do_normalize": False}),
  ],
)
def test_defaults_are_those_of_the_processor(
  transformers, tmp_path, name, about
):
  if name == "DINOv3ViT" and not torch_libraries.torchvision_works():
    pytest.skip("its processor needs torchvision")
  about = {"image_processor_type": f"{name}ImageProcessor", **about}
  (tmp_path / hf_preprocessing.FILE).write_text(json.dumps(about))
  processor = transformers.AutoImageProcessor.from_pretrained(
    tmp_path, local_files_only=True
  )
  about = hf_preprocessing.complete(about)
  ops = hf_preprocessing.ops_of(about, (224, 224))
  values = np.random.default_rng(0).integers(0, 256, (300, 430, 3), np.uint8)
  got = processor(Image.fromarray(values), return_tensors="np")
  mean, std = (
    np.array(about.get(key, [0.5] * 3)) for key in ("image_mean", "image_std")
  )
  if not about.get("do_normalize", True):
    mean, std = 0.0, 1.0
  result = (pixels.apply(values, ops) / 255 - mean) / std
  off = got["pixel_values"][0] - result.transpose(2, 0, 1)
  off = np.abs(off) * np.min(std) * 255
  # torchvision, where it is installed, has weights of 16 bits for bytes.
  assert off.max() < 1.001 and off.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, about",
  [
    ("CLIP", {"size": {"shortest_edge": 36}, "resample": 3}),
    ("Bit", {"size": {"shortest_edge": 37}, "resample": 2}),
    ("DeiT", {"size": 41, "resample": 3}),
  ],
)
def test_crops_of_200_sizes_are_those_of_the_processor(
  transformers, name, about
):
  """Half a pixel of the offset is rounded down; timm's is rounded to even."""
  rng = np.random.default_rng(0)
  about |= {"do_center_crop": True, "crop_size": 32}
  theirs = getattr(transformers, f"{name}ImageProcessorPil")(**about)
  plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
  ops = hf_preprocessing.ops_of(about, (32, 32))
  for height, width in rng.integers(20, 200, (200, 2)):
    values = rng.integers(0, 256, (height, width, 3), np.uint8)
    (got,) = theirs(Image.fromarray(values), **plain)["pixel_values"]
    result = pixels.apply(values, ops).transpose(2, 0, 1)
    np.testing.assert_array_equal(result, got, f"{height} x {width}")


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, about",
  [
    ("ViT", {"size": 32, "resample": 2}),
    ("ViT", {"size": {"height": 32, "width": 48}, "resample": 3}),
    ("DeiT", {"size": 40, "do_center_crop": True, "crop_size": 32}),
  ],
)
def test_our_pixels_are_those_of_the_processor(transformers, name, about):
  about = {"resample": 3, **about}
  values = np.random.default_rng(0).integers(0, 256, (61, 91, 3), np.uint8)
  plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}

  def theirs(suffix):
    processor = getattr(transformers, f"{name}ImageProcessor{suffix}")(**about)
    return processor(Image.fromarray(values), **plain)["pixel_values"][0]

  got = theirs("Pil")
  ops = hf_preprocessing.ops_of(about, got.shape[1:])
  result = pixels.apply(values, ops).transpose(2, 0, 1).astype(int)
  np.testing.assert_array_equal(result, got)
  # torchvision, where it is installed, has weights of 16 bits for bytes.
  off = np.abs(result - theirs("").astype(int))
  assert off.max() <= 2 and off.mean() < 0.01


@pytest.mark.parametrize(
  "problem, outputs, loss",
  [
    ("multi_label_classification", 3, "sigmoid"),
    ("single_label_classification", 3, "softmax"),
    (None, 3, "softmax"),
    ("regression", 3, "regression"),
    (None, 1, "regression"),  # transformers trains one output so
    ("multi_label_classification", 1, "sigmoid"),
  ],
)
def test_a_head_is_read_as_it_was_trained(tmp_path, problem, outputs, loss):
  params = foreign.random_params(model_config(**TINY), outputs, (32, 32))
  arrays, config = hf_classes.write(
    params, model_config(**TINY), num_classes=outputs, image_size=(32, 32)
  )
  safetensors_file.write(tmp_path / "model.safetensors", arrays, {})
  config["problem_type"] = problem
  (tmp_path / "config.json").write_text(json.dumps(config))
  vit = vit_jax.load(tmp_path, verbose=False)
  assert vit.num_classes == outputs and vit.loss == loss
  notes = [note for note in vit.report.notes if "is a regression" in note]
  assert len(notes) == (loss == "regression")
  image = np.zeros((32, 32, 3), np.uint8)
  (answers,) = vit.predict(image)
  if loss == "regression":  # the outputs as they are
    (outputs_of_model,) = vit(np.full((1, 32, 32, 3), -1, np.float32))[0]
    np.testing.assert_allclose(
      [a.value for a in answers], outputs_of_model, rtol=1e-5
    )
  else:
    assert len(answers) == outputs
    assert all(0 <= a.probability <= 1 for a in answers)


def test_an_unknown_problem_type_is_refused():
  with pytest.raises(ValueError, match="problem_type: got 'x', expected"):
    translate({}, {"problem_type": "x"})
