"""Small models of transformers with random weights."""

import functools
import json
import pathlib
import re
from typing import Any

import numpy as np
import torch_libraries
from etils import epath
from foreign import randomise
from weights_table import Case, Outputs, Theirs

from vit_jax.weights import normalisation
from vit_jax.weights.safetensors_file import open_safetensors
from vit_jax.zoo.files import hf_names

torch = torch_libraries.Later("torch")
transformers = torch_libraries.Later("transformers")

SIZES = {
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "intermediate_size": 64,
  "patch_size": 8,
}
SQUARE = SIZES | {"image_size": 32}
TANH = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
FULL = {"image_size": 224}
TEXT = {k: v for k, v in SIZES.items() if k != "patch_size"} | {
  "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 16
}  # fmt: skip
TOWERS = {"text_config": TEXT, "vision_config": SQUARE}
CLIP = TOWERS | {"projection_dim": 16}
DINOV2 = {k: v for k, v in SQUARE.items() if k != "intermediate_size"}
DINOV3 = SQUARE | {"num_register_tokens": 4}
BEIT = SQUARE | {"use_relative_position_bias": True}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
DECODER = {
  "decoder_hidden_size": 24,
  "decoder_num_hidden_layers": 1,
  "decoder_num_attention_heads": 3,
  "decoder_intermediate_size": 48,
}
# Family -> class, options of its config.
MODELS = {
  "ViT": (
    ("ViTForImageClassification", SQUARE | {"qkv_bias": False}),
    ("ViTForImageClassification", SQUARE | TANH),
    ("ViTForImageClassification", SQUARE | {"image_size": [24, 32]}),
    ("ViTForImageClassification", FULL),
    ("ViTModel", SQUARE),
    ("ViTModel", SQUARE | {"pooler_act": "tanh"}),
    ("ViTMSNModel", SQUARE),
    ("ViTMSNForImageClassification", SQUARE),
    ("IJepaModel", SQUARE),
    ("IJepaForImageClassification", SQUARE),
  ),
  "DeiT, distilled": (
    ("DeiTModel", SQUARE),
    ("DeiTForImageClassification", SQUARE),
    ("DeiTForImageClassificationWithTeacher", SQUARE),
  ),
  "DINOv2": (
    ("Dinov2Model", DINOV2),
    ("Dinov2Model", DINOV2 | {"use_swiglu_ffn": True}),
    ("Dinov2ForImageClassification", DINOV2),
  ),
  "DINOv2 with registers": (
    ("Dinov2WithRegistersModel", DINOV2),
    ("Dinov2WithRegistersForImageClassification", DINOV2),
  ),
  "DINOv3": (
    ("DINOv3ViTModel", DINOV3),
    ("DINOv3ViTModel", DINOV3 | GATED),
    (
      "DINOv3ViTModel",
      SQUARE | GATED | {"query_bias": False, "value_bias": False},
    ),
  ),
  "SigLIP, SigLIP 2": (
    ("SiglipVisionModel", SQUARE),
    ("SiglipModel", TOWERS),
    ("SiglipForImageClassification", TOWERS),
    ("Siglip2VisionModel", SIZES | {"num_patches": 16}),
  ),
  "CLIP, OpenCLIP": (
    ("CLIPVisionModel", SQUARE),
    (
      "CLIPVisionModelWithProjection",
      SQUARE | {"projection_dim": 16, "hidden_act": "gelu"},
    ),
    ("CLIPModel", CLIP),
    ("CLIPForImageClassification", CLIP),
  ),
  "BEiT, BEiT v2": (
    ("BeitModel", BEIT),
    ("BeitForImageClassification", BEIT),
    ("BeitModel", SQUARE | {"use_shared_relative_position_bias": True}),
  ),
  "MAE": (
    ("ViTMAEModel", SQUARE | {"mask_ratio": 0.0}),
    ("ViTMAEForPreTraining", SQUARE | DECODER | {"mask_ratio": 0.0}),
  ),
}
# Classes that resize positions otherwise than ViT.
FILTERS = {"Dinov2With": "bicubic", "Siglip2": "bilinear", "Beit": "linear"}


def make(name: str, options: dict[str, Any]) -> Any:
  """Returns a model with random weights; MAE's table, too, is random."""
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  cls = getattr(transformers, name)
  if "ForImage" in name:
    options = options | {"num_labels": 3}
  has_pooler = "pooler_act" in options
  kwargs = {"add_pooling_layer": has_pooler} if name == "ViTModel" else {}
  model = cls(cls.config_class(**options), **kwargs)
  randomise(model)
  return model.eval()


