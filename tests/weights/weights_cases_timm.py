"""Small models of timm with random weights."""

import functools
import json
import pathlib
from typing import Any

import numpy as np
import torch_libraries
from foreign import randomise
from safetensors.numpy import load_file, save_file
from weights_table import Case, Outputs, Theirs

torch = torch_libraries.Later("torch")
timm = torch_libraries.Later("timm")
hub = torch_libraries.Later("timm.models._hub")
beit = torch_libraries.Later("timm.models.beit")

HALF = ((0.5,) * 3, (0.5,) * 3)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = (
  (0.48145466, 0.4578275, 0.40821073),
  (0.26862954, 0.26130258, 0.27577711),
)
AS_IT_IS = ((0.0,) * 3, (1.0,) * 3)  # images in [0, 1]
# Arguments of UNI and Virchow; config.json does not state the classes.
LAYER_SCALE = {"init_values": 1e-5, "num_classes": 0, "dynamic_img_size": True}
SWIGLU = {"mlp_layer": "SwiGLUPacked", "mlp_ratio": 4}
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def outputs(model: Any, images: np.ndarray, pixels) -> Outputs:
  """Returns what a model of timm's computes of images in [-1, 1]."""
  mean, std = (np.float32(x) for x in pixels)
  x = torch.from_numpy(((images + 1) / 2 - mean) / std).permute(0, 3, 1, 2)
  blocks, hooks = [], []
  for block in getattr(model, "blocks", ()):
    hooks.append(
      block.register_forward_hook(lambda *args: blocks.append(args[2].numpy()))
    )
  with torch.no_grad():
    last = model.eval()(x).numpy()
  for hook in hooks:
    hook.remove()
  return Outputs(blocks, last)


def created(name: str, **kwargs: Any) -> Any:
  """Returns a model of timm's with random weights."""
  model = timm.create_model(name, **kwargs)
  randomise(model)
  return model


def arrays_of(model: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of a model of torch's."""
  return {k: v.numpy().copy() for k, v in model.state_dict().items()}


def theirs(name: str, pixels, kwargs: dict[str, Any]) -> Theirs:
  """Returns a model of timm's, which is saved as timm pushes it to the hub."""
  if kwargs.get("mlp_layer"):
    layers = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU}
    kwargs = kwargs | layers
  model = created(name, **kwargs)
  model.pretrained_cfg = model.pretrained_cfg | {
    "mean": pixels[0], "std": pixels[1],
  }  # fmt: skip

  def save(folder: pathlib.Path) -> pathlib.Path:
    folder = folder / "timm"
    folder.mkdir()
    save_file(arrays_of(model), folder / "model.safetensors")
    classes = {k for k, v in kwargs.items() if callable(v)}
    path = folder / "config.json"
    hub.save_config_for_hf(
      model, str(path), model_args={**kwargs, **dict.fromkeys(classes)}
    )
    if classes:  # Virchow's users pass them, and its config.json pools nothing
      config = json.loads(path.read_text())
      args = config["model_args"]
      config["model_args"] = {k: args[k] for k in args.keys() - classes}
      config["model_args"]["global_pool"] = config["global_pool"] = ""
      path.write_text(json.dumps(config))
    return folder

  return Theirs(
    save,
    functools.partial(at_any_size, model, name, kwargs, pixels),
    functools.partial(reload, name, kwargs),
  )


def at_any_size(model, name, kwargs, pixels, images) -> Outputs:
  """Applies a model to images of any size; timm resizes its positions."""
  if name.startswith("beit"):
    kwargs = {**kwargs, "img_size": images.shape[1:3]}
    resized = timm.create_model(name, **kwargs)
    arrays = beit.checkpoint_filter_fn(model.state_dict(), resized)
    resized.load_state_dict(arrays)
    return outputs(resized, images, pixels)
  if name.startswith("resnetv2"):
    return outputs(model, images, pixels)
  dynamic = timm.create_model(name, **{**kwargs, "dynamic_img_size": True})
  dynamic.load_state_dict(model.state_dict())
  return outputs(dynamic, images, pixels)


def reload(name: str, kwargs: dict[str, Any], path: str) -> Theirs:
  """Returns timm's model of a file of ours."""
  import vit_jax
  from vit_jax.zoo.files import timm_names

  vit = vit_jax.load(path, verbose=False)
  assert not timm_names.differences(vit.config)
  if "img_size" in kwargs:
    kwargs = {**kwargs, "img_size": vit.image_size}
  model = timm.create_model(name, **kwargs)
  arrays = {k: torch.from_numpy(v) for k, v in load_file(path).items()}
  model.load_state_dict(arrays)
  return Theirs(None, lambda images: outputs(model, images, HALF))


SIZE = (32, 32)
SIZES = (SIZE, (48, 48), (32, 48))
P8 = {"patch_size": 8, "img_size": 32}


def small(**kwargs: Any) -> dict[str, Any]:
  """Returns arguments that make a model of timm's small."""
  return SMALL | P8 | kwargs


