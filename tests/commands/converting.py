"""Small models, and where their formats lie."""

import math

import foreign
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.inference import pretrained
from vit_jax.models.posemb import sincos2d
from vit_jax.weights.weights_file import POS_EMBEDDING

TINY = dict(variant="B/8", width=24, depth=2, mlp_dim=40, num_heads=3)
TORCH = dict(gelu="erf", ln_eps=1e-12)
AS_TIMM = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")
SIZE = (24, 32)
SUFFIX = {"orbax": "", "npz": ".npz", "timm": ".safetensors", "hf": ""}

# Of every kind that is written otherwise.
MODELS = {
  "token": dict(TINY),
  "torch_s": dict(TINY, **TORCH),
  # 12 heads are those of B, so no option tells them.
  "12_heads": dict(TINY, num_heads=None),
  "no_row": dict(TINY, cls_row=False),
  "sincos2d": dict(TINY, posemb="sincos2d"),
  "none": dict(TINY, posemb="none"),
  "gap": dict(TINY, pool="gap"),
  "gap_sincos2d": dict(TINY, pool="gap", posemb="sincos2d"),
  "map": dict(TINY, pool="map", **TORCH),
  "learn2d": dict(TINY, posemb="learn2d"),
  "relative": dict(TINY, posemb="relative"),
  "pre_logits": dict(TINY, pre_logits=True),
  "hybrid": dict(
    TINY, variant="R50+B/16", stage_blocks=(1, 1), stage_width=0.5
  ),
  "hybrid_of_timm": dict(
    TINY, variant="R+B/8", stage_width=0.5, gelu="erf", **AS_TIMM
  ),
  "bit": dict(
    name="bit",
    variant="R50x0.5",
    stage_blocks=(1, 1),
    root_pad="nothing",
    **AS_TIMM,
  ),
  "bit_v1": dict(name="bit_v1", variant="R50x0.5", stage_blocks=(1, 1)),
  # Every part of the family `modern`, in two models.
  "swiglu": dict(
    TINY,
    name="modern",
    registers=2,
    rope="dinov3",
    posemb="none",
    layer_scale=1e-5,
    mlp="swiglu",
    mlp_norm=True,
    qkv_bias="no_key",
    pool="token_gap",
    final_norm="pooled",
  ),
  "distilled": dict(
    TINY,
    name="modern",
    rope="eva02",
    distilled=True,
    pre_norm=True,
    patch_bias=False,
    gelu="quick",
    qkv_bias="none",
  ),
}


def make(num_classes=5, image_size=SIZE, names="abcde", **fields):
  """A model of random weights."""
  config = model_config(**fields)
  params = foreign.random_params(config, num_classes, image_size)
  return pretrained.Pretrained(
    config=config,
    params=jax.tree.map(jnp.asarray, unflatten_dict(params, sep="/")),
    num_classes=num_classes,
    image_size=image_size,
    class_names=tuple(names) if names else None,
    ops=f"decode|resize({image_size})",
    loss="softmax",
    report=weights.Report("random", {}, {}, (), ()),
  )


def flat(vit):
  return {
    k: np.asarray(v) for k, v in flatten_dict(vit.params, sep="/").items()
  }


def assert_same(again, vit):
  """Bit for bit; a table that was not there before holds the same numbers."""
  got, expected = flat(again), flat(vit)
  if again.config.name == "vit" and again.config.posemb == "learn":
    table = got.pop(POS_EMBEDDING)
    grid = tuple(side // 8 for side in again.image_size)
    own = {
      "sincos2d": sincos2d(*grid, table.shape[-1])[None],
      "none": np.zeros((1, math.prod(grid), table.shape[-1]), np.float32),
      "learn": expected.pop(POS_EMBEDDING, None),
    }[vit.config.posemb]
    rows = table.shape[1] - own.shape[1]  # one of zeros for cls
    assert rows == (
      again.config.pool == "token"
      and again.config.cls_row
      and not (vit.config.cls_row and vit.config.posemb == "learn")
    )
    np.testing.assert_array_equal(table[:, rows:], own)
    assert not table[:, :rows].any()
  assert got.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_array_equal(got[path], array, path)
