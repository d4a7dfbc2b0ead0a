"""timm's names for our models, and the calls that make them."""

import math
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
  "gelu": ("erf",),
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

  names: The first one is also used for models of other sizes.
  defaults: Keywords of the call for which a model may differ, with their
    defaults.
  is_eva: Whether the class is Eva, which has other keywords.
  """

  names: tuple[Name, ...]
  defaults: dict[str, Any]
  is_eva: bool = False


_TI, _S = Size(192, 12, 768, 3), Size(384, 12, 1536, 6)
_M, _B = Size(512, 12, 2048, 8), Size(768, 12, 3072, 12)
_L, _H = Size(1024, 24, 4096, 16), Size(1280, 32, 5120, 16)
_SMALL_G, _G = Size(1408, 40, 6144, 16), Size(1664, 48, 8192, 16)
_SO400M = Size(1152, 27, 4304, 16)
_DINOV2_G = Size(1536, 40, 4096, 24)
_TOKEN = {
  "global_pool": "token",
  "class_token": True,
  "reg_tokens": 0,
  "no_embed_class": False,
}
_MAP = _TOKEN | {"global_pool": "map", "class_token": False}

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
  _TOKEN,
)
SIGLIP = Series(
  (
    Name("vit_so400m_patch14_siglip_224", _SO400M, 14),
    Name("vit_giantopt_patch16_siglip_256", Size(1536, 40, 6144, 16), 16, 256),
  ),
  _MAP,
)
DEIT_DISTILLED = Series(
  tuple(
    Name(f"deit_{name}_distilled_patch16_224", size, 16)
    for name, size in (("base", _B), ("tiny", _TI), ("small", _S))
  ),
  _TOKEN,
)
DEIT3 = Series(
  (
    Name("deit3_base_patch16_224", _B, 16),
    Name("deit3_small_patch16_224", _S, 16),
    Name("deit3_medium_patch16_224", _M, 16),
    Name("deit3_large_patch16_224", _L, 16),
    Name("deit3_huge_patch14_224", _H, 14),
  ),
  _TOKEN | {"no_embed_class": True, "init_values": True},
)


def _dinov2(registers: str, **changes) -> tuple[Series, Series]:
  """Returns DINOv2's models with GELU, and those with SwiGLU."""
  rows = (("base", _B), ("small", _S), ("large", _L), ("giant", _DINOV2_G))
  *names, giant = (
    Name(f"vit_{name}_patch14_{registers}dinov2", size, 14, 518)
    for name, size in rows
  )
  defaults = _TOKEN | {"init_values": True} | changes
  return Series(tuple(names), defaults), Series((giant,), defaults)


DINOV2, DINOV2_SWIGLU = _dinov2("")
DINOV2_REG, DINOV2_REG_SWIGLU = _dinov2(
  "reg4_", reg_tokens=4, no_embed_class=True
)


def _clip(activation: str, *sizes: tuple[str, Size, int]) -> Series:
  names = (
    Name(f"vit_{name}_patch{patch}_clip_{activation}224", size, patch)
    for name, size, patch in sizes
  )
  return Series(tuple(names), _TOKEN | {"pre_norm": True})


_CLIP = (
  *(("base", _B, 16), ("base", _B, 32), ("large", _L, 14), ("huge", _H, 14)),
  ("gigantic", _G, 14),
)
CLIP = _clip("", *_CLIP, ("giant", _SMALL_G, 14))
CLIP_QUICK = _clip("quickgelu_", *_CLIP)

_EVA = {"global_pool": "avg", "num_reg_tokens": 0, "use_fc_norm": None}


def _dinov3(ending: str, *sizes: tuple[str, Size]) -> Series:
  names = (
    Name(f"vit_{name}_patch16_dinov3{ending}", size, 16, 256)
    for name, size in sizes
  )
  changes = {"num_reg_tokens": 4, "use_fc_norm": False, "init_values": True}
  return Series(tuple(names), _EVA | changes, is_eva=True)


_GELU = (("base", _B), ("small", _S), ("large", _L))
_SWIGLU = (("small_plus", _S), ("huge_plus", Size(1280, 32, 5120, 20)))
# (form of the MLP, biases of query, key and value) -> DINOv3's models.
DINOV3 = {
  ("gelu", "none"): _dinov3("", *_GELU),
  ("gelu", "no_key"): _dinov3("_qkvb", *_GELU, ("tiny", _TI)),
  ("swiglu", "none"): _dinov3("", *_SWIGLU, ("7b", Size(4096, 40, 8192, 32))),
  ("swiglu", "no_key"): _dinov3("_qkvb", *_SWIGLU),
}
# Whether the MLP has a norm -> EVA-02's models.
EVA02 = {
  False: Series(
    (
      Name("eva02_small_patch14_224", Size(384, 12, 1024, 6), 14),
      Name("eva02_tiny_patch14_224", Size(192, 12, 512, 3), 14),
    ),
    _EVA,
    is_eva=True,
  ),
  True: Series(
    (
      Name("eva02_base_patch14_224", Size(768, 12, 2048, 12), 14),
      Name("eva02_large_patch14_224", Size(1024, 24, 2730, 16), 14),
    ),
    _EVA,
    is_eva=True,
  ),
}
BEIT = Series(
  (
    Name("beit_base_patch16_224", _B, 16),
    Name("beit_large_patch16_224", _L, 16),
  ),
  {"global_pool": "avg", "use_fc_norm": None, "init_values": True},
)
ALL = (
  BEIT,
  *(VIT, SIGLIP, DEIT_DISTILLED, DEIT3, DINOV2, DINOV2_SWIGLU, DINOV2_REG),
  *(DINOV2_REG_SWIGLU, CLIP, CLIP_QUICK, *DINOV3.values(), *EVA02.values()),
)

