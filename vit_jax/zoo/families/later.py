"""Published models since 2021: their options.

`vit_jax.families.published` has the list of their files.

Source: for the series of 2024 and later, timm 1.0.31, vision_transformer.py and
  eva.py; for UNI and Virchow the arguments that their model cards pass to timm;
  for the others see `modern`.
"""

from typing import Any, NamedTuple

from vit_jax.families.base import ModelConfig
from vit_jax.families.published import files, rows
from vit_jax.families.vit import ViTConfig
from vit_jax.zoo.families.modern import ModernConfig


class Later(NamedTuple):
  """A series of published models.

  name: Its name in the list of `published`, which has its variants and files.
  options: Options that all of its models have.
  of_one: Variant -> its additional options.
  """

  name: str
  options: dict[str, Any]
  of_one: dict[str, dict[str, Any]] = {}

  @property
  def files(self) -> dict[str, tuple[str, ...]]:
    """Variant -> published files."""
    return files(self.name)

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
_TIPS = dict(layer_scale=1.0, registers=1, cls_row=False)
_SBB = dict(
  class_token=False,
  registers=4,
  layer_scale=1e-5,
  pool="gap",
  final_norm="pooled",
)

LATER = {
  later.name: later
  for later in (
    Later("DINOv2", _DINOV2, {"g2/14": _SWIGLU}),
    Later("DINOv2 registers", _REGISTERS, {"g2/14": _SWIGLU}),
    Later(
      "DINOv3",
      _DINOV3,
      {"H+/16": _SWIGLU, "7B/16": _SWIGLU | dict(qkv_bias="none")},
    ),
    Later("DINOv3 SwiGLU", _DINOV3 | _SWIGLU),  # S+
    Later("EUPE", _DINOV3),
    Later("TIPS v2", _TIPS, {"g2/14": _SWIGLU}),
    Later("SigLIP", dict(pool="map", class_token=False, gelu="tanh")),
    Later("CLIP", _CLIP),
    Later("MAE", {}),
    Later("DeiT", {}),
    Later("DeiT distilled", dict(distilled=True)),
    Later("DeiT III", dict(layer_scale=1e-4, cls_row=False)),
    Later("BEiT", _BEIT),
    Later(
      "EVA-02",
      _EVA02,
      {
        "Ti/14": dict(mlp_dim=512),
        "S/14": dict(mlp_dim=1024),
        "B/14": dict(mlp_dim=2048, mlp_norm=True),
        "L/14": dict(mlp_dim=2730, mlp_norm=True),
      },
    ),
    Later("SBB", _SBB, {"wee/16": dict(registers=1)}),
    Later("UNI", _DINOV2),
    Later("UNI 2", _REGISTERS | _SWIGLU | dict(registers=8, depth=24)),
    Later("Virchow", _DINOV2 | _SWIGLU | dict(mlp_dim=3416)),
    Later("Virchow 2", _REGISTERS | _SWIGLU | dict(mlp_dim=3416)),
  )
}


class Published(NamedTuple):
  """A file of `LATER`.

  model: Its model.
  pixels: Side of the images.
  num_classes: Outputs of its classifier; 0: it has none.
  """

  model: ModelConfig
  pixels: int
  num_classes: int


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
  for row in rows():
    is_one = address in row.files or (name != address and text in row.files)
    if is_one and (later := LATER.get(row.series)):
      return Published(later.model(row.variant), row.pixels, row.classes)
  return None
