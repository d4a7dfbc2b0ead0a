"""Families of transformers beside ViT; the slow ones against the library."""

import json

import foreign
import numpy as np
import pytest
import torch_libraries

import vit_jax
from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.weights import hf, normalisation, safetensors_file

TINY = dict(variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4)
WRITTEN = {
  "ijepa": dict(pool="gap", ln_eps=1e-12),
  "siglip_vision_model": dict(pool="map"),
}


def _written(folder, model, num_classes=0, image_size=(32, 32)):
  params = foreign.random_params(model, num_classes, image_size)
  arrays, config = hf.write(
    params, model, num_classes=num_classes, image_size=image_size
  )
  safetensors_file.write(folder / "model.safetensors", arrays, {})
  (folder / "config.json").write_text(json.dumps(config))
  return params


def _assert_equal(params, expected):
  assert params.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(np.asarray(params[name]), array, name)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_comes_back_as_it_was(tmp_path, name):
  model = model_config(**TINY | WRITTEN[name])
  params = _written(tmp_path, model)
  config = json.loads((tmp_path / "config.json").read_text())
  assert config["model_type"] == name
  read = weights.read(tmp_path, mean="half")
  _assert_equal(read.params, params)
  assert weights.identify(read.params, read.options) == model
  assert read.notes == ()


def test_a_head_on_the_mean_comes_back(tmp_path):
  model = model_config(**TINY, pool="gap")
  params = _written(tmp_path, model, num_classes=3, image_size=(16, 32))
  read = weights.read(tmp_path, mean="half")
  _assert_equal(read.params, params)
  assert read.grid == (2, 4) and read.image_size == (16, 32)


def _add_arrays(folder, config=None, **more):
  """Adds arrays to a folder of weights; "__" is a dot."""
  from safetensors.numpy import load_file

  file = folder / "model.safetensors"
  arrays = load_file(file)
  more = {k.replace("__", "."): np.ones(v, "f") for k, v in more.items()}
  safetensors_file.write(file, arrays | more, {})
  old = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config or old))


def test_what_texts_and_pre_training_need_is_listed(tmp_path):
  _written(tmp_path, model_config(**TINY, pool="map"))
  sizes = {"hidden_size": 48, "patch_size": 8, "image_size": 32}
  vision = sizes | {"num_attention_heads": 4, "model_type": "siglip_vision"}
  _add_arrays(
    tmp_path,
    {"model_type": "siglip", "vision_config": vision},
    logit_scale=1,
    text_model__head__weight=(3, 3),
    embeddings__position_ids=(1, 16),
  )
  (tmp_path / "preprocessor_config.json").write_text("{}")
  left_out, assumed = weights.read(tmp_path).notes
  assert left_out == (
    "left out: 'embeddings.position_ids', 'logit_scale',"
    " 'text_model.head.weight', which only pre-training or texts need."
  )
  assert assumed == normalisation.ASSUMED.format("half")
  _add_arrays(tmp_path, decoder2=3)
  with pytest.raises(ValueError, match="without a place .*: 'decoder2'"):
    weights.read(tmp_path)


def test_publishers_normalise_as_they_do(tmp_path):
  """I-JEPA's images have ImageNet's mean, also where no file states it."""
  _written(tmp_path, model_config(**TINY, pool="gap"))
  assumed, folded = weights.read(tmp_path).notes
  assert assumed == normalisation.ASSUMED.format("imagenet")
  assert "mean [0.485, 0.456, 0.406]" in folded
  assert weights.read(tmp_path, mean="half").notes == ()


def test_images_are_multiples_of_the_patch(tmp_path):
  """So400m/14 has 27 x 27 positions for images of 384 pixels."""
  _written(tmp_path, model_config(**TINY, pool="map"))
  config = json.loads((tmp_path / "config.json").read_text())
  config["image_size"] = 37
  (tmp_path / "config.json").write_text(json.dumps(config))
  read = weights.read(tmp_path, mean="half")
  assert read.image_size == (32, 32) and read.grid == (4, 4)
  (note,) = read.notes
  assert note == (
    "config.json: image_size: got [37], whose last pixels no patch of 8"
    " covers; here images are 32 x 32."
  )


@pytest.fixture(scope="module")
def transformers():
  return torch_libraries.load("transformers")


