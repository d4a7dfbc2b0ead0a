"""Published models since 2021: their options, and the files to read.

Source: timm 1.0.31 for its tags; the repositories of DINOv2, MAE and
  big_vision, and the model cards on Hugging Face, for the others.
"""

from typing import Any, NamedTuple

from vit_jax.families.base import ModelConfig
from vit_jax.families.published import table
from vit_jax.families.vit import ViTConfig
from vit_jax.zoo.families.modern import ModernConfig


class Later(NamedTuple):
  """A series of published models.

  side: Image side in pixels of most of their training.
  options: Options that all of them have.
  files: Variant -> published files.
  of_one: Variant -> its additional options.
  num_classes: Outputs of the heads of the files; 0: they have none.
  licence: Terms that a user has to accept; "" for the usual open licences.
  """

  side: int
  options: dict[str, Any]
  files: dict[str, tuple[str, ...]]
  of_one: dict[str, dict[str, Any]] = {}
  num_classes: int = 0
  licence: str = ""

  def model(self, variant: str) -> ModelConfig:
    """Returns the model of a variant, a plain ViT if it has no later parts."""
    own = self.options | self.of_one.get(variant, {})
    cls = ModernConfig if own else ViTConfig
    return cls(variant=variant, **{"gelu": "erf", **own})


_DINOV2 = dict(layer_scale=1e-5)
_REGISTERS = dict(_DINOV2, registers=4, cls_row=False)
_SWIGLU = dict(mlp="swiglu")
_DINOV3 = dict(
  layer_scale=1e-5,
  registers=4,
  posemb="none",
  rope="dinov3",
  qkv_bias="no_key",
  ln_eps=1e-5,
)
_CLIP = dict(pre_norm=True, patch_bias=False, ln_eps=1e-5)
_BEIT = dict(
  layer_scale=0.1,
  posemb="relative_bias",
  qkv_bias="no_key",
  pool="gap",
  final_norm="pooled",
)
_EVA02 = dict(
  mlp="swiglu",
  rope="eva02",
  qkv_bias="no_key",
  pool="gap",
  final_norm="pooled",
)
_LICENCE = (
  "DINOv3 has a licence of its own; agree to it where the files are:"
  " https://ai.meta.com/resources/models-and-libraries/dinov3-license"
)

