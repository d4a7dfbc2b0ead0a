"""Writes a model for transformers: its arrays and its config.json.

A class of transformers is a line in `CLASSES`. `hf_names.py` has the names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import ModelConfig
from vit_jax.losses import REGRESSION
from vit_jax.models.posemb import sincos2d
from vit_jax.options import unexpected
from vit_jax.weights.weights_file import POS_EMBEDDING
from vit_jax.zoo.files import hf_names
from vit_jax.zoo.files.hf import MULTI_LABEL
from vit_jax.zoo.files.hf_names import MODEL_TYPES
from vit_jax.zoo.files.torch_layout import option_errors, to_theirs

HIDDEN_ACTS = {
  "erf": "gelu",
  "tanh": "gelu_pytorch_tanh",
  "quick": "quick_gelu",
}
# Our options -> their values in a ViT of transformers.
_PLAIN = {
  "pool": ("token",),
  "posemb": ("learn", "sincos2d", "none"),
  "posemb_at": ("stem",),
  "pre_logits": (False,),
  "rope": (None,),
  "class_token": (True,),
  "registers": (0,),
  "distilled": (False,),
  "patch_bias": (True,),
  "pre_norm": (False,),
  "final_norm": ("tokens",),
  "layer_scale": (None,),
  "qkv_bias": ("all",),
  "mlp": ("gelu",),
  "mlp_norm": (False,),
  "projection": (None,),
}


def _plain(*free: str, **values: tuple) -> dict[str, tuple]:
  """Returns `_PLAIN` without the options that may have any value."""
  return {k: v for k, v in _PLAIN.items() if k not in free} | values


class Class(NamedTuple):
  """A class of transformers, and the models of ours that it can compute.

  model_type: Its model type, a key of `hf_names.MODEL_TYPES`.
  options: Our options -> values that it supports; other options are free.
    With `layer_scale` free, the model must have factors.
  config: Model -> entries of config.json in addition to `_sizes`.
  names: Number of the model type's key table.
  two_towers: The `model_type` of a class whose config.json has the tower in
    `vision_config`.
  """

  model_type: str
  options: Mapping[str, tuple]
  config: Callable[[ModelConfig], dict[str, Any]]
  names: int = 0
  two_towers: str | None = None


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _of_vit(model: ModelConfig) -> dict[str, Any]:
  del model
  return {"qkv_bias": True, "pooler_act": "tanh", **_NO_DROPOUT}


def _of_tower(model: ModelConfig) -> dict[str, Any]:
  del model
  return {"attention_dropout": 0.0}


def _of_clip(model: ModelConfig) -> dict[str, Any]:
  projection = {"projection_dim": model.projection} if model.projection else {}
  return {"attention_dropout": 0.0, **projection}


def _of_dinov2(model: ModelConfig) -> dict[str, Any]:
  is_gated = model.mlp == "swiglu"
  config = {
    "mlp_ratio": _mlp_ratio(model.size.width, model.size.mlp_dim, is_gated),
    "use_swiglu_ffn": is_gated,
    "layerscale_value": model.layer_scale,
    "qkv_bias": True,
    **_NO_DROPOUT,
  }
  registers = {"num_register_tokens": model.registers}
  return config | (registers if model.registers else {"use_mask_token": False})


def _mlp_ratio(width: int, mlp_dim: int, is_gated: bool) -> int | None:
  """Returns DINOv2's ratio of hidden width to width; None if there is none."""
  for ratio in range(1, 33):
    hidden = width * ratio
    if is_gated:
      hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
    if hidden == mlp_dim:
      return ratio
  return None


def _of_dinov3(model: ModelConfig) -> dict[str, Any]:
  is_gated = model.mlp == "swiglu"
  config = {
    "use_gated_mlp": is_gated,
    "num_register_tokens": model.registers,
    "layerscale_value": model.layer_scale,
    "query_bias": model.qkv_bias != "none",
    "key_bias": model.qkv_bias == "all",
    "value_bias": model.qkv_bias != "none",
    "rope_theta": 100.0,
    "attention_dropout": 0.0,
  }
  return config | ({"hidden_act": "silu"} if is_gated else {})


def _of_beit(model: ModelConfig) -> dict[str, Any]:
  return {
    "use_relative_position_bias": True,
    "use_mean_pooling": True,
    "layer_scale_init_value": model.layer_scale,
    "drop_path_rate": 0.0,
    **_NO_DROPOUT,
  }


