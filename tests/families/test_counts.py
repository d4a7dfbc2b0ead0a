"""Parameters and multiply-adds, against published numbers."""

import dataclasses
import math

import foreign
import jax
import pytest
import tiny
from series_parts import (
  BEIT,
  CLIP,
  DEIT3,
  DINOV2,
  DINOV3,
  DISTILLED,
  EVA02,
  REGISTERS,
  SWIGLU,
)  # fmt: skip

from vit_jax.config import model_config
from vit_jax.families import by_variant
from vit_jax.families.vit import SIZES
from vit_jax.models import build

NIGHTLY = pytest.mark.nightly


def count(model, num_classes, side):
  shapes = foreign.shapes(model, num_classes, (side, side))
  return sum(map(math.prod, shapes.values()))


# Counts of the paper's own code. Of a ViT without a head at 224 px; with
# pre_logits and 1,000 classes; with 1,000 classes at 384 px (378 for H/14: the
# original drops the pixels that do not fill a patch).
VITS = {
  "Ti/16": (5_524_416, 5_754_472, 5_790_376),
  "S/16": (21_665_664, 22_198_504, 22_196_584),
  "S/32": (22_493_952, 23_026_792, 22_915_432),
  "B/16": (85_798_656, 87_158_248, 86_859_496),
  "B/32": (87_455_232, 88_814_824, 88_297_192),
  "B/8": (85_807_872, 87_167_464, 87_744_232),
  "L/16": (303_301_632, 305_376_232, 304_715_752),
  "L/32": (305_510_400, 307_585_000, 306_632_680),
  "H/14": (630_764_800, 633_685_480, 632_651_240),
}
# Without a head at 224 px, with 1,000 classes at 224 and at 384 px.
RESNETS = {
  "R+Ti/16": (6_144_704, 6_337_704, 6_355_944),
  "R26+S/32": (36_046_912, 36_431_912, 36_468_392),
  "R26+B/32": (100_614_976, 101_383_976, 101_456_936),
  "R50+B/16": (97_890_112, 98_659_112, 98_950_952),
  "R50+L/32": (327_969_856, 328_994_856, 329_092_136),
  "R50x1": (23_500_352, 25_549_352, 25_549_352),
  "R50x2": (93_891_712, 97_988_712, 97_988_712),
  "R50x3": (211_174_080, 217_319_080, 217_319_080),
  "R101x1": (42_492_480, 44_541_480, 44_541_480),
  "R101x3": (381_789_888, 387_934_888, 387_934_888),
  "R152x1": (58_136_128, 60_185_128, 60_185_128),
  "R152x2": (232_238_208, 236_335_208, 236_335_208),
  "R152x4": (928_340_224, 936_533_224, 936_533_224),
  "R200x3": (562_488_000, 568_633_000, 568_633_000),
}


@pytest.mark.parametrize("variant", VITS)
def test_parameters_of_the_paper_s_vits(variant):
  model = model_config(variant=variant)
  got = (
    count(model, 0, 224),
    count(dataclasses.replace(model, pre_logits=True), 1000, 224),
    count(model, 1000, 378 if variant == "H/14" else 384),
  )
  assert got == VITS[variant]


# A trace takes as long as a network is deep.
MARKS = {"R+Ti/16": (), "R50+B/16": pytest.mark.slow, "R50x1": pytest.mark.slow}


@pytest.mark.parametrize(
  "variant",
  [pytest.param(v, marks=MARKS.get(v, NIGHTLY)) for v in RESNETS],
)
def test_parameters_of_hybrids_and_bit(variant):
  model = by_variant(variant)
  sizes = ((0, 224), (1000, 224), (1000, 384))
  assert tuple(count(model, *size) for size in sizes) == RESNETS[variant]


@pytest.mark.parametrize("name", ["So400m", "g", "G", "e"])
def test_parameters_of_big_vision_s_sizes_in_closed_form(name):
  size, patch, classes = SIZES[name], 14, 1000
  d, m = size.width, size.mlp_dim
  # Two norms; query, key, value, out; two dense layers.
  block = 2 * 2 * d + 4 * (d * d + d) + (d * m + m) + (m * d + d)
  stem = patch * patch * 3 * d + d
  tokens = d + (1 + 16 * 16) * d  # class token; table
  expected = stem + tokens + size.depth * block + 2 * d + d * classes + classes
  assert count(model_config(variant=f"{name}/14"), classes, 224) == expected