def theirs(name: str, options: dict[str, Any]) -> Theirs:
  """Returns a model, saved as transformers does, without a processor."""
  model = make(name, options)

  def save(folder: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(folder / "theirs")
    return folder / "theirs"

  family = hf_names.known(model.config.model_type)
  pixels = normalisation.NAMED[family.pixels or "half"]
  return Theirs(save, functools.partial(outputs, model, pixels), reload)


def reload(path: str) -> Theirs:
  """Returns transformers' model of a folder of ours, which lacks nothing."""
  config = json.loads((pathlib.Path(path) / "config.json").read_text())
  (name,) = config["architectures"]
  arrays, _ = open_safetensors(epath.Path(path) / "model.safetensors")
  kwargs = {}
  if name == "ViTModel":
    kwargs = {"add_pooling_layer": any("pooler" in name for name in arrays)}
  model, report = getattr(transformers, name).from_pretrained(
    path, local_files_only=True, output_loading_info=True, **kwargs
  )
  assert not report["missing_keys"] and not report["unexpected_keys"], report
  half = normalisation.HALF
  card = (pathlib.Path(path) / "README.md").read_text()
  lines = re.findall(r"^(?:logits|features) = .*", card, re.MULTILINE)
  (code,) = (line for line in lines if "model(**inputs)" in line)

  def by_the_card(images: np.ndarray) -> Outputs:
    """Returns the last output by the line that the model card has for it."""
    blocks, _ = outputs(model.eval(), half, images)
    known = {
      "model": model,
      "inputs": {"pixel_values": pixels_of(half, images)},
    }
    with torch.no_grad():
      exec(code, known)
    return Outputs(blocks, known.get("logits", known.get("features")).numpy())

  return Theirs(None, by_the_card)


def pixels_of(normalisation, images: np.ndarray):
  """Returns what a processor makes of images in [-1, 1]."""
  mean, std = (np.float32(x) for x in normalisation)
  return torch.from_numpy(((images + 1) / 2 - mean) / std).permute(0, 3, 1, 2)


def outputs(model: Any, pixels, images: np.ndarray) -> Outputs:
  """Returns what a model computes of images in [-1, 1]."""
  x = pixels_of(pixels, images)
  name, options = type(model).__name__, {"output_hidden_states": True}
  height, width = images.shape[1] // 8, images.shape[2] // 8
  if name.startswith("Siglip2"):  # its processor cuts patches
    patches = x.unfold(2, 8, 8).unfold(3, 8, 8)  # b c h w 8 8
    x = patches.permute(0, 2, 3, 4, 5, 1).reshape(len(images), -1, 192)
    options["pixel_attention_mask"] = torch.ones(x.shape[:2])
    options["spatial_shapes"] = torch.tensor([[height, width]] * len(images))
  elif [height * 8, width * 8] == getattr(model.config, "image_size", None):
    pass  # a rectangle that it was trained for
  elif not name.startswith(("Dinov2", "DINOv3", "CLIPFor")):
    options["interpolate_pos_encoding"] = True
  if name.startswith("ViTMAE"):  # patches stay in their order
    noise = torch.arange(height * width).float()
    options["noise"] = noise.tile(len(images), 1)
    model = getattr(model, "vit", model)
  projection = getattr(model, "visual_projection", lambda x: x)
  if name in ("SiglipModel", "CLIPModel"):
    model = model.vision_model
  with torch.no_grad():
    out = model(x, **options)
    last = out.get("logits")
    if getattr(model, "pooler", None) is not None and name == "ViTModel":
      last = out.pooler_output
    elif name in ("ViTModel", "ViTMSNModel") or name.startswith("ViTMAE"):
      last = out.last_hidden_state[:, 0]
    elif name == "IJepaModel":
      last = out.last_hidden_state.mean(1)
    elif last is None:
      last = out.get("image_embeds")
    if last is None:
      last = out.pooler_output
      last = projection(last) if name == "CLIPModel" else last
  blocks = [h.numpy() for h in out.hidden_states[1:]]
  return Outputs(blocks, last.numpy())


IMAGES = ((32, 32), (48, 48), (24, 40))


def _sizes(name, options):
  if options is FULL:
    return ((224, 224),)
  if isinstance(options.get("image_size"), list):
    return ((24, 32),)  # transformers resizes square tables alone
  return IMAGES[:1] if name == "CLIPForImageClassification" else IMAGES


def cases() -> list[Case]:
  """Returns a case for each class."""
  return [
    Case(
      family,
      "transformers",
      name,
      functools.partial(theirs, name, options),
      _sizes(name, options),
      next((f for k, f in FILTERS.items() if name.startswith(k)), "hf"),
      "hf",
    )
    for family, models in MODELS.items()
    for name, options in models
  ]
