"""Small models of random weights, of every kind that is written otherwise."""

import foreign
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import weights
from vit_jax.config import model_config
from vit_jax.inference import pretrained

TINY = dict(variant="B/8", width=24, depth=2, mlp_dim=40, num_heads=3)
AS_TIMM = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")
SIZE = (24, 32)
MODELS = {
  "token": dict(TINY, gelu="erf", ln_eps=1e-12),
  "no_row": dict(TINY, cls_row=False),
  "gap_sincos2d": dict(TINY, pool="gap", posemb="sincos2d"),
  "map": dict(TINY, pool="map"),
  "relative": dict(TINY, posemb="relative"),
  "pre_logits": dict(TINY, pre_logits=True),
  "hybrid": dict(
    TINY, variant="R50+B/16", stage_blocks=(1, 1), stage_width=0.5
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


def make(
  num_classes=5, image_size=SIZE, names="abcde", loss="softmax", **fields
):
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
    loss=loss,
    report=weights.Report("random", {}, {}, (), ()),
  )


def assert_same(again, vit, but=()):
  """Bit for bit, without the arrays named in `but`."""
  got, expected = (
    {k: v for k, v in flatten_dict(x.params, sep="/").items() if k not in but}
    for x in (again, vit)
  )
  assert got.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_array_equal(got[path], array, path)
