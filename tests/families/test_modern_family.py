"""The family `modern`: counts, arithmetic, options that do not fit."""

import dataclasses
import math

import jax
import pytest
import tiny

from vit_jax.config import model_config
from vit_jax.models import build

DINOV2 = dict(layer_scale=1e-5)
WITH_REGISTERS = dict(layer_scale=1e-5, registers=4, cls_row=False)
DINOV3 = dict(
  layer_scale=1e-5, registers=4, posemb="none", rope="dinov3", qkv_bias="none"
)
DEIT3 = dict(layer_scale=1e-4, cls_row=False)
CLIP = dict(pre_norm=True, patch_bias=False)
EVA02 = dict(
  mlp="swiglu", rope="eva02", qkv_bias="no_key", pool="gap", final_norm="pooled"
)
BEIT = dict(
  posemb="relative_bias",
  layer_scale=0.1,
  qkv_bias="no_key",
  pool="gap",
  final_norm="pooled",
)
SWIGLU = dict(mlp="swiglu")
SIGLIP = dict(pool="map", class_token=False)

# Numbers of timm's models without a head, of transformers' CLIP with its
# projection: name, size and patch, side in pixels, parts, parameters.
COUNTS = [
  ("DINOv2", "B/14", 518, DINOV2, 86_579_712),
  ("DINOv2", "g2/14", 518, DINOV2 | SWIGLU, 1_136_479_232),
  ("registers", "B/14", 518, WITH_REGISTERS, 86_582_016),
  ("registers", "g2/14", 518, WITH_REGISTERS | SWIGLU, 1_136_483_840),
  ("DINOv3 S+", "S/16", 224, DINOV3 | SWIGLU, 28_683_264),
  ("DINOv3", "B/16", 224, DINOV3, 85_641_216),
  ("DINOv3", "H+/16", 224, DINOV3 | SWIGLU, 840_509_440),
  ("DINOv3", "7B/16", 224, DINOV3 | SWIGLU, 6_716_030_976),
  *(
    ("DINOv3 biases", variant, 224, DINOV3 | parts, count)
    for variant, parts, count in (
      ("S/16", dict(qkv_bias="no_key"), 21_596_160),
      ("S/16", dict(qkv_bias="no_key") | SWIGLU, 28_692_480),
      ("B/16", dict(qkv_bias="no_key"), 85_659_648),
      ("L/16", dict(qkv_bias="no_key"), 303_128_576),
      ("H+/16", dict(qkv_bias="no_key") | SWIGLU, 840_591_360),
    )
  ),
  ("DeiT III", "M/16", 224, DEIT3, 38_336_512),
  ("DeiT III", "B/16", 224, DEIT3, 85_816_320),
  ("DeiT III", "H/14", 224, DEIT3, 630_845_440),
  ("DeiT distilled", "B/16", 224, dict(distilled=True), 85_800_192),
  ("CLIP", "B/32", 224, CLIP | dict(projection=512), 87_849_216),
  ("CLIP", "B/16", 224, CLIP | dict(projection=512), 86_192_640),
  ("CLIP", "L/14", 224, CLIP | dict(projection=768), 303_966_208),
  ("CLIP", "L/14", 336, CLIP | dict(projection=768), 304_293_888),
  ("OpenCLIP", "H/14", 224, CLIP, 630_766_080),
  ("OpenCLIP", "G/14", 224, CLIP, 1_842_777_344),
  ("EVA-02", "Ti/14", 224, EVA02 | dict(mlp_dim=512), 5_502_144),
  ("EVA-02", "S/14", 224, EVA02 | dict(mlp_dim=1024), 21_621_120),
  *(
    ("EVA-02", v, 224, EVA02 | dict(mlp_dim=mlp_dim, mlp_norm=True), count)
    for v, mlp_dim, count in (
      ("B/14", 2048, 85_758_720),
      ("L/14", 2730, 303_268_800),
    )
  ),
  ("BEiT", "B/16", 224, BEIT, 85_761_984),
  ("BEiT", "L/16", 224, BEIT, 303_405_568),
  ("SigLIP", "B/16", 224, SIGLIP, 92_884_224),
  ("SigLIP", "L/16", 256, SIGLIP, 315_956_224),
  ("SigLIP", "So400m/14", 224, SIGLIP, 427_680_704),
  ("SigLIP", "gopt/16", 256, SIGLIP, 1_163_168_256),
]


def shapes(model, num_classes, size):
  images = jax.ShapeDtypeStruct((1, *size, 3), "float32")
  init = build(model, num_classes).init
  return jax.eval_shape(init, jax.random.key(0), images)["params"]