_DINOV2 = {"layer_scale", "mlp"}
_WITH_SECOND = {"registers": (1,)}
_NO_TOKEN = {"class_token": (False,)}
_IJEPA = _plain(pool=("gap",), **_NO_TOKEN)
_BEIT = _plain(
  "layer_scale",
  pool=("gap",),
  qkv_bias=("no_key",),
  posemb=("relative_bias",),
  final_norm=("pooled",),
)
# Of several classes that compute a model, the first one is written.
CLASSES = {
  "ViTModel": Class("vit", _plain("pre_logits"), _of_vit),
  "ViTForImageClassification": Class("vit", _plain(), _of_vit),
  "IJepaModel": Class("ijepa", _IJEPA, _of_vit),
  "IJepaForImageClassification": Class("ijepa", _IJEPA, _of_vit),
  "SiglipVisionModel": Class(
    "siglip_vision_model", _plain(pool=("map",), **_NO_TOKEN), _of_tower
  ),
  "DeiTModel": Class("deit", _plain("pre_logits", **_WITH_SECOND), _of_vit),
  "DeiTForImageClassification": Class("deit", _plain(**_WITH_SECOND), _of_vit),
  "DeiTForImageClassificationWithTeacher": Class(
    "deit", _plain(distilled=(True,)), _of_vit, names=1
  ),
  "Dinov2Model": Class("dinov2", _plain(*_DINOV2), _of_dinov2),
  "Dinov2ForImageClassification": Class(
    "dinov2", _plain(*_DINOV2, pool=("token_gap",)), _of_dinov2
  ),
  "Dinov2WithRegistersModel": Class(
    "dinov2_with_registers", _plain(*_DINOV2, "registers"), _of_dinov2
  ),
  "Dinov2WithRegistersForImageClassification": Class(
    "dinov2_with_registers",
    _plain(*_DINOV2, "registers", pool=("token_gap",)),
    _of_dinov2,
  ),
  "DINOv3ViTModel": Class(
    "dinov3_vit",
    _plain(
      *(*_DINOV2, "registers", "qkv_bias"),
      rope=("dinov3",),
      posemb=("none",),
      rope_periods=("float32",),
    ),
    _of_dinov3,
  ),
  "BeitModel": Class("beit", _BEIT, _of_beit),
  "BeitForImageClassification": Class("beit", _BEIT, _of_beit),
  "CLIPVisionModel": Class(
    "clip_vision_model", _plain("patch_bias", pre_norm=(True,)), _of_clip
  ),
  "CLIPVisionModelWithProjection": Class(
    "clip_vision_model",
    _plain("patch_bias", "projection", pre_norm=(True,)),
    _of_clip,
  ),
  "CLIPForImageClassification": Class(
    "clip_vision_model",
    _plain("patch_bias", pre_norm=(True,), pool=("gap",), final_norm=("none",)),
    _of_clip,
    two_towers="clip",
  ),
}


def class_of(model: ModelConfig, has_head: bool) -> str:
  """Returns the class that computes a model, or the nearest one.

  Args:
    model: A ViT, of the family `vit` or `modern`.
    has_head: Whether it has a head.
  """
  names = [n for n in CLASSES if ("Classification" in n) == has_head]
  return min(names, key=lambda name: len(_class_errors(model, name)))


def _class_errors(model: ModelConfig, name: str) -> list[str]:
  """Returns the options of a model that a class does not compute."""
  options = CLASSES[name].options
  errors = option_errors(
    model, {k: v for k, v in options.items() if hasattr(model, k)}
  )
  if "layer_scale" not in options:
    if getattr(model, "layer_scale", None) is None:
      errors.append(unexpected("config.model.layer_scale", None, "a number"))
    elif name.startswith("Dinov2") and _of_dinov2(model)["mlp_ratio"] is None:
      got, wanted = model.size.mlp_dim, "a whole ratio, as in DINOv2"
      errors.append(unexpected("config.model.mlp_dim", got, wanted))
  return errors


