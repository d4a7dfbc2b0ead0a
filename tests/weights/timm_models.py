"""Small models that timm has, too."""

TINY = dict(variant="B/8", width=24, depth=2, mlp_dim=40, num_heads=3)
VIT = {
  "token": dict(TINY),
  "token_without_row": dict(TINY, cls_row=False, gelu="erf"),
  "token_sincos2d": dict(TINY, posemb="sincos2d"),
  "token_no_positions": dict(TINY, posemb="none"),
  "gap_sincos2d": dict(TINY, pool="gap", posemb="sincos2d"),
  "gap": dict(TINY, pool="gap", gelu="erf"),
  "map": dict(TINY, pool="map"),
}
AS_TIMM = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")
SMALL = dict(width=24, depth=2, mlp_dim=48, num_heads=3, **AS_TIMM)
RESNETS = {
  "hybrid_root": (dict(SMALL, variant="R+Ti/16"), (64, 96)),
  "hybrid_26": (dict(SMALL, variant="R26+S/32"), (64, 64)),
  "hybrid_50": (dict(SMALL, variant="R50+B/16"), (64, 64)),
  "bit": (dict(name="bit", variant="R50x1", **AS_TIMM), (64, 96)),
}
SIZE = (24, 32)
# The same models in timm: name, arguments.
_BASE = dict(patch_size=8, embed_dim=24, depth=2, num_heads=3, mlp_ratio=5 / 3)
_HYBRID = dict(embed_dim=24, depth=2, num_heads=3, mlp_ratio=2.0)
_TANH = dict(act_layer="gelu_tanh")
_GAP = dict(class_token=False, global_pool="avg", fc_norm=False)
_THEIR_VIT = {
  "token": _TANH,
  "token_without_row": dict(no_embed_class=True),
  "token_sincos2d": dict(no_embed_class=True, **_TANH),
  "token_no_positions": dict(pos_embed="none", **_TANH),
  "gap_sincos2d": dict(**_GAP, **_TANH),
  "gap": _GAP,
  "map": dict(class_token=False, global_pool="map", **_TANH),
}
IN_TIMM = {
  name: ("vit_base_patch16_224", _BASE | dict(img_size=SIZE) | kwargs)
  for name, kwargs in _THEIR_VIT.items()
} | {
  "hybrid_root": (
    "vit_tiny_r_s16_p8_224",
    _HYBRID | _TANH | dict(img_size=(64, 96)),
  ),
  "hybrid_26": (
    "vit_small_r26_s32_224",
    _HYBRID | _TANH | dict(img_size=(64, 64)),
  ),
  "hybrid_50": (
    "vit_base_r50_s16_224",
    _HYBRID | _TANH | dict(img_size=(64, 64)),
  ),
  "bit": ("resnetv2_50x1_bit", {}),
}