def count(model, num_classes, size):
  """Returns the number of parameters; one block is traced for any depth."""
  params = shapes(dataclasses.replace(model, depth=1), num_classes, size)
  total, block = (
    sum(x.size for x in jax.tree.leaves(tree))
    for tree in (params, params["Transformer"]["encoderblock_0"])
  )
  return total + (model.size.depth - 1) * block


# Other sizes of the same parts are nightly.
SEEN = {row[0]: row for row in reversed(COUNTS)}


@pytest.mark.parametrize(
  "name, variant, side, parts, expected",
  [
    pytest.param(
      *row,
      id="{} {} {}".format(*row),
      marks=() if SEEN[row[0]] is row else pytest.mark.nightly,
    )
    for row in COUNTS
  ],
)
def test_parameter_counts_are_those_published(
  name, variant, side, parts, expected
):
  model = model_config("modern", variant=variant, **parts)
  assert count(model, 0, (side, side)) == expected


@pytest.mark.parametrize(
  "parts, expected", [(dict(distilled=True), 87_338_192), (DEIT3, 86_585_320)]
)
def test_parameter_counts_with_a_thousand_classes(parts, expected):
  assert count(model_config("modern", **parts), 1000, (224, 224)) == expected


MODELS = {
  "none": {},
  "DINOv3": DINOV3 | SWIGLU,
  "distilled": dict(distilled=True, registers=2),
  "CLIP": CLIP | dict(projection=24),
  "both": dict(pool="token_gap", projection=24),
  "linear head": dict(pool="token_gap", registers=1),
  "EVA-02": EVA02 | dict(mlp_norm=True),
  "BEiT": BEIT,
  "MAP": dict(pool="map", registers=3, mlp="swiglu"),
  "hybrid": dict(variant="R+Ti/4", stage_width=0.5, registers=1),
}


QUICK = ("DINOv3", "EVA-02", "MAP")


@pytest.mark.parametrize(
  "parts",
  [
    pytest.param(
      parts, id=name, marks=() if name in QUICK else pytest.mark.nightly
    )
    for name, parts in MODELS.items()
  ],
)
def test_arithmetic_is_that_of_the_products(parts):
  sizes = dict(variant="B/4", width=32, depth=2, mlp_dim=20, num_heads=2)
  model, size = model_config("modern", **sizes | parts), (16, 24)
  params = shapes(model, 7, size)
  apply = lambda p, x: build(model, 7).apply({"params": p}, x)[0]
  images = jax.ShapeDtypeStruct((1, *size, 3), "float32")
  counted = 0
  for equation, _ in tiny.equations(
    jax.make_jaxpr(apply)(params, images).jaxpr
  ):
    if equation.primitive.name == "dot_general":
      (summed, _), _ = equation.params["dimension_numbers"]
      inputs, out = equation.invars[0].aval, equation.outvars[0].aval
      counted += math.prod(out.shape + tuple(inputs.shape[i] for i in summed))
    elif equation.primitive.name == "conv_general_dilated":
      kernel, out = equation.invars[1].aval, equation.outvars[0].aval
      counted += math.prod(out.shape) * math.prod(kernel.shape[:-1])
  assert model.forward_macs(size, 7) == counted


@pytest.mark.parametrize(
  "parts, message",
  [
    (dict(class_token=False), "class_token: got False"),
    (dict(distilled=True, pool="gap"), "pool: got 'gap'"),
    (dict(posemb="relative"), "posemb: got 'relative'"),
    (dict(posemb="relative_bias", registers=4), "registers: got 4"),
    (dict(posemb_at="blocks"), "posemb_at: got 'blocks'"),
    (dict(rope="eva02", width=36, num_heads=2), "num_heads: got 2"),
    (dict(gelu="quick", pool="map"), "gelu: got 'quick'"),
    (dict(pre_logits=True, pool="token_gap"), "pre_logits: got True"),
    (dict(layer_scale=0.0), "layer_scale: got 0.0"),
    (dict(registers=-1), "registers: got -1"),
    (dict(projection=0), "projection: got 0"),
    (dict(variant="H*/14"), "variant: got 'H*/14'"),
  ],
)
def test_options_that_do_not_fit(parts, message):
  (error,) = model_config("modern", **parts).errors()
  assert error.startswith(f"config.model.{message}, expected")


def test_all_that_does_not_fit_is_said_at_once():
  model = model_config(
    "modern", distilled=True, class_token=False, registers=-1
  )
  assert len(list(model.errors())) == 3
