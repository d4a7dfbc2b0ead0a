"""Files of Meta and OpenCLIP: timm's models with random weights, renamed.

timm's models have the outputs of the publishers' code. The arrays have the form
of the published files, with additional arrays of pre-training or of the text
tower.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch_libraries
import weights_cases_timm
from safetensors.numpy import save_file
from weights_cases_timm import CLIP, IMAGENET, SIZES, small
from weights_table import Case, Theirs

torch = torch_libraries.Later("torch")
Arrays = dict[str, Any]


def _plain(arrays: Arrays) -> Arrays:
  return arrays


def _deit3(arrays: Arrays) -> Arrays:
  return {
    re.sub(r"ls(\d)\.gamma", r"gamma_\1", k): v for k, v in arrays.items()
  }


def _mae(arrays: Arrays) -> Arrays:
  """Adds the decoder; the class token's position is zero."""
  arrays["pos_embed"][:, 0] = 0
  names = ("mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.weight")
  return arrays | {name: torch.ones(1, 1, 8) for name in names}


def _dinov2(arrays: Arrays) -> Arrays:
  """Undoes what timm's import does: a row for cls, names of SwiGLU."""
  arrays = {
    k.replace("reg_token", "register_tokens"): v for k, v in arrays.items()
  }
  if "register_tokens" in arrays:
    row = torch.ones_like(arrays["cls_token"])
    arrays["cls_token"] = arrays["cls_token"] - row
    arrays["pos_embed"] = torch.cat([row, arrays["pos_embed"]], 1)
  width = arrays["cls_token"].shape[-1]
  if arrays["blocks.0.mlp.fc1.weight"].shape[0] == (
    2 * arrays["blocks.0.mlp.fc2.weight"].shape[1]
  ):
    names = {"fc1": "w12", "fc2": "w3"}
    arrays = {
      re.sub(r"mlp\.(fc\d)", lambda m: f"mlp.{names[m[1]]}", k): v
      for k, v in arrays.items()
    }
  return arrays | {"mask_token": torch.ones(1, width)}


def _dinov3(arrays: Arrays) -> Arrays:
  """Undoes what timm's import does: one bias with a mask, periods."""
  swiglu = {"fc1_g": "w1", "fc1_x": "w2", "fc2": "w3"}
  if "blocks.0.mlp.fc1_g.weight" not in arrays:
    swiglu = {}
  result, width = {}, arrays["cls_token"].shape[-1]
  for name, array in arrays.items():
    name = name.replace("reg_token", "storage_tokens")
    name = re.sub(r"gamma_(\d)", r"ls\1.gamma", name)
    name = re.sub(
      r"mlp\.(\w+)", lambda m: f"mlp.{swiglu.get(m[1], m[1])}", name
    )
    if name.endswith("v_bias"):
      continue
    if name.endswith("q_bias"):
      key = torch.full_like(array, 9.0)  # what the mask takes away
      bias = [array, key, arrays[name.replace("q_bias", "v_bias")]]
      ones = torch.ones_like(array)
      qkv = name.replace("q_bias", "qkv.bias")
      result[qkv] = torch.cat(bias)
      result[qkv + "_mask"] = torch.cat([ones, 0 * ones, ones])
    else:
      result[name] = array
  periods = 100 ** (torch.arange(4) / 4)  # of heads of 16
  return result | {
    "mask_token": torch.ones(1, width),
    "rope_embed.periods": periods,
    "local_cls_norm.weight": torch.ones(width),
  }


# Family -> (name in timm, arguments, how the arrays are renamed, containers).
MODELS: dict[str, tuple[tuple[str, dict, Callable, tuple[str, ...]], ...]] = {
  "DeiT, distilled": (
    ("deit_small_distilled_patch16_224", {}, _plain, ("model",)),
  ),
  "DeiT III": (("deit3_small_patch16_224", {}, _deit3, ("model",)),),
  "DINOv2": (
    ("vit_small_patch14_dinov2", {"num_classes": 0}, _dinov2, ()),
    ("vit_giant_patch14_dinov2", {"mlp_ratio": 4}, _dinov2, ()),
  ),
  "DINOv2 with registers": (
    ("vit_small_patch14_reg4_dinov2", {}, _dinov2, ("teacher",)),
    ("vit_giant_patch14_reg4_dinov2", {"mlp_ratio": 4}, _dinov2, ()),
  ),
  "DINOv3": tuple(
    (
      f"vit_{name}_patch16_dinov3{ending}",
      {"global_pool": "token", "num_classes": 0},
      _dinov3,
      containers,
    )
    for name, ending, containers in (
      ("small", "_qkvb", ()),
      ("small_plus", "_qkvb", ("teacher",)),
      ("7b", "", ()),
    )
  ),
  "MAE": (("vit_base_patch16_224", {"num_classes": 0}, _mae, ("model",)),),
}