GAP = {"class_token": False, "global_pool": "avg", "fc_norm": False}
FULL = {"patch_size": 16, "img_size": 224}
FULL |= {"embed_dim": 768, "depth": 12, "num_heads": 12}
HYBRID = {"patch_size": 1, "img_size": 64}
# Family -> (name in timm, pixels, arguments).
MODELS = {
  "ViT": (
    ("vit_base_patch16_224", HALF, {}),
    ("vit_base_patch16_224", HALF, {"act_layer": "gelu_tanh"}),
    ("vit_base_patch16_224", HALF, {"pos_embed": "none"}),
    ("vit_base_patch16_224", HALF, {"no_embed_class": True}),
    ("vit_base_patch16_224", HALF, GAP),
    ("vit_base_patch16_224", HALF, {"img_size": [24, 32]}),
    ("vit_base_patch16_224", HALF, FULL),
  ),
  "hybrids, BiT": (
    ("vit_tiny_r_s16_p8_224", HALF, {"img_size": 64}),
    ("vit_small_r26_s32_224", HALF, HYBRID),
    ("vit_base_r50_s16_224", HALF, HYBRID),
    ("vit_base_r50_s16_224", HALF, FULL | {"patch_size": 1}),
    ("resnetv2_50x1_bit", HALF, {}),
  ),
  "DeiT, distilled": (("deit_small_distilled_patch16_224", IMAGENET, {}),),
  "DeiT III": (("deit3_small_patch16_224", IMAGENET, {}),),
  "DINOv2": (
    ("vit_small_patch14_dinov2", IMAGENET, {"num_classes": 0}),
    ("vit_giant_patch14_dinov2", IMAGENET, {"mlp_ratio": 4}),
  ),
  "DINOv2 with registers": (
    ("vit_small_patch14_reg4_dinov2", IMAGENET, {}),
    ("vit_giant_patch14_reg4_dinov2", IMAGENET, {"mlp_ratio": 4}),
  ),
  "DINOv3": (
    ("vit_small_patch16_dinov3", IMAGENET, {"global_pool": "token"}),
    ("vit_small_patch16_dinov3_qkvb", IMAGENET, {}),
    ("vit_small_plus_patch16_dinov3", IMAGENET, {"num_classes": 0}),
    ("vit_huge_plus_patch16_dinov3_qkvb", IMAGENET, {}),
    ("vit_7b_patch16_dinov3", IMAGENET, {}),
  ),
  "SigLIP, SigLIP 2": (
    ("vit_base_patch16_siglip_224", HALF, {"num_classes": 0}),
    ("vit_so400m_patch16_siglip_256", HALF, {"mlp_ratio": 4}),
    ("vit_giantopt_patch16_siglip_gap_256", HALF, {"mlp_ratio": 4}),
  ),
  "CLIP, OpenCLIP": (
    ("vit_base_patch16_clip_224", CLIP, {}),
    ("vit_base_patch32_clip_quickgelu_224", CLIP, {}),
  ),
  "MAE": (
    ("vit_base_patch16_224", IMAGENET, {"num_classes": 0}),
    ("vit_base_patch16_224", IMAGENET, {"global_pool": "avg"}),
  ),
  "FlexiViT": (("flexivit_small", HALF, {}),),
  "BEiT, BEiT v2": (
    ("beit_base_patch16_224", HALF, {}),
    ("beitv2_base_patch16_224", IMAGENET, {"num_classes": 0}),
  ),
  "EVA-02": (
    ("eva02_tiny_patch14_224", CLIP, {}),
    ("eva02_base_patch14_224", CLIP, {"global_pool": "token"}),
  ),
  "EUPE": (("vit_tiny_patch16_dinov3_qkvb", IMAGENET, {"num_classes": 0}),),
  "TIPS v2": (
    ("vit_base_patch14_reg1_tipsv2", AS_IT_IS, {"num_classes": 0}),
    ("vit_giant_patch14_reg1_tipsv2", AS_IT_IS, {"mlp_ratio": 4}),
  ),
  "timm's wee to betwixt": (
    ("vit_wee_patch16_reg1_gap_256", HALF, {}),
    ("vit_little_patch16_reg4_gap_256", HALF, {}),
  ),
  "timm's so150m": (
    ("vit_so150m_patch16_reg4_gap_256", HALF, {"mlp_ratio": 4}),
    ("vit_so150m2_patch16_reg1_gap_256", HALF, {"mlp_ratio": 4}),
  ),
  "UNI, UNI 2": (
    ("vit_large_patch16_224", IMAGENET, LAYER_SCALE),
    (
      "vit_giant_patch14_224",
      IMAGENET,
      LAYER_SCALE | SWIGLU | {"reg_tokens": 8, "no_embed_class": True},
    ),
  ),
  "Virchow, Virchow 2": (
    ("vit_huge_patch14_224", IMAGENET, LAYER_SCALE | SWIGLU),
    (
      "vit_huge_patch14_224",
      IMAGENET,
      LAYER_SCALE | SWIGLU | {"reg_tokens": 4},
    ),
  ),
}


ONLY_READ = (
  "vit_so150m_patch16_reg4_gap_256",
  "vit_so150m2_patch16_reg1_gap_256",
)


def case(family: str, name: str, pixels, kwargs: dict[str, Any]) -> Case:
  sizes = SIZES
  if family == "hybrids, BiT":
    sizes = ((64, 64), (64, 96))
  if "embed_dim" in kwargs:
    sizes = ((224, 224),)
  if isinstance(kwargs.get("img_size"), list):
    sizes = (tuple(kwargs["img_size"]), *SIZES)
  # Their tables have rows for registers, which we do not write.
  is_read = name in ONLY_READ or family.startswith("Virchow")
  kwargs = {"num_classes": 5} if "resnetv2" in name else small(**kwargs)
  return Case(
    family,
    "timm",
    name,
    functools.partial(theirs, name, pixels, kwargs),
    sizes,
    "timm",
    None if is_read and "reg" in str(kwargs) + name else "timm",
  )


def cases() -> list[Case]:
  """Returns a case for each model."""
  return [
    case(family, *model)
    for family, models in MODELS.items()
    for model in models
  ]