SIZES = dict(
  hidden_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  intermediate_size=96,
  patch_size=8,
)
SQUARE = SIZES | dict(image_size=32)
TEXT = {k: v for k, v in SIZES.items() if k != "patch_size"} | dict(
  num_hidden_layers=1, vocab_size=64, max_position_embeddings=16
)
DECODER = dict(
  decoder_hidden_size=24,
  decoder_num_hidden_layers=1,
  decoder_num_attention_heads=3,
  decoder_intermediate_size=48,
)
# Class -> its config, the config's options, and our name of its output.
CLASSES = {
  "ViTMAEModel": ("ViTMAEConfig", SQUARE | {"mask_ratio": 0.0}, "encoded"),
  "ViTMAEForPreTraining": ("ViTMAEConfig", SQUARE | DECODER, None),
  "ViTMSNModel": ("ViTMSNConfig", SQUARE, "encoded"),
  "ViTMSNForImageClassification": (
    "ViTMSNConfig",
    SQUARE | {"num_labels": 3},
    "logits",
  ),
  "IJepaModel": ("IJepaConfig", SQUARE, "encoded"),
  "IJepaForImageClassification": (
    "IJepaConfig",
    SQUARE | {"num_labels": 3},
    "logits",
  ),
  "SiglipVisionModel": ("SiglipVisionConfig", SQUARE, "pooled"),
  "SiglipModel": (
    "SiglipConfig",
    {"text_config": TEXT, "vision_config": SQUARE},
    "pooled",
  ),
  "SiglipForImageClassification": (
    "SiglipConfig",
    {"text_config": TEXT, "vision_config": SQUARE, "num_labels": 3},
    "logits",
  ),
  "Siglip2VisionModel": (
    "Siglip2VisionConfig",
    SIZES | {"num_patches": 16},
    "pooled",
  ),
}


def _make(transformers, name):
  config, options, output = CLASSES[name]
  torch_model = getattr(transformers, name)(
    getattr(transformers, config)(**options)
  )
  foreign.randomise(torch_model)
  return torch_model.eval(), output


def _theirs(model, images):
  """Returns the blocks' outputs and what the model returns at the end."""
  import torch

  x = torch.from_numpy(images).permute(0, 3, 1, 2)
  name, options = type(model).__name__, {"output_hidden_states": True}
  height, width = images.shape[1] // 8, images.shape[2] // 8
  if name.startswith("Siglip2"):
    patches = x.unfold(2, 8, 8).unfold(3, 8, 8)  # b c h w 8 8
    x = patches.permute(0, 2, 3, 4, 5, 1).reshape(len(images), -1, 192)
    options["pixel_attention_mask"] = torch.ones(x.shape[:2])
    options["spatial_shapes"] = torch.tensor([[height, width]])
  else:
    options["interpolate_pos_encoding"] = True
  if name.startswith("ViTMAE"):  # random patches stay in their order
    options["noise"] = torch.arange(height * width)[None].float()
  model = (
    getattr(model, "vision_model", model) if name.endswith("Model") else (model)
  )
  with torch.no_grad():
    out = model(x, **options)
  end = next(
    out[key]
    for key in ("logits", "pooler_output", "last_hidden_state")
    if out.get(key) is not None
  )
  return [h.numpy() for h in out.hidden_states], end.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("image_size", [(32, 32), (48, 48), (24, 40)])
@pytest.mark.parametrize("name", [k for k, v in CLASSES.items() if v[2]])
def test_every_block_is_theirs(transformers, tmp_path, name, image_size):
  model, output = _make(transformers, name)
  model.save_pretrained(tmp_path)
  vit = vit_jax.load(
    tmp_path,
    image_size=image_size,
    posemb_filter="bilinear" if name.startswith("Siglip2") else "hf",
    mean="half",
    verbose=False,
  )
  images = foreign.image(image_size)
  blocks, end = _theirs(model, images)
  _, out = vit(images)
  ours = [out[f"encoderblock_{i}"]["after_mlp"] for i in range(2)]
  for got, expected in zip(
    [out["with_posemb"], *ours, out[output]], [*blocks[:3], end], strict=True
  ):
    assert foreign.error(got, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_names_in_memory_are_read(transformers, tmp_path, name):
  model, _ = _make(transformers, name)
  model.save_pretrained(tmp_path)
  config = json.loads((tmp_path / "config.json").read_text())
  read = weights.read(tmp_path, mean="half").params
  in_memory, _, _ = hf.read_arrays(foreign.state(model), config)
  _assert_equal(in_memory, read)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_what_we_write_is_loaded(transformers, tmp_path, name):
  model = model_config(**TINY | WRITTEN[name], posemb="learn")
  num_classes = 3 if hf.WRITTEN[name].classes[1] else 0
  params = _written(tmp_path, model, num_classes)
  (kind,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
  theirs, report = getattr(transformers, kind).from_pretrained(
    tmp_path, local_files_only=True, output_loading_info=True
  )
  assert not any(report[k] for k in ("missing_keys", "unexpected_keys"))
  images = foreign.image((32, 32))
  _, end = _theirs(theirs.eval(), images)
  output = "logits" if num_classes else "pooled"
  ours = foreign.our_logits(model, num_classes, params, images, output)
  assert foreign.error(ours, end) < 1e-5
