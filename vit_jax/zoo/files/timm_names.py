"""timm's names for our models, and the calls that make them."""

from typing import Any, NamedTuple

from vit_jax.config import ModelConfig
from vit_jax.families.vit import Size
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


class Name(NamedTuple):
  """A model that timm has.

  name: Its name.
  size: Sizes of its Transformer.
  patch: Side of a patch, pixels.
  image: Side of its images, pixels.
  """

  name: str
  size: Size
  patch: int
  image: int = 224


class Series(NamedTuple):
  """Models of timm that differ only in their sizes.

  names: Its models.
  parts: Entries in which `_parts` of these models differs from `PLAIN`.
  kwargs: Arguments of `timm.create_model` that the names do not imply.
  """

  names: tuple[Name, ...]
  parts: dict[str, Any] = {}
  kwargs: dict[str, Any] = {}


# Parts of timm's plain ViTs, as `_parts` returns them.
PLAIN = {
  "stage_blocks": None,
  "class_tokens": 1,
  "has_cls_row": True,
  "has_layer_scale": False,
  "is_quick": False,
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

_TI, _S = Size(192, 12, 768, 3), Size(384, 12, 1536, 6)
_M, _B = Size(512, 12, 2048, 8), Size(768, 12, 3072, 12)
_L, _H = Size(1024, 24, 4096, 16), Size(1280, 32, 5120, 16)
_SMALL_G, _G = Size(1408, 40, 6144, 16), Size(1664, 48, 8192, 16)
_SO400M = Size(1152, 27, 4304, 16)
_DINOV2_G = Size(1536, 40, 4096, 24)
VIT = Series(
  (
    Name("vit_base_patch16_224", _B, 16),
    Name("vit_base_patch32_224", _B, 32),
    Name("vit_base_patch8_224", _B, 8),
    Name("vit_tiny_patch16_224", _TI, 16),
    Name("vit_small_patch16_224", _S, 16),
    Name("vit_small_patch32_224", _S, 32),
    Name("vit_small_patch8_224", _S, 8),
    Name("vit_large_patch16_224", _L, 16),
    Name("vit_large_patch32_224", _L, 32),
    Name("vit_large_patch14_224", _L, 14),
    Name("vit_huge_patch14_224", _H, 14),
    Name("vit_giant_patch14_224", _SMALL_G, 14),
    Name("vit_gigantic_patch14_224", _G, 14),
  ),
)


def _siglip(pool: str, ending: str = "") -> Series:
  names = (
    Name(f"vit_{name}_patch{patch}_siglip_{ending}{image}", size, patch, image)
    for name, size, patch, image in (
      ("base", _B, 16, 224),
      ("base", _B, 32, 256),
      ("large", _L, 16, 256),
      ("so400m", _SO400M, 14, 224),
      ("so400m", _SO400M, 16, 256),
      ("giantopt", Size(1536, 40, 6144, 16), 16, 256),
    )
  )
  parts = {"pool": pool, "class_tokens": 0, "has_cls_row": False}
  return Series(tuple(names), parts)


SIGLIP, SIGLIP_GAP = _siglip("map"), _siglip("gap", "gap_")
DEIT_DISTILLED = Series(
  tuple(
    Name(f"deit_{name}_distilled_patch16_224", size, 16)
    for name, size in (("base", _B), ("tiny", _TI), ("small", _S))
  ),
  {"class_tokens": 2},
)
DEIT3 = Series(
  (
    Name("deit3_base_patch16_224", _B, 16),
    Name("deit3_small_patch16_224", _S, 16),
    Name("deit3_medium_patch16_224", _M, 16),
    Name("deit3_large_patch16_224", _L, 16),
    Name("deit3_huge_patch14_224", _H, 14),
  ),
  {"has_cls_row": False, "has_layer_scale": True},
)


def _dinov2(ending: str, **changes) -> tuple[Series, Series]:
  """Returns DINOv2's models with GELU, and those with SwiGLU."""
  rows = (("base", _B), ("small", _S), ("large", _L), ("giant", _DINOV2_G))
  *names, giant = (
    Name(f"vit_{name}_patch14_{ending}dinov2", size, 14, 518)
    for name, size in rows
  )
  parts = {"has_layer_scale": True} | changes
  return Series(tuple(names), parts), Series((giant,), parts | _SWIGLU)


_SWIGLU = {"mlp": "swiglu"}
DINOV2 = _dinov2("") + _dinov2("reg4_", registers=4, has_cls_row=False)


def _clip(activation: str, *sizes: tuple[str, Size, int]) -> Series:
  names = (
    Name(f"vit_{name}_patch{patch}_clip_{activation}224", size, patch)
    for name, size, patch in sizes
  )
  parts = {"pre_norm": True, "is_quick": bool(activation)}
  return Series(tuple(names), parts)


_CLIP = (
  *(("base", _B, 16), ("base", _B, 32), ("large", _L, 14), ("huge", _H, 14)),
  ("gigantic", _G, 14),
)
CLIP = _clip("", *_CLIP, ("giant", _SMALL_G, 14))
CLIP_QUICK = _clip("quickgelu_", *_CLIP)


def _dinov3(ending: str, sizes: dict[str, Size], **changes) -> list[Series]:
  """Returns DINOv3's models by pool: timm's is the mean of the patches."""
  names = tuple(
    Name(f"vit_{name}_patch16_dinov3{ending}", size, 16, 256)
    for name, size in sizes.items()
  )
  parts = {
    "rope": "dinov3",
    "posemb": "none",
    "registers": 4,
    "has_cls_row": False,
    "has_layer_scale": True,
  } | changes
  token = {"global_pool": "token"}
  return [Series(names, parts | {"pool": "gap"}), Series(names, parts, token)]


_GELU_SIZES = {"base": _B, "small": _S, "large": _L}
_GATED_SIZES = {"small_plus": _S, "huge_plus": Size(1280, 32, 5120, 20)}
_7B = {"7b": Size(4096, 40, 8192, 32)}
DINOV3 = (
  *_dinov3("", _GELU_SIZES, qkv_bias="none"),
  *_dinov3("_qkvb", _GELU_SIZES | {"tiny": _TI}, qkv_bias="no_key"),
  *_dinov3("", _GATED_SIZES | _7B, **_SWIGLU, qkv_bias="none"),
  *_dinov3("_qkvb", _GATED_SIZES, **_SWIGLU, qkv_bias="no_key"),
)
_MEAN = {"pool": "gap", "final_norm": "pooled", "qkv_bias": "no_key"}


def _eva02(sizes: dict[str, Size], mlp_norm: bool) -> Series:
  names = (
    Name(f"eva02_{name}_patch14_224", size, 14) for name, size in sizes.items()
  )
  parts = {"rope": "eva02", "mlp_norm": mlp_norm}
  return Series(tuple(names), _MEAN | _SWIGLU | parts)


EVA02 = (
  _eva02(
    {"small": Size(384, 12, 1024, 6), "tiny": Size(192, 12, 512, 3)},
    mlp_norm=False,
  ),
  _eva02(
    {"base": Size(768, 12, 2048, 12), "large": Size(1024, 24, 2730, 16)},
    mlp_norm=True,
  ),
)
BEIT = Series(
  (
    Name("beit_base_patch16_224", _B, 16),
    Name("beit_large_patch16_224", _L, 16),
  ),
  _MEAN
  | {"posemb": "relative_bias", "has_cls_row": False, "has_layer_scale": True},
)
ALL = (
  *(BEIT, VIT, SIGLIP, SIGLIP_GAP, DEIT_DISTILLED, DEIT3, *DINOV2, CLIP),
  *(CLIP_QUICK, *DINOV3, *EVA02),
)

# Units of each stage, size, side of the patch on the stages' output, name.
HYBRIDS = (
  ((), _TI, 8, "vit_tiny_r_s16_p8_224"),
  ((2, 2, 2, 2), _S, 1, "vit_small_r26_s32_224"),
  ((2, 2, 2, 2), _B, 1, "vit_base_r26_s32_224"),
  ((3, 4, 9), _B, 1, "vit_base_r50_s16_224"),
  ((3, 4, 6, 3), _L, 1, "vit_large_r50_s32_224"),
)

# (units of each stage, factor of the width) -> name.
BITS = {
  ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
  ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
  ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
  ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
  ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
  ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


def known_heads(
  width: int, depth: int, mlp_dim: int, is_dinov3: bool = False
) -> tuple[int | None, str | None]:
  """Returns the heads of the known model of such a size, or an error.

  Args:
    width, depth, mlp_dim: See `Size`.
    is_dinov3: Whether it is of DINOv3, whose H+ has more heads than H.
  """
  known = [*SIZES.values()]
  known += [n.size for series in ALL for n in series.names]
  if is_dinov3:
    known.reverse()
  for size in known:
    if (size.width, size.depth, size.mlp_dim) == (width, depth, mlp_dim):
      return size.num_heads, None
  return None, (
    f"got width {width}, depth {depth} and mlp_dim {mlp_dim}, which is none of"
    f" the sizes {', '.join(SIZES)}, so that the number of"
    " attention heads is unknown. Pass num_heads."
  )


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


def _parts(model: ModelConfig) -> dict[str, Any]:
  """Returns what decides on timm's name of a model, besides its sizes."""
  parts = {k: getattr(model, k, v) for k, v in PLAIN.items()}
  if parts["posemb"] == "sincos2d":
    parts["posemb"] = "learn"  # `timm.write` writes the table
  stages = model.stages
  return parts | {
    "stage_blocks": (*stages.blocks, stages.width) if stages else None,
    "class_tokens": model.num_class_tokens,
    # `timm.write` adds the row to the token if there are registers.
    "has_cls_row": model.has_cls_row and not parts["registers"],
    "has_layer_scale": getattr(model, "layer_scale", None) is not None,
    "is_quick": model.gelu == "quick",
  }


def _key(size: Size, patch: int, parts: dict[str, Any]) -> tuple:
  return size, patch, tuple((PLAIN | parts).values())


_NAMES = {
  _key(name.size, name.patch, series.parts): (name, series.kwargs)
  for series in ALL
  for name in series.names
} | {
  _key(size, patch, {"stage_blocks": (*blocks, 1)}): (
    Name(name, size, patch),
    {},
  )
  for blocks, size, patch, name in HYBRIDS
}
_ACT_LAYERS = {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}


def create_call(
  model: ModelConfig, num_classes: int, image_size: tuple[int, int]
) -> tuple[str | None, dict[str, Any]]:
  """Returns the arguments of `timm.create_model` for the result of `write`.

  Args:
    model: A model that `write` supports.
    num_classes: Width of the head, 0 for none. The arguments contain it, and
      act_layer if there is a choice, because timm's defaults depend on the
      name.
    image_size: Height and width in pixels.

  Returns:
    A name, and keyword arguments that JSON can represent; (None, {}) if timm
    has no name for a model of these sizes and parts.

  Example:
    >>> create_call(model_config(variant="B/16"), 10, (224, 224))
    ('vit_base_patch16_224', {'num_classes': 10, 'act_layer': 'gelu_tanh'})
  """
  kwargs: dict[str, Any] = {"num_classes": num_classes}
  if model.name == "bit":
    name = BITS.get((tuple(model.stages.blocks), model.stages.width))
    return (name, kwargs) if name else (None, {})
  if model.name not in ("vit", "modern") or errors(model):
    return None, {}
  key = _key(model.size, model.patch, _parts(model))
  named, more = _NAMES.get(key, (None, {}))
  if named is None:
    return None, {}
  kwargs |= more
  if tuple(image_size) != (named.image, named.image):
    kwargs["img_size"] = list(image_size)
  if model.channels != 3:
    kwargs["in_chans"] = model.channels
  is_gated = getattr(model, "mlp", "gelu") != "gelu"
  if not (is_gated or _is_eva(model)):
    kwargs["act_layer"] = _ACT_LAYERS[model.gelu]
  return named.name, kwargs


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