# (units of each stage, size, side of the patch on the stages' output) -> name;
# the first one of the same stages stands for other sizes.
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


def errors(model: ModelConfig) -> list[str]:
  """Returns the options of a Transformer that timm has no model for."""
  supported = OPTIONS
  if model.name == "modern":
    options = ROPE_OPTIONS[model.rope]
    if model.posemb == "relative_bias":
      options = BEIT_OPTIONS
    supported = OPTIONS | MODERN_OPTIONS | options
    supported |= {"patch_bias": (not model.pre_norm,)}
    if model.distilled:
      supported |= {"registers": (0,)}
  return option_errors(model, supported)


def create_call(
  model: ModelConfig, num_classes: int, image_size: tuple[int, int]
) -> tuple[str | None, dict[str, Any]]:
  """Returns the arguments of `timm.create_model` for the result of `write`.

  Args:
    model: A model that `write` supports.
    num_classes: Width of the head, 0 for none. It is always among the
      arguments, because timm's default depends on the name.
    image_size: Height and width in pixels.

  Returns:
    A name, and keyword arguments that JSON can represent; (None, {}) if timm
    has no name for the model.

  Example:
    >>> create_call(model_config(variant="B/16"), 10, (224, 224))
    ('vit_base_patch16_224', {'num_classes': 10, 'act_layer': 'gelu_tanh'})
  """
  stages = model.stages
  kwargs: dict[str, Any] = {"num_classes": num_classes}
  if model.name == "bit":
    name = BITS.get((tuple(stages.blocks), stages.width))
    return (name, kwargs) if name else (None, {})
  if model.name not in ("vit", "modern") or errors(model):
    return None, {}
  series, sizes, patch = series_of(model), model.size, model.patch
  if stages is not None:
    named = _hybrid_name(stages, sizes)
  else:
    names, first = series.names, series.names[0]
    same = [n for n in names if n.size == sizes] or [
      n for n in names if n.size == first.size
    ]
    named = next((n for n in same if n.patch == patch), same[0])
  if named is None:
    return None, {}
  if tuple(image_size) != (named.image, named.image):
    kwargs["img_size"] = list(image_size)
  if patch != named.patch:
    kwargs["patch_size"] = patch
  kwargs |= _size_kwargs(model, named.size, series)
  options = _eva_options(model) if series.is_eva else _vit_options(model)
  if series is BEIT:
    options = {
      k: v for k, v in _eva_options(model).items() if k in BEIT.defaults
    }
  kwargs |= {
    key: value
    for key, value in options.items()
    if value != series.defaults.get(key, None)
  }
  if kwargs.get("init_values"):
    kwargs["init_values"] = model.layer_scale
  if model.channels != 3:
    kwargs["in_chans"] = model.channels
  if series in (DINOV2_SWIGLU, DINOV2_REG_SWIGLU, CLIP_QUICK):
    return named.name, kwargs  # the names say the activation
  if model.gelu != "erf" and getattr(model, "mlp", "gelu") == "gelu":
    kwargs["act_layer"] = {"tanh": "gelu_tanh", "quick": "quick_gelu"}[
      model.gelu
    ]
  return named.name, kwargs


def series_of(model: ModelConfig) -> Series:
  """Returns the models of timm with the class and the parts of the model."""
  if model.name == "vit":
    return _plain(model)
  if model.posemb == "relative_bias":
    return BEIT
  if model.rope == "dinov3":
    return DINOV3[model.mlp, model.qkv_bias]
  if model.rope == "eva02":
    return EVA02[model.mlp_norm]
  if model.distilled:
    return DEIT_DISTILLED
  if model.pre_norm:
    return CLIP_QUICK if model.gelu == "quick" else CLIP
  if model.mlp == "swiglu":
    return DINOV2_REG_SWIGLU if model.registers else DINOV2_SWIGLU
  if model.layer_scale is not None and model.registers:
    return DINOV2_REG
  if model.layer_scale is not None:
    return DINOV2 if model.cls_row else DEIT3
  return _plain(model)


def _plain(model: ModelConfig) -> Series:
  is_siglip = any(model.size == n.size for n in SIGLIP.names)
  return SIGLIP if is_siglip else VIT