LATER = {
  "DINOv2": Later(
    518,
    _DINOV2,
    table(
      """
      S/14 meta:dinov2/dinov2_vits14/dinov2_vits14_pretrain.pth
        timm:vit_small_patch14_dinov2.lvd142m hub:facebook/dinov2-small
      B/14 meta:dinov2/dinov2_vitb14/dinov2_vitb14_pretrain.pth
        timm:vit_base_patch14_dinov2.lvd142m hub:facebook/dinov2-base
      L/14 meta:dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth
        timm:vit_large_patch14_dinov2.lvd142m hub:facebook/dinov2-large
      g2/14 meta:dinov2/dinov2_vitg14/dinov2_vitg14_pretrain.pth
        timm:vit_giant_patch14_dinov2.lvd142m hub:facebook/dinov2-giant
      """
    ),
    {"g2/14": _SWIGLU},
  ),
  "DINOv2 registers": Later(
    518,
    _REGISTERS,
    table(
      """
      S/14 meta:dinov2/dinov2_vits14/dinov2_vits14_reg4_pretrain.pth
        timm:vit_small_patch14_reg4_dinov2.lvd142m
        hub:facebook/dinov2-with-registers-small
      B/14 meta:dinov2/dinov2_vitb14/dinov2_vitb14_reg4_pretrain.pth
        timm:vit_base_patch14_reg4_dinov2.lvd142m
        hub:facebook/dinov2-with-registers-base
      L/14 meta:dinov2/dinov2_vitl14/dinov2_vitl14_reg4_pretrain.pth
        timm:vit_large_patch14_reg4_dinov2.lvd142m
        hub:facebook/dinov2-with-registers-large
      g2/14 meta:dinov2/dinov2_vitg14/dinov2_vitg14_reg4_pretrain.pth
        timm:vit_giant_patch14_reg4_dinov2.lvd142m
        hub:facebook/dinov2-with-registers-giant
      """
    ),
    {"g2/14": _SWIGLU},
  ),
  "DINOv3": Later(
    256,
    _DINOV3,
    table(
      """
      S/16 timm:vit_small_patch16_dinov3_qkvb.lvd1689m
        hub:facebook/dinov3-vits16-pretrain-lvd1689m
      B/16 timm:vit_base_patch16_dinov3_qkvb.lvd1689m
        hub:facebook/dinov3-vitb16-pretrain-lvd1689m
      L/16 timm:vit_large_patch16_dinov3_qkvb.lvd1689m
        hub:facebook/dinov3-vitl16-pretrain-lvd1689m
        hub:facebook/dinov3-vitl16-pretrain-sat493m
      H+/16 timm:vit_huge_plus_patch16_dinov3_qkvb.lvd1689m
        hub:facebook/dinov3-vith16plus-pretrain-lvd1689m
      7B/16 timm:vit_7b_patch16_dinov3.lvd1689m
        hub:facebook/dinov3-vit7b16-pretrain-lvd1689m
        hub:facebook/dinov3-vit7b16-pretrain-sat493m
      """
    ),
    {"H+/16": _SWIGLU, "7B/16": _SWIGLU | dict(qkv_bias="none")},
    licence=_LICENCE,
  ),
  "DINOv3 SwiGLU": Later(  # S+
    256,
    _DINOV3 | _SWIGLU,
    table(
      """
      S/16 timm:vit_small_plus_patch16_dinov3_qkvb.lvd1689m
        hub:facebook/dinov3-vits16plus-pretrain-lvd1689m
      """
    ),
    licence=_LICENCE,
  ),
  "SigLIP": Later(
    256,
    dict(pool="map", class_token=False, gelu="tanh"),
    table(
      """
      B/32 timm:vit_base_patch32_siglip_256.v2_webli
        hub:google/siglip2-base-patch32-256
      B/16 timm:vit_base_patch16_siglip_256.webli
        timm:vit_base_patch16_siglip_256.v2_webli
        hub:google/siglip-base-patch16-256 hub:google/siglip2-base-patch16-256
      L/16 timm:vit_large_patch16_siglip_256.webli
        timm:vit_large_patch16_siglip_256.v2_webli
        hub:google/siglip-large-patch16-256
        hub:google/siglip2-large-patch16-256
      So400m/14 timm:vit_so400m_patch14_siglip_378.webli
        hub:google/siglip-so400m-patch14-384
        hub:google/siglip2-so400m-patch14-384
      So400m/16 timm:vit_so400m_patch16_siglip_256.v2_webli
        hub:google/siglip2-so400m-patch16-256
      gopt/16 timm:vit_giantopt_patch16_siglip_256.v2_webli
        hub:google/siglip2-giant-opt-patch16-256
      """
    ),
  ),
  "CLIP": Later(
    224,
    _CLIP,
    table(
      """
      B/32 timm:vit_base_patch32_clip_quickgelu_224.openai
        hub:openai/clip-vit-base-patch32
      B/16 timm:vit_base_patch16_clip_quickgelu_224.openai
        hub:openai/clip-vit-base-patch16
      L/14 timm:vit_large_patch14_clip_quickgelu_224.openai
        hub:openai/clip-vit-large-patch14
      H/14 timm:vit_huge_patch14_clip_224.laion2b
        hub:laion/CLIP-ViT-H-14-laion2B-s32B-b79K
      g/14 timm:vit_giant_patch14_clip_224.laion2b
        hub:laion/CLIP-ViT-g-14-laion2B-s12B-b42K
      G/14 timm:vit_gigantic_patch14_clip_224.laion2b
        hub:laion/CLIP-ViT-bigG-14-laion2B-39B-b160k
      """
    ),
  ),
  "MAE": Later(
    224,
    {},
    table(
      """
      B/16 meta:mae/pretrain/mae_pretrain_vit_base.pth
        timm:vit_base_patch16_224.mae hub:facebook/vit-mae-base
      L/16 meta:mae/pretrain/mae_pretrain_vit_large.pth
        timm:vit_large_patch16_224.mae hub:facebook/vit-mae-large
      H/14 meta:mae/pretrain/mae_pretrain_vit_huge.pth
        timm:vit_huge_patch14_224.mae hub:facebook/vit-mae-huge
      """
    ),
  ),
  "DeiT": Later(
    224,
    {},
    table(
      """
      Ti/16 timm:deit_tiny_patch16_224.fb_in1k
        hub:facebook/deit-tiny-patch16-224
      S/16 timm:deit_small_patch16_224.fb_in1k
        hub:facebook/deit-small-patch16-224
      B/16 timm:deit_base_patch16_224.fb_in1k
        hub:facebook/deit-base-patch16-224
      """
    ),
    num_classes=1000,
  ),
  "DeiT distilled": Later(
    224,
    dict(distilled=True),
    table(
      """
      Ti/16 timm:deit_tiny_distilled_patch16_224.fb_in1k
        hub:facebook/deit-tiny-distilled-patch16-224
      S/16 timm:deit_small_distilled_patch16_224.fb_in1k
        hub:facebook/deit-small-distilled-patch16-224
      B/16 timm:deit_base_distilled_patch16_224.fb_in1k
        hub:facebook/deit-base-distilled-patch16-224
      """
    ),
    num_classes=1000,
  ),
  "DeiT III": Later(
    224,
    dict(layer_scale=1e-4, cls_row=False),
    table(
      """
      S/16 timm:deit3_small_patch16_224.fb_in22k_ft_in1k
      M/16 timm:deit3_medium_patch16_224.fb_in22k_ft_in1k
      B/16 timm:deit3_base_patch16_224.fb_in22k_ft_in1k
      L/16 timm:deit3_large_patch16_224.fb_in22k_ft_in1k
      H/14 timm:deit3_huge_patch14_224.fb_in22k_ft_in1k
      """
    ),
    num_classes=1000,
  ),
  "BEiT": Later(
    224,
    _BEIT,
    table(
      """
      B/16 timm:beit_base_patch16_224.in22k_ft_in22k
        timm:beitv2_base_patch16_224.in1k_ft_in22k
        hub:microsoft/beit-base-patch16-224-pt22k-ft22k
      L/16 timm:beit_large_patch16_224.in22k_ft_in22k
        timm:beitv2_large_patch16_224.in1k_ft_in22k
        hub:microsoft/beit-large-patch16-224-pt22k-ft22k
      """
    ),
    num_classes=21_841,
  ),
  "EVA-02": Later(
    224,
    _EVA02,
    table(
      """
      Ti/14 timm:eva02_tiny_patch14_224.mim_in22k
      S/14 timm:eva02_small_patch14_224.mim_in22k
      B/14 timm:eva02_base_patch14_224.mim_in22k
      L/14 timm:eva02_large_patch14_224.mim_m38m
      """
    ),
    {
      "Ti/14": dict(mlp_dim=512),
      "S/14": dict(mlp_dim=1024),
      "B/14": dict(mlp_dim=2048, mlp_norm=True),
      "L/14": dict(mlp_dim=2730, mlp_norm=True),
    },
  ),
}


class Published(NamedTuple):
  """A file of `LATER`: its series, and the options of its model."""

  series: Later
  model: ModelConfig


def published(address: str) -> Published | None:
  """Returns what `LATER` says of the address of a file; None for others.

  Args:
    address: hf-hub:OWNER/NAME[@REVISION] or https://...; timm's models are
      hf-hub:timm/NAME.

  Example:
    >>> published("hf-hub:facebook/dinov2-small").model.variant
    'S/14'
  """
  name = address.removeprefix("hf-hub:").partition("@")[0]
  text = f"timm {name[5:]}" if name.startswith("timm/") else f"hf {name}"
  for series in LATER.values():
    for variant, files in series.files.items():
      if address in files or (name != address and text in files):
        return Published(series, series.model(variant))
  return None