def write(
  params: Mapping[str, Any],
  model: ModelConfig,
  *,
  num_classes: int,
  image_size: tuple[int, int],
  class_names: Sequence[str] | None = None,
  grid: tuple[int, int] | None = None,
  loss: str = "softmax",
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns arrays and config.json.

  `from_pretrained` of the class that config.json names loads a folder with
  both, and with the result of `hf_preprocessing.write`. A ViT without a head is
  a `ViTModel`, whose pooler is our pre_logits. A position table without a row
  for the class token gets a row of zeros, which changes nothing. Fixed
  positions, or none, become a learned table. The safetensors file needs the
  metadata {"format": "pt"}.

  Args:
    params: Our flat names -> arrays; blocks not stacked.
    model: Model of the parameters.
    num_classes: Width of the head, if `params` has one.
    image_size: Height and width in pixels.
    class_names: Names in the order of the logits; None for LABEL_0, LABEL_1 ...
    grid: Rows and columns of patches; None for those of `image_size`.
    loss: Training loss of the head. It decides how transformers turns logits
      into probabilities.

  Raises:
    ValueError: The model has parts that transformers' models lack. All errors
      at once.
  """
  params = dict(params)
  has_head = "head/kernel" in params
  errors = _errors(params, model)
  if class_names is not None and len(class_names) != num_classes:
    errors.append(unexpected("class_names", len(class_names), str(num_classes)))
  if errors:
    raise ValueError(_cannot(errors))
  name = class_of(model, has_head)
  written, family = CLASSES[name], MODEL_TYPES[CLASSES[name].model_type]
  names = family.names[written.names]
  if getattr(model, "mlp", "gelu") == "swiglu":
    names = family.names[-1]
  if "name" not in family.options:  # BEiT and DINOv3 have none
    params[POS_EMBEDDING] = _table(
      params, model, grid or model.grid(image_size)
    )
  _move_to_theirs(params, name)
  rows = names.in_files(model.size.depth)
  arrays, errors = to_theirs(rows, params)
  if errors:
    raise ValueError(_cannot(errors))
  arrays = _blank(name, model.size.width) | arrays
  if has_head or "visual_projection.weight" in arrays:
    arrays = {_with_prefix(n, family): array for n, array in arrays.items()}
  config = {
    "architectures": [name],
    "model_type": written.model_type,
    **_sizes(params, model),
    "image_size": _side_or_sides(image_size),
    **written.config(model),
  }
  if written.two_towers:
    tower = {k: v for k, v in config.items() if k != "architectures"}
    config = {"architectures": [name], "model_type": written.two_towers}
    config["vision_config"] = tower
  if has_head:
    labels = class_names or [f"LABEL_{i}" for i in range(num_classes)]
    config["id2label"] = {str(i): label for i, label in enumerate(labels)}
    config["label2id"] = {label: i for i, label in enumerate(labels)}
    if loss == REGRESSION:
      config["problem_type"] = loss
    elif loss != "softmax":
      config["problem_type"] = MULTI_LABEL
  return arrays, config


def _cannot(errors: list[str]) -> str:
  lines = "\n".join(f"  - {error}" for error in errors)
  return f"transformers' models cannot hold this model:\n{lines}"


def _errors(params: Mapping[str, Any], model: ModelConfig) -> list[str]:
  """Returns the parts that transformers' models lack."""
  if errors := option_errors(model, {"name": ("vit", "modern")}):
    return errors
  if model.stages is not None:
    got = f"the hybrid {model.variant!r}"
    return [unexpected("config.model.variant", got, "a ViT on pixels")]
  has_head = "head/kernel" in params
  name = class_of(model, has_head)
  errors = _class_errors(model, name)
  if errors:
    errors[-1] += f" The nearest class is {name}."
  if errors and has_head:
    errors[-1] += " There may be one without a head: --drop_head."
  return errors


def _table(params, model: ModelConfig, grid) -> np.ndarray:
  """Returns the position table, with a row for every class token."""
  width = model.size.width
  if model.posemb == "learn":
    table = np.asarray(params[POS_EMBEDDING])
  elif model.posemb == "sincos2d":
    table = sincos2d(*grid, width)[None]
  else:
    table = np.zeros((1, math.prod(grid), width), np.float32)
  num_missing = model.num_class_tokens - model.num_class_rows
  return np.pad(table, ((0, 0), (num_missing, 0), (0, 0)))


def _move_to_theirs(params: dict[str, Any], name: str) -> None:
  """Moves arrays to where a class expects them, in place.

  CLIP's patches have no bias, so the bias becomes part of the positions. DeiT's
  classes with one head do not read their distillation token; it is a register
  here, and gets a position of zeros.
  """
  if name.startswith("CLIP") and "embedding/bias" in params:
    table = np.array(params[POS_EMBEDDING])
    table[:, 1:] += np.asarray(params.pop("embedding/bias"))
    params[POS_EMBEDDING] = table
  if name.startswith("DeiT") and "registers" in params:
    params["dist"] = params.pop("registers")
    params[POS_EMBEDDING] = np.insert(params[POS_EMBEDDING], 1, 0, axis=1)


def _blank(name: str, width: int) -> dict[str, np.ndarray]:
  """Returns arrays that a class expects but does not use for its output."""
  if name == "CLIPForImageClassification":
    leaves = {"weight": np.ones, "bias": np.zeros}
    return {
      f"post_layernorm.{leaf}": make(width, np.float32)
      for leaf, make in leaves.items()
    }
  shapes = {}
  if name.startswith("Dinov2WithRegisters"):
    shapes = {"mask_token": (1, width)}
  if name.startswith("DINOv3"):
    shapes = {"mask_token": (1, 1, width), "register_tokens": (1, 0, width)}
  return {f"embeddings.{k}": np.zeros(v, np.float32) for k, v in shapes.items()}


# Modules beside a prefixed tower.
_BESIDE = (
  "classifier.",
  "cls_classifier.",
  "distillation_classifier.",
  "visual_projection.",
)


def _with_prefix(name: str, family: hf_names.ModelType) -> str:
  return name if name.startswith(_BESIDE) else family.prefixes[0] + name


def _sizes(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
  """Returns the part of config.json that all model types have."""
  sizes = model.size
  return {
    "hidden_size": sizes.width,
    "num_hidden_layers": sizes.depth,
    "num_attention_heads": sizes.num_heads,
    "intermediate_size": sizes.mlp_dim,
    "hidden_act": HIDDEN_ACTS[model.gelu],
    "layer_norm_eps": model.ln_eps,
    "patch_size": model.patch,
    "num_channels": int(params["embedding/kernel"].shape[2]),
    "encoder_stride": model.patch,
  }


def _side_or_sides(image_size: tuple[int, int]) -> int | list[int]:
  height, width = image_size
  return height if height == width else [height, width]