def _pool(model: ModelConfig) -> str:
  return {"gap": "avg"}.get(model.pool, model.pool)


def _vit_options(model: ModelConfig) -> dict[str, Any]:
  """Returns arguments of timm's VisionTransformer; None for its default."""
  has_class_token = model.num_class_tokens > 0
  is_modern = model.name == "modern"
  options: dict[str, Any] = {
    "global_pool": _pool(model),
    "class_token": has_class_token,
    "reg_tokens": model.registers if is_modern else 0,
    "no_embed_class": has_class_token
    and model.posemb != "none"
    and not model.has_cls_row,
  }
  if model.posemb == "none":
    options["pos_embed"] = "none"
  final_norm = model.final_norm if is_modern else "tokens"
  if model.pool == "gap" and final_norm != "pooled":
    options["fc_norm"] = False
  if final_norm == "none":
    options["final_norm"] = False
  if is_modern:
    options["init_values"] = None if model.layer_scale is None else True
  if is_modern and model.pre_norm:
    options["pre_norm"] = True
  if is_modern and model.qkv_bias == "none":
    options["qkv_bias"] = False
  return options


def _eva_options(model: ModelConfig) -> dict[str, Any]:
  """Returns arguments of timm's Eva; None for its default."""
  is_pooled = model.final_norm == "pooled"
  default = model.pool == "gap"
  return {
    "global_pool": _pool(model),
    "num_reg_tokens": model.registers,
    "init_values": None if model.layer_scale is None else True,
    "use_fc_norm": False
    if model.rope == "dinov3" and not is_pooled
    else (None if is_pooled == default else is_pooled),
  }


def _hybrid_name(stages, sizes: Size) -> Name | None:
  rows = [row for row in HYBRIDS if row[0] == tuple(stages.blocks)]
  if not rows or stages.width != 1:
    return None
  row = next((r for r in rows if r[1] == sizes), rows[0])
  return Name(row[3], row[1], row[2])


def _size_kwargs(
  model: ModelConfig, name_size: Size, series: Series
) -> dict[str, Any]:
  kwargs, sizes = {}, model.size
  for keyword, field in (
    ("embed_dim", "width"),
    ("depth", "depth"),
    ("num_heads", "num_heads"),
  ):
    if getattr(sizes, field) != getattr(name_size, field):
      kwargs[keyword] = getattr(sizes, field)
  ratio = sizes.mlp_dim / sizes.width
  if ratio != name_size.mlp_dim / name_size.width:
    # VisionTransformer counts gate and value of a packed MLP as one.
    halves = 1 + (series in (DINOV2_SWIGLU, DINOV2_REG_SWIGLU))
    ratio, hidden = halves * ratio, halves * sizes.mlp_dim
    # timm rounds width * ratio down.
    if int(sizes.width * ratio) < hidden:
      ratio = math.nextafter(ratio, math.inf)
    kwargs["mlp_ratio"] = ratio
  return kwargs


def ln_eps(model: ModelConfig) -> float:
  """Returns LayerNorm's epsilon in timm's model of `create_call`."""
  is_clip = getattr(model, "pre_norm", False)
  is_dinov3 = getattr(model, "rope", None) == "dinov3"
  return CLIP_LN_EPS if is_clip or is_dinov3 else LN_EPS


def norm_difference(model: ModelConfig) -> str | None:
  """Returns how LayerNorm differs from timm's, Meta's, OpenCLIP's, or None."""
  if model.name not in ("vit", "modern") or model.ln_eps == ln_eps(model):
    return None
  return (
    f"LayerNorm adds {ln_eps(model)} to the variance, this model {model.ln_eps}"
  )


def differences(model: ModelConfig) -> list[str]:
  """Returns a text for each difference from timm's model of `create_call`.

  Without a difference, both compute the same numbers, up to rounding.
  """
  texts = []
  if norm := norm_difference(model):
    texts.append(
      f"{norm}; the argument norm_layer="
      f"functools.partial(timm.layers.LayerNorm, eps={model.ln_eps}) makes it"
      " equal."
    )
  if model.stages is None:
    return texts
  if model.name == "bit" and model.root_pad != "zero":
    texts.append(
      "the maximum after the first convolution sees zeros beyond the border,"
      f" this model {model.root_pad}."
    )
  gn_eps, ws_eps, ws_eps_on = model.norms
  if gn_eps != RESNET["gn_eps"]:
    texts.append(
      f"GroupNorm adds {RESNET['gn_eps']} to the variance, this model {gn_eps}."
    )
  if (ws_eps, ws_eps_on) != (RESNET["ws_eps"], RESNET["ws_eps_on"]):
    to = {"std": "the standard deviation", "var": "the variance"}
    texts.append(
      f"weight standardisation adds {RESNET['ws_eps']} to the variance, this"
      f" model {ws_eps} to {to[ws_eps_on]}."
    )
  return texts