SIGLIP = dict(name="modern", pool="map", class_token=False)
PLAIN = DINOV3 | dict(qkv_bias="none")
# Numbers of timm's models, of transformers' CLIP with its projection: size and
# patch, side in pixels, parts, classes, parameters.
LATER = [
  ("B/14", 518, DINOV2, 0, 86_579_712),
  ("B/14", 518, REGISTERS, 0, 86_582_016),
  ("g2/14", 518, REGISTERS | SWIGLU, 0, 1_136_483_840),
  ("S/16", 224, PLAIN | SWIGLU, 0, 28_683_264),
  ("B/16", 224, PLAIN, 0, 85_641_216),
  ("7B/16", 224, PLAIN | SWIGLU, 0, 6_716_030_976),
  ("L/16", 224, DINOV3, 0, 303_128_576),
  ("M/16", 224, DEIT3, 0, 38_336_512),
  ("H/14", 224, DEIT3, 0, 630_845_440),
  ("B/16", 224, DEIT3, 1000, 86_585_320),
  ("B/16", 224, DISTILLED, 0, 85_800_192),
  ("B/16", 224, DISTILLED, 1000, 87_338_192),
  ("L/14", 336, CLIP | dict(projection=768), 0, 304_293_888),
  ("G/14", 224, CLIP, 0, 1_842_777_344),
  ("Ti/14", 224, EVA02 | dict(mlp_dim=512), 0, 5_502_144),
  ("B/14", 224, EVA02 | dict(mlp_dim=2048, mlp_norm=True), 0, 85_758_720),
  ("B/16", 224, BEIT, 0, 85_761_984),
  ("So400m/14", 224, SIGLIP, 0, 427_680_704),
  ("gopt/16", 256, SIGLIP, 0, 1_163_168_256),
]


@pytest.mark.parametrize("variant, side, parts, classes, expected", LATER)
def test_parameters_of_later_models(variant, side, parts, classes, expected):
  model = model_config(variant=variant, **parts)
  assert count(model, classes, side) == expected


# Multiply-adds.


def test_published_multiply_adds():
  for variant, expected in {
    **{"Ti/16": 1.25, "S/32": 1.14, "S/16": 4.60, "B/32": 4.41},
    **{"B/16": 17.56, "L/32": 15.38, "L/16": 61.55, "H/14": 167.29},
  }.items():
    macs = model_config(variant=variant).forward_macs((224, 224), 1000)
    assert macs / 1e9 == pytest.approx(expected, abs=0.011), variant


def test_training_is_three_passes_of_two_operations():
  model = model_config(variant="B/16", pool="map", pre_logits=True)
  assert model.train_flops((32, 64), 7) == 6 * model.forward_macs((32, 64), 7)


SMALL = dict(variant="B/4", width=32, depth=2, mlp_dim=20, num_heads=2)
MODERN = SMALL | dict(name="modern")
MODELS = {
  "ViT": SMALL | dict(pool="map", posemb="relative", pre_logits=True),
  "hybrid": SMALL | dict(variant="R+Ti/4", stage_width=0.5),
  "DINOv3": SMALL | DINOV3 | SWIGLU,
  "EVA-02": SMALL | EVA02 | dict(mlp_norm=True),
  "distilled": SMALL | DISTILLED | dict(registers=2),
  "CLIP": SMALL | CLIP | dict(projection=24),
  "both": MODERN | dict(pool="token_gap", projection=24),
  "BEiT": SMALL | BEIT,
  "MAP": MODERN | dict(pool="map", registers=3, mlp="swiglu"),
}
QUICK = ("ViT", "DINOv3", "MAP")


@pytest.mark.parametrize(
  "name",
  [pytest.param(n, marks=() if n in QUICK else NIGHTLY) for n in MODELS],
)
def test_multiply_adds_are_those_of_the_products(name):
  model, size = model_config(**MODELS[name]), (16, 24)
  module = build(model, 7)
  params = tiny.shapes(module, (1, *size, 3))
  apply = lambda p, x: module.apply({"params": p}, x)[0]
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
