"""timm's names for our models, and the calls that make them.

The published models, with timm's names, stand in `families.PUBLISHED` and
`zoo.families.later.LATER`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from vit_jax.config import ModelConfig
from vit_jax.families import PUBLISHED, by_variant
from vit_jax.zoo.families.later import LATER
from vit_jax.zoo.families.modern import SIZES
from vit_jax.zoo.files.torch_layout import option_errors

LN_EPS = 1e-6
CLIP_LN_EPS = 1e-5  # of CLIP and DINOv3
RESNET = {"gn_eps": 1e-5, "ws_eps": 1e-8, "ws_eps_on": "var"}
# Options -> values that timm's classes support: VisionTransformer, those of the
# family "modern", and of EVA-02.
OPTIONS = {"posemb": ("learn", "sincos2d", "none"), "posemb_at": ("stem",)}
MODERN_OPTIONS = {
  "pool": ("token", "gap", "map"),
  "projection": (None,),
  "rope_periods": ("float32",),
}
_ROPE = {
  "pool": ("token", "gap"),
  "class_token": (True,),
  "distilled": (False,),
  "pre_norm": (False,),
  "final_norm": ("tokens", "pooled"),
}
ROPE_OPTIONS = {
  "dinov3": _ROPE
  | {
    "qkv_bias": ("no_key", "none"),
    "posemb": ("none",),
    "mlp_norm": (False,),
  },
  "eva02": _ROPE
  | {
    "qkv_bias": ("no_key",),
    "posemb": ("learn",),
    "mlp": ("swiglu",),
    "layer_scale": (None,),
    "registers": (0,),
  },
  None: {"qkv_bias": ("all", "none"), "mlp_norm": (False,)},
}
BEIT_OPTIONS = _ROPE | {
  "qkv_bias": ("no_key",),
  "posemb": ("relative_bias",),
  "mlp": ("gelu",),
  "mlp_norm": (False,),
}


# Parts of timm's plain ViTs, as `_key` compares them.
PLAIN = {
  "stage_blocks": None,
  "class_tokens": 1,
  "has_cls_row": True,
  "has_layer_scale": False,
  "pool": "token",
  "posemb": "learn",
  "rope": None,
  "registers": 0,
  "pre_norm": False,
  "final_norm": "tokens",
  "qkv_bias": "all",
  "mlp": "gelu",
  "mlp_norm": False,
}


def published() -> Iterator[tuple[ModelConfig, tuple[str, ...]]]:
  """Yields the published models, and timm's names of each."""
  models = [(by_variant(v), files) for v, files in PUBLISHED.items()]
  models += [
    (later.model(variant), files)
    for later in LATER.values()
    for variant, files in later.files.items()
  ]
  for model, files in models:
    names = [f.partition(" ") for f in files]
    yield (
      model,
      tuple(n.partition(".")[0] for kind, _, n in names if "timm" in kind),
    )


def known_heads(
  width: int, depth: int, mlp_dim: int, is_dinov3: bool = False
) -> tuple[int | None, str | None]:
  """Returns the heads of the known model of such a size, or an error.

  Args:
    width, depth, mlp_dim: See `Size`.
    is_dinov3: Whether it is of DINOv3, whose H+ has more heads than H.
  """
  later = [model.size for model, _ in published() if model.name != "bit"]
  known = [SIZES["H+"]] * is_dinov3 + [*SIZES.values(), *later]
  for size in known:
    if (size.width, size.depth, size.mlp_dim) == (width, depth, mlp_dim):
      return size.num_heads, None
  got = f"width {width}, depth {depth} and mlp_dim {mlp_dim}"
  return None, f"got {got}, of no known number of heads. Pass num_heads."


def _is_eva(model: ModelConfig) -> bool:
  """Whether timm's class is Eva or Beit, which have no argument act_layer."""
  rope = getattr(model, "rope", None)
  return rope is not None or model.posemb == "relative_bias"


def errors(model: ModelConfig) -> list[str]:
  """Returns the options of a Transformer that timm has no model for."""
  supported = OPTIONS
  if model.name == "modern":
    options = ROPE_OPTIONS[model.rope]
    if model.posemb == "relative_bias":
      options = BEIT_OPTIONS
    supported = OPTIONS | MODERN_OPTIONS | options
    supported |= {"patch_bias": (not model.pre_norm,)}
    if _is_eva(model) and model.mlp == "gelu":
      supported |= {"gelu": ("erf",)}
    if model.distilled:
      supported |= {"registers": (0,)}
  return option_errors(model, supported)


