"""Options of the published series: what differs from the paper's ViT."""

POOLED = dict(pool="gap", final_norm="pooled")
SWIGLU = dict(mlp="swiglu")
DISTILLED = dict(name="modern", distilled=True, gelu="erf")  # DeiT
DINOV2 = dict(name="modern", layer_scale=1e-5, gelu="erf")
DEIT3 = DINOV2 | dict(cls_row=False)
REGISTERS = DEIT3 | dict(registers=4)  # DINOv2 with registers
ROPE = dict(posemb="none", rope="dinov3", ln_eps=1e-5, qkv_bias="no_key")
DINOV3 = DINOV2 | ROPE | dict(registers=4)
CLIP = dict(
  name="modern", pre_norm=True, patch_bias=False, ln_eps=1e-5, gelu="erf"
)
BEIT = DINOV2 | POOLED | dict(posemb="relative_bias", qkv_bias="no_key")
EVA02 = POOLED | SWIGLU | dict(
  name="modern", rope="eva02", qkv_bias="no_key", gelu="erf"
)  # fmt: skip
