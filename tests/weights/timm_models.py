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