def _key(model: ModelConfig) -> tuple:
  """Returns what decides on timm's name of a model."""
  stages = model.stages
  blocks = (*stages.blocks, stages.width) if stages else None
  if model.name == "bit":
    return blocks
  parts = {k: getattr(model, k, v) for k, v in PLAIN.items()}
  if parts["posemb"] == "sincos2d":
    parts["posemb"] = "learn"  # `timm.write` writes the table
  if parts["rope"] == "dinov3":
    parts["pool"] = None  # an argument
  parts |= {
    "stage_blocks": blocks,
    "class_tokens": model.num_class_tokens,
    # `timm.write` adds the row to the token if there are registers.
    "has_cls_row": model.has_cls_row and not parts["registers"],
    "has_layer_scale": getattr(model, "layer_scale", None) is not None,
  }
  return model.size, model.patch, tuple(parts.values())


@functools.cache
def _names() -> dict[tuple, str]:
  """Returns the key of each published model, and timm's name."""
  names: dict[tuple, str] = {}
  for model, theirs in published():
    for name in theirs:
      names.setdefault(_key(model), name)
      # The same without biases; timm has no such model of EUPE's size Ti.
      if "_qkvb" in name and "tiny" not in name:
        bare = dataclasses.replace(model, qkv_bias="none")
        names.setdefault(_key(bare), name.replace("_qkvb", ""))
  return names


_ACT_LAYERS = {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}


def create_call(
  model: ModelConfig, num_classes: int, image_size: tuple[int, int]
) -> tuple[str | None, dict[str, Any]]:
  """Returns the arguments of `timm.create_model` for the result of `write`.

  Args:
    model: A model that `write` supports.
    num_classes: Width of the head, 0 for none.
    image_size: Height and width in pixels.

  Returns:
    A name, and keyword arguments that JSON can represent. What timm's names
    have different defaults for is always among them. (None, {}) if timm has no
    name for a model of these sizes and parts.

  Example:
    >>> create_call(by_variant("B/16"), 10, (224, 224))[0]
    'vit_base_patch16_224'
  """
  kwargs: dict[str, Any] = {"num_classes": num_classes}
  if model.name not in ("bit", "vit", "modern"):
    return None, {}
  name = _names().get(_key(model))
  if name is None or model.name == "bit":
    return (name, kwargs) if name else (None, {})
  if errors(model):
    return None, {}
  kwargs["img_size"] = list(image_size)
  if model.channels != 3:
    kwargs["in_chans"] = model.channels
  if getattr(model, "rope", None) == "dinov3":
    kwargs["global_pool"] = "avg" if model.pool == "gap" else model.pool
  is_gated = getattr(model, "mlp", "gelu") != "gelu"
  if not (is_gated or _is_eva(model)):
    kwargs["act_layer"] = _ACT_LAYERS[model.gelu]
  return name, kwargs


def ln_eps(model: ModelConfig) -> float:
  """Returns LayerNorm's epsilon in timm's model of `create_call`."""
  is_clip = getattr(model, "pre_norm", False)
  is_dinov3 = getattr(model, "rope", None) == "dinov3"
  return CLIP_LN_EPS if is_clip or is_dinov3 else LN_EPS


def differences(model: ModelConfig) -> list[str]:
  """Returns a text for each constant that differs in the library's model.

  Constants of timm's models; LayerNorm's is Meta's and OpenCLIP's, too. Without
  a difference, both models compute the same numbers, up to rounding.
  """
  theirs: dict[str, Any] = {}
  ours: dict[str, Any] = {}
  if model.name in ("vit", "modern"):
    theirs["ln_eps"], ours["ln_eps"] = ln_eps(model), model.ln_eps
  if model.stages is not None:
    theirs |= RESNET
    ours |= dict(zip(RESNET, model.norms, strict=True))
  if model.name == "bit":
    theirs["root_pad"], ours["root_pad"] = "zero", model.root_pad
  return [
    f"config.model.{key}={ours[key]} here, {value} in the library's model: it"
    " computes other numbers"
    for key, value in theirs.items()
    if ours[key] != value
  ]
