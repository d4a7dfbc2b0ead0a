"""Vision Transformers since 2021: the paper's encoder with later parts.

Each part is an option, off by default. `ModernConfig` without any part computes
the same as `ViTConfig`, with the same parameters. Published models are
combinations of options:

- DINOv2: layer_scale, ln_eps=1e-6, gelu=erf; g2 also mlp=swiglu; files with
  registers also registers=4 and cls_row=False.
- DINOv3: layer_scale, registers=4, rope=dinov3, posemb=none, ln_eps=1e-5,
  gelu=erf, qkv_bias=no_key. S+, L+, H+ and 7B have mlp=swiglu, with mlp_dim
  1536, 4096, 5120 and 8192; 7B has qkv_bias=none.
- DeiT III: layer_scale, cls_row=False, gelu=erf, and
  stochastic_depth_rule=constant in training.
- CLIP: pre_norm, patch_bias=False, ln_eps=1e-5, projection; gelu=quick in
  OpenAI's files, erf in OpenCLIP's.
- BEiT: posemb=relative_bias, layer_scale, qkv_bias=no_key, pool=gap,
  final_norm=pooled, gelu=erf.
- EVA-02: mlp=swiglu, rope=eva02, qkv_bias=no_key, pool=gap, final_norm=pooled;
  B and L have mlp_norm.
- EUPE: as DINOv3. TIPS v2: as DINOv2 with registers=1. timm's vit_wee to
  vit_betwixt: class_token=False, registers, layer_scale, pool=gap,
  final_norm=pooled, gelu=erf. UNI and Virchow: as DINOv2, Virchow with
  mlp=swiglu; their second versions have registers=8 and 4.

Source: arXiv:2304.07193 (DINOv2), 2309.16588 (registers), 2508.10104 (DINOv3),
  2204.07118 (DeiT III), 2012.12877 (DeiT), 2103.00020 (CLIP), 2106.08254
  (BEiT), 2303.11331 (EVA-02), 2502.14786 (SigLIP 2).
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from vit_jax.families.base import Heads
from vit_jax.families.vit import SIZES as SIZES_OF_VIT
from vit_jax.families.vit import Size, Variant, ViTConfig, parse_variant
from vit_jax.options import AT_LEAST_1, option

SIZES = SIZES_OF_VIT | {
  "M": Size(512, 12, 2048, 8),  # DeiT III
  "H+": Size(1280, 32, 5120, 20),  # DINOv3
  "7B": Size(4096, 40, 8192, 32),  # DINOv3
  "g2": Size(1536, 40, 4096, 24),  # DINOv2
  "gopt": Size(1536, 40, 6144, 16),  # SigLIP 2
  # timm's vit_wee to vit_so150m2, also called SBB.
  "wee": Size(256, 14, 1280, 4),
  "little": Size(320, 14, 1792, 5),
  "mediumd": Size(512, 20, 2048, 8),
  "betwixt": Size(640, 12, 2560, 10),
  "so150m": Size(896, 18, 2304, 14),
  "so150m2": Size(832, 21, 2176, 13),
}


@dataclasses.dataclass(frozen=True)
class ModernConfig(ViTConfig):
  """Transformers with parts of DINO, CLIP, DeiT, BEiT, EVA-02, SigLIP."""

  name: str = "modern"
  variant: str = option(
    "B/16", f"size ({' '.join(SIZES)}) / patch in pixels: B/16"
  )
  class_token: bool = option(
    True, "whether there is a class token; pool=token and token_gap need it"
  )
  pool: str = option(
    "token",
    "what the head gets",
    {
      "token": "the class token; with distilled both tokens, each with a head",
      "gap": "the mean over the patches",
      "map": "the patches pooled by attention",
      "token_gap": "the class token and the mean over the patches, side by side"
      " (DINOv2's linear heads)",
    },
  )
  posemb: str = option(
    "learn",
    "positions added to tokens",
    {
      "learn": "a learned table",
      "learn2d": "a learned table of rows and one of columns",
      "sincos2d": "fixed sines and cosines",
      "relative_bias": "added to the scores of every attention, by the offset"
      " of two patches (BEiT)",
      "none": "nothing is added",
    },
  )
  rope: str | None = option(
    None,
    "rotary positions of the patches' queries and keys, in addition to posemb;"
    " None: no rotation",
    {
      "dinov3": "centres in [-1, 1]; channel j is paired with j + half a head",
      "eva02": "positions on a 16 x 16 grid; neighbouring channels are paired",
    },
  )
  rope_periods: str = option(
    "float32",
    "type to which the periods of rope=dinov3 are rounded",
    {
      "float32": "as libraries compute them",
      "bfloat16": "as Meta's files store them",
    },
    is_rare=True,
  )
  rope_rescale: float | None = option(
    None,
    "largest factor r of the patches' coordinates in training: each block of a"
    " step draws one, exp(uniform(-log r, log r)). DINOv3: 2. None: 1",
    limit=AT_LEAST_1,
  )
  registers: int = option(
    0, "number of register tokens: learned, without position, not pooled"
  )
  distilled: bool = option(
    False, "a second class token with a head of its own; logits are the mean"
  )
  patch_bias: bool = option(True, "whether the patch embedding has a bias")
  pre_norm: bool = option(False, "LayerNorm before the first block (CLIP)")
  final_norm: str = option(
    "tokens",
    "what the last LayerNorm is applied to",
    {
      "tokens": "all tokens",
      "pooled": "the pooled vector",
      "none": "there is no last LayerNorm",
    },
  )
  layer_scale: float | None = option(
    None,
    "initial value of LayerScale, a learned factor for each channel of a"
    " branch; None: no LayerScale",
  )
  qkv_bias: str = option(
    "all",
    "which of query, key and value have biases",
    {"all": "all", "no_key": "query and value", "none": "none"},
  )
  mlp: str = option(
    "gelu",
    "form of the MLP, of hidden width mlp_dim",
    {
      "gelu": "dense, GELU, dense",
      "swiglu": "dense times SiLU of another dense, dense",
    },
  )
  mlp_norm: bool = option(
    False, "LayerNorm of the MLP's hidden values (EVA-02 B and L)"
  )
  gelu: str = option(
    "tanh",
    "form of GELU",
    {
      "tanh": "tanh approximation, as in Google's weights",
      "erf": "exact, as in PyTorch's libraries",
      "quick": "x * sigmoid(1.702 x), as in OpenAI's CLIP",
    },
  )
  projection: int | None = option(
    None,
    "width of a linear projection of the pooled vector; None: no projection",
  )
  stochastic_depth: float = option(
    0.0, "drop path rate of the last block, 0 to 1"
  )
  stochastic_depth_rule: str = option(
    "linear",
    "stochastic_depth of the blocks before the last",
    {"linear": "linear in depth, from 0", "constant": "as in the last block"},
  )

  SIZES: ClassVar = SIZES
  NUMERICS: ClassVar = ("gelu", "ln_eps", "rope", "rope_periods")
  SHARDING: ClassVar = (
    (r"MlpBlock_0/Gate/kernel", ("fsdp", "tensor")),
    (r"MlpBlock_0/Gate/bias", ("tensor",)),
    (r"(head_dist|projection)/kernel", ("fsdp", "tensor")),
    (r"head_dist/bias", ("tensor",)),
    (r"relative_bias", (None, "tensor")),
    *ViTConfig.SHARDING,
  )
  PUBLISHED: ClassVar = {}

  @classmethod
  def unread(cls, options: dict) -> tuple[str, ...]:
    """Returns the same as `ViTConfig`, and the option that is missing here."""
    return (*super().unread(options), "posemb_at")

  @classmethod
  def knows(cls, variant: str) -> bool:
    return variant.split("/")[0] in SIZES.keys() - SIZES_OF_VIT.keys()

  @property
  def _parsed(self) -> Variant:
    return parse_variant(self.variant, SIZES)

  @property
  def num_class_tokens(self) -> int:
    return int(self.class_token) + int(self.distilled)

  def attention(self, image_size: tuple[int, int]) -> Heads | None:
    if self.posemb == "relative_bias":  # only XLA adds to scores
      return None
    return super().attention(image_size)

  def num_tokens(self, image_size: tuple[int, int]) -> int:
    return super().num_tokens(image_size) + self.registers

  def forward_macs(self, image_size: tuple[int, int], num_classes: int) -> int:
    size = self.size
    macs = super().forward_macs(image_size, num_classes)
    if self.mlp == "swiglu":
      tokens = self.num_tokens(image_size)
      macs += size.depth * tokens * size.width * size.mlp_dim
    width = size.width * (2 if self.pool == "token_gap" else 1)
    last = self.projection or width
    macs += (last - size.width) * num_classes
    if self.projection:
      macs += width * self.projection
    if self.distilled:
      macs += size.width * num_classes
    return macs

  def for_inference(self) -> "ModernConfig":
    return dataclasses.replace(super().for_inference(), rope_rescale=None)

  def errors(self) -> Iterator[str]:
    yield from super().errors()
    for key, value, wanted in self._mistakes():
      yield f"config.model.{key}: got {value!r}, expected {wanted}."

  def _mistakes(self) -> Iterator[tuple[str, object, str]]:
    """Yields options that do not fit: name, value, expected value."""
    if self.posemb_at != "stem":
      yield "posemb_at", self.posemb_at, "'stem' in this family"
    if not self.class_token and self.pool in ("token", "token_gap"):
      wanted = f"True for config.model.pool={self.pool!r}"
      yield "class_token", self.class_token, wanted
    if self.posemb == "relative_bias":
      for key, wanted in (
        *(("class_token", True), ("distilled", False)),
        *(("registers", 0), ("rope", None)),
      ):
        if getattr(self, key) != wanted:
          text = f"{wanted!r} for config.model.posemb='relative_bias'"
          yield key, getattr(self, key), text
    if self.rope_rescale and not self.rope:
      yield "rope_rescale", self.rope_rescale, "None for config.model.rope=None"
    if self.registers < 0:
      yield "registers", self.registers, "0 or more"
    if self.projection is not None and self.projection < 1:
      yield "projection", self.projection, "1 or more, or None"
    if self.layer_scale is not None and self.layer_scale <= 0:
      yield "layer_scale", self.layer_scale, "more than 0, or None"
    if self.gelu == "quick" and self.pool == "map":
      yield "gelu", self.gelu, "tanh or erf for config.model.pool='map'"
    if self.distilled:
      for key, wanted in (
        *(("class_token", True), ("pool", "token"), ("final_norm", "tokens")),
        *(("pre_logits", False), ("projection", None)),
      ):
        if getattr(self, key) != wanted:
          text = f"{wanted!r} for config.model.distilled=True"
          yield key, getattr(self, key), text
    if self.pre_logits and (self.projection or self.pool == "token_gap"):
      wanted = "False beside config.model.projection or pool='token_gap'"
      yield "pre_logits", self.pre_logits, wanted
    try:
      size = self.size
    except ValueError:  # `super().errors()` reports it
      return
    if self.rope and size.num_heads >= 1 and size.width // size.num_heads % 4:
      wanted = (
        f"heads of a multiple of 4 channels for config.model.rope={self.rope!r}"
        f", not of {size.width // size.num_heads}"
      )
      yield "num_heads", size.num_heads, wanted