def _theirs(name, kwargs, rename, containers) -> Theirs:
  model = weights_cases_timm.created(name, **kwargs)
  if rename is _mae:
    model.pos_embed.data[:, 0] = 0

  def save(folder: pathlib.Path) -> pathlib.Path:
    tree = rename(dict(model.state_dict()))
    if containers:
      tree = {f"backbone.{k}": v for k, v in tree.items()}
    for key in containers:
      tree = {key: tree, "epoch": 3}
    torch.save(tree, folder / "meta.pth")
    return folder / "meta.pth"

  outputs = functools.partial(
    weights_cases_timm.at_any_size, model, name, kwargs, IMAGENET
  )
  return Theirs(save, outputs)


def _openclip(name: str, kwargs, is_quick: bool) -> Theirs:
  """Returns CLIP's image tower among arrays of texts."""
  model = weights_cases_timm.created(name, **kwargs)
  model.head.bias.data[:] = 0  # the projection of images has none
  names = {
    "cls_token": "class_embedding",
    "pos_embed": "positional_embedding",
    "patch_embed.proj.weight": "conv1.weight",
    "head.weight": "proj",
  }
  parts = (
    *((r"^norm_pre\.", "ln_pre."), (r"^norm\.", "ln_post.")),
    *((r"\.norm(\d)\.", r".ln_\1."), (r"attn\.qkv\.", "attn.in_proj_")),
    *((r"attn\.proj\.", "attn.out_proj."), (r"mlp\.fc1\.", "mlp.c_fc.")),
    *((r"mlp\.fc2\.", "mlp.c_proj."), (r"^blocks\.", "transformer.resblocks.")),
  )

  def save(folder: pathlib.Path) -> pathlib.Path:
    arrays = {}
    for key, array in model.state_dict().items():
      if key == "head.bias":
        continue
      for regex, text in parts:
        key = re.sub(regex, text, key)
      array = array.T if key == "head.weight" else array
      array = array.reshape(-1) if key == "cls_token" else array
      array = array[0] if key == "pos_embed" else array
      arrays[f"visual.{names.get(key, key)}"] = array.contiguous().numpy()
    texts = ("token_embedding.weight", "transformer.resblocks.0.ln_1.weight")
    arrays |= {n: np.ones((2, 2), "f") for n in (*texts, "logit_scale")}
    folder = folder / "openclip"
    folder.mkdir()
    save_file(arrays, folder / "open_clip_model.safetensors")
    config = {
      "model_cfg": {"quick_gelu": is_quick},
      "preprocess_cfg": {"size": 32, "mean": CLIP[0], "std": CLIP[1]},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder

  outputs = functools.partial(
    weights_cases_timm.at_any_size, model, name, kwargs, CLIP
  )
  return Theirs(save, outputs)


OPENCLIP = {
  "vit_base_patch16_clip_224": False,
  "vit_base_patch32_clip_quickgelu_224": True,
}


def cases() -> list[Case]:
  """Returns a case for each model."""
  return [
    Case(
      family,
      "Meta",
      name,
      functools.partial(_theirs, name, small(**kwargs), rename, containers),
      SIZES,
      "timm",
      "meta",
      {"num_heads": 2},
    )
    for family, models in MODELS.items()
    for name, kwargs, rename, containers in models
  ] + [
    Case(
      "CLIP, OpenCLIP",
      "OpenCLIP",
      name,
      functools.partial(_openclip, name, small(), is_quick),
      SIZES,
      "timm",
      "openclip",
      {"num_heads": 2},
    )
    for name, is_quick in OPENCLIP.items()
  ]
