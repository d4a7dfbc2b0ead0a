"""Families of transformers beside ViT; the slow ones against the library."""

import dataclasses
import json
import re

import foreign
import jax
import numpy as np
import pytest
import torch_libraries
from safetensors.numpy import load_file

import vit_jax
from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.models.resample import resample_posemb
from vit_jax.tools.exporting import convert, model_card
from vit_jax.weights import normalisation, safetensors_file
from vit_jax.weights.weights_file import POS_EMBEDDING, LazyArray
from vit_jax.zoo.files import hf, hf_classes

TINY = dict(variant="B/8", width=48, depth=2, mlp_dim=96, num_heads=4)
MODERN = TINY | dict(name="modern", gelu="erf")
DINO = MODERN | dict(layer_scale=1e-5, mlp_dim=192)
GATED = dict(mlp="swiglu", gelu="tanh", mlp_dim=128)
BEIT = DINO | dict(
  posemb="relative_bias",
  qkv_bias="no_key",
  pool="gap",
  final_norm="pooled",
)
# Class -> options of our model.
WRITTEN = {
  "IJepaModel": TINY | dict(pool="gap", ln_eps=1e-12),
  "IJepaForImageClassification": TINY | dict(pool="gap"),
  "SiglipVisionModel": TINY | dict(pool="map"),
  "DeiTModel": MODERN | dict(registers=1, pre_logits=True),
  "DeiTForImageClassification": MODERN | dict(registers=1),
  "DeiTForImageClassificationWithTeacher": MODERN | dict(distilled=True),
  "Dinov2Model": DINO,
  "Dinov2ForImageClassification": DINO | dict(pool="token_gap"),
  "Dinov2WithRegistersModel": DINO | GATED | dict(registers=4),
  "Dinov2WithRegistersForImageClassification": (
    DINO | dict(registers=2, pool="token_gap")
  ),
  "DINOv3ViTModel": (
    DINO
    | dict(registers=4, rope="dinov3", posemb="none", qkv_bias="no_key")
    | dict(ln_eps=1e-5)
  ),
  "BeitModel": BEIT,
  "BeitForImageClassification": BEIT,
  "CLIPVisionModel": (
    MODERN | dict(pre_norm=True, patch_bias=False, gelu="quick", ln_eps=1e-5)
  ),
  "CLIPForImageClassification": (
    MODERN
    | dict(pre_norm=True, patch_bias=False, pool="gap")
    | dict(final_norm="none")
  ),
  "CLIPVisionModelWithProjection": (
    MODERN | dict(pre_norm=True, patch_bias=False, projection=16)
  ),
}


def _written(folder, model, num_classes=0, image_size=(32, 32)):
  params = foreign.random_params(model, num_classes, image_size)
  arrays, config = hf_classes.write(
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
  model = model_config(**WRITTEN[name])
  params = _written(tmp_path, model, 3 * ("ForImageClass" in name))
  config = json.loads((tmp_path / "config.json").read_text())
  assert config["architectures"] == [name]
  read = weights.read(tmp_path, mean="half")
  _assert_equal(read.params, params)
  assert weights.identify(read.params, read.options) == model


@pytest.mark.parametrize("name", ["DINOv3ViTModel", "DeiTModel"])
def test_prefixes_of_training_programs_are_taken_off(tmp_path, name):
  params = _written(tmp_path, model_config(**WRITTEN[name]))
  file = tmp_path / "model.safetensors"
  arrays = {f"module.{k}": v for k, v in load_file(file).items()}
  safetensors_file.write(file, arrays, {})
  read = weights.read(tmp_path, mean="half")
  assert "the prefix 'module.' was taken off the names." in read.notes
  _assert_equal(read.params, params)


def test_a_head_on_the_mean_comes_back(tmp_path):
  model = model_config(**TINY, pool="gap")
  params = _written(tmp_path, model, num_classes=3, image_size=(16, 32))
  read = weights.read(tmp_path, mean="half")
  _assert_equal(read.params, params)
  assert read.grid == (2, 4) and read.image_size == (16, 32)


def _add_arrays(folder, config=None, is_change=False, **more):
  """Adds arrays to a folder of weights, "__" is a dot; and another config."""
  file = folder / "model.safetensors"
  arrays = load_file(file)
  more = {k.replace("__", "."): np.ones(v, "f") for k, v in more.items()}
  safetensors_file.write(file, arrays | more, {})
  old = json.loads((folder / "config.json").read_text())
  config = old | config if is_change else config or old
  (folder / "config.json").write_text(json.dumps(config))


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
  assert left_out.startswith(
    "left out: 'embeddings.position_ids', 'logit_scale', 'text_model.head.weig"
  )
  assert assumed == normalisation.ASSUMED.format("half")
  _add_arrays(tmp_path, decoder2=3)
  with pytest.raises(ValueError, match="1 arrays that no model .*: 'decoder2'"):
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
  assert note == ("images of [37, 37] are [32, 32] here, whole patches.")


def test_clip_s_patches_get_the_normalisation(tmp_path):
  """Patches have no bias: their positions take the mean."""
  model = model_config(**WRITTEN["CLIPVisionModel"])
  params = _written(tmp_path, model)
  vit = vit_jax.load(tmp_path, verbose=False)  # CLIP's mean is assumed
  assert vit.config == model
  images = foreign.image((32, 32))
  mean, std = (np.array(v) for v in normalisation.NAMED["clip"])
  normalised = ((images + 1) / 2 - mean) / std
  expected = foreign.our_logits(model, 0, params, normalised, "pooled")
  assert foreign.error(vit(images)[0], expected) < 1e-5
  again = tmp_path / "again"
  convert.convert(vit, str(again), "hf")
  second = vit_jax.load(again, verbose=False)
  jax.tree.map(np.testing.assert_array_equal, second.params, vit.params)


@pytest.mark.parametrize("name", ["Dinov2Model", "Dinov2WithRegistersModel"])
def test_dinov2_resizes_positions_to_its_processor_s_images(tmp_path, name):
  """Published tables are of 37 x 37 patches, images of 16 x 16."""
  params = _written(tmp_path, model_config(**WRITTEN[name]))
  about = {"image_processor_type": "BitImageProcessor", "crop_size": 16}
  about["size"] = {"shortest_edge": 18}
  (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
  vit = vit_jax.load(tmp_path, mean="half", verbose=False)
  assert vit.image_size == (16, 16)
  assert vit.ops.endswith("resize_small_torch(18)|central_crop(16)")
  method = "dinov2" if name == "Dinov2Model" else "bicubic"
  table = resample_posemb(params[POS_EMBEDDING], (4, 4), (2, 2), 1, method)
  got = vit.params["Transformer"]["posembed_input"]["pos_embedding"]
  np.testing.assert_array_equal(got, table)
  assert np.abs(table).max() > 0


def _without_positions(folder, name):
  _written(folder, model_config(**WRITTEN[name]))
  file, arrays = folder / "model.safetensors", {}
  for key, array in load_file(file).items():
    if "position_embeddings" not in key and "relative_position" not in key:
      arrays[key] = array
  safetensors_file.write(file, arrays, {})


@pytest.mark.parametrize("name", ["DeiTModel", "BeitModel"])
def test_positions_that_a_file_lacks(tmp_path, name):
  """DeiT's second token has a position in the table, too."""
  _without_positions(tmp_path, name)
  with pytest.raises(ValueError) as e:
    weights.read(tmp_path)
  assert "pos_embedding: missing, expected a position" in str(e.value)


def test_no_positions_are_no_rotary_positions(tmp_path):
  """The arrays alone would be those of DINOv3."""
  _without_positions(tmp_path, "BeitModel")
  read = weights.read(tmp_path, mean="half", options={"posemb": "none"})
  model = weights.identify(read.params, read.options)
  assert (model.posemb, model.rope) == ("none", None)


def test_a_head_that_no_class_has_is_refused():
  model = model_config(**WRITTEN["DINOv3ViTModel"])
  params = foreign.random_params(model, 3, (32, 32))
  with pytest.raises(ValueError, match="(?s)rope: got 'dinov3'.*--drop_head"):
    hf_classes.write(params, model, num_classes=3, image_size=(32, 32))
  model = dataclasses.replace(model, rope="eva02", mlp_norm=True)
  with pytest.raises(ValueError) as e:
    hf_classes.write({}, model, num_classes=0, image_size=(32, 32))
  assert "config.model.rope: got 'eva02', expected 'dinov3'" in str(e.value)
  assert "config.model.mlp_norm: got True, expected False" in str(e.value)


@pytest.mark.parametrize(
  "name, config, error",
  [
    (
      "Dinov2Model",
      {"model_type": "dinov5"},
      "got 'dinov5', expected one of vit, vit_mae",
    ),
    (
      "DINOv3ViTModel",
      {"model_type": "vit"},
      "arrays that no model of vit_jax has: .*layer",
    ),
    (
      "DINOv3ViTModel",
      {"rope_theta": 10000},
      "rope_theta: got 10000.0, exp",
    ),
    ("Dinov2Model", {"hidden_act": "relu"}, "hidden_act: got 'relu', expected"),
    ("Dinov2WithRegistersModel", {"hidden_act": "relu"}, None),  # SiLU there
  ],
)
def test_configs_of_other_models_are_refused(tmp_path, name, config, error):
  _written(tmp_path, model_config(**WRITTEN[name]))
  _add_arrays(tmp_path, config, is_change=True)
  if error is None:
    weights.read(tmp_path)
    return
  with pytest.raises(ValueError, match=error):
    weights.read(tmp_path)


@pytest.fixture(scope="module")
def transformers():
  return torch_libraries.load("transformers")


@pytest.mark.slow
def test_names_in_memory_are_read(transformers, tmp_path):
  import weights_cases_hf

  models = [m for ms in weights_cases_hf.MODELS.values() for m in ms]
  for i, (name, options) in enumerate(models):
    model, folder = weights_cases_hf.make(name, options), tmp_path / str(i)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    read = weights.read(folder, mean="half").params
    in_memory, *_ = foreign.translate(
      hf.SERIES, foreign.state(model), config=config
    )
    _assert_equal(in_memory, read)


S, B, L = (384, 12, 6), (768, 12, 12), (1024, 24, 16)
# Class, (width, depth, heads), other options of its config, size in our table,
# and transformers' number of parameters.
PUBLISHED = [
  ("Dinov2Model", S, dict(image_size=518), "S/14", 22_056_576),
  ("Dinov2Model", B, dict(image_size=518), "B/14", 86_580_480),
  ("Dinov2Model", L, dict(image_size=518), "L/14", 304_368_640),
  (
    "Dinov2Model",
    (1536, 40, 24),
    dict(image_size=518, use_swiglu_ffn=True),
    "g2/14",
    1_136_480_768,
  ),
  (
    "Dinov2WithRegistersModel",
    L,
    dict(image_size=518, patch_size=14),
    "L/14",
    304_372_736,
  ),
  ("DINOv3ViTModel", S, dict(intermediate_size=1536), "S/16", 21_596_544),
  (
    "DINOv3ViTModel",
    (1280, 32, 20),
    dict(intermediate_size=5120, use_gated_mlp=True, hidden_act="silu"),
    "H+/16",
    840_592_640,
  ),
  (
    "DINOv3ViTModel",
    (4096, 40, 32),
    dict(intermediate_size=8192, use_gated_mlp=True, hidden_act="silu")
    | dict(query_bias=False, value_bias=False),
    "7B/16",
    6_716_035_072,
  ),
  (
    "DeiTForImageClassificationWithTeacher",
    B,
    dict(num_labels=1000),
    "B/16",
    87_338_192,
  ),
  (
    "CLIPVisionModelWithProjection",
    (1024, 24, 16),
    dict(intermediate_size=4096, patch_size=14, projection_dim=768),
    "L/14",
    303_966_208,
  ),
  (
    "SiglipVisionModel",
    (1152, 27, 16),
    dict(intermediate_size=4304, image_size=384, patch_size=14),
    "So400m/14",
    428_225_600,
  ),
  ("ViTMAEModel", L, dict(intermediate_size=4096), "L/16", 303_301_632),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, size, options, variant, expected", PUBLISHED)
def test_published_sizes_are_named(
  transformers, name, size, options, variant, expected
):
  """Every array of transformers' is read; its classes exist without memory."""
  import torch

  keys = ("hidden_size", "num_hidden_layers", "num_attention_heads")
  cls = getattr(transformers, name)
  if "DINOv3" in name:
    options = options | {"num_register_tokens": 4}
  config = cls.config_class(**dict(zip(keys, size, strict=True)), **options)
  with torch.device("meta"):
    theirs = cls(config).state_dict()
  arrays = {
    k: LazyArray(tuple(v.shape), np.dtype("f"), lambda: None)
    for k, v in theirs.items()
  }
  assert sum(a.size for a in arrays.values()) == expected
  about = json.loads(config.to_json_string())
  params, read, _ = foreign.translate(hf.SERIES, arrays, config=about)
  model = weights.identify(params, read)
  assert model.variant == variant
  mask = size[0] * ("mask_token" in str(list(arrays)))
  assert sum(a.size for a in params.values()) == expected - mask


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, options",
  [
    *WRITTEN.items(),
    ("ViTModel", TINY),
    ("ViTModel", TINY | dict(pre_logits=True)),
    ("DeiTModel", MODERN | dict(registers=1)),
  ],
)
def test_the_card_names_class_and_output(transformers, tmp_path, name, options):
  """Its code for transformers computes what our model computes."""
  import torch

  _written(tmp_path, model_config(**options), 3 * ("ForImageClass" in name))
  vit = vit_jax.load(tmp_path, mean="half", verbose=False)
  code = model_card.text(vit, str(tmp_path)).split("```python\n")[1]
  lines = re.findall(r"^(?:model|logits|features) = .*", code, re.MULTILINE)
  images = foreign.image((32, 32))
  pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
  known = {name: getattr(transformers, name)}
  known["inputs"] = {"pixel_values": pixels}
  with torch.no_grad():
    exec("\n".join(lines), known)
  got = known["logits" if "logits" in known else "features"]
  assert foreign.error(vit(images)[0], got) < 1e-4
