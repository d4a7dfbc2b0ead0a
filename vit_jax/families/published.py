"""The models that have a name, and the published files that fit them.

Source: README of google-research/vision_transformer and of big_vision for the
buckets; timm 1.0.31 for its tags, which also tell what each bucket holds.
"""

import re
import urllib.parse

from vit_jax.config import ModelConfig
from vit_jax.families.names import family

HOST = "https://storage.googleapis.com"  # of what is public in gs://

_I21K = "gs://vit_models/imagenet21k/{}.npz"
_BOTH = "gs://vit_models/imagenet21k+imagenet2012/{}.npz"
_AUGREG = "gs://vit_models/augreg/{}-*.npz"
AUGREG_INDEX = "gs://vit_models/augreg/index.csv"
BUCKETS = ("gs://vit_models/", "gs://bit_models/", "gs://big_vision/")
_TIMM = "timm {}"
_HF = "hf google/{}"
_BIT = "gs://bit_models/BiT-{{S,M}}-{}.npz"


def _paper(google: str, *others: str) -> tuple[str, ...]:
  """Files of the ViT paper's models, which are in both of its buckets."""
  return (_I21K.format(google), _BOTH.format(google), *others)


FILES: dict[str, tuple[str, ...]] = {
  "Ti/16": (
    _AUGREG.format("Ti_16"),
    _TIMM.format("vit_tiny_patch16_224.augreg_in21k"),
  ),
  "S/32": (
    _AUGREG.format("S_32"),
    _TIMM.format("vit_small_patch32_224.augreg_in21k"),
  ),
  "S/16": (
    _AUGREG.format("S_16"),
    "gs://big_vision/vit_s16_i1k_{90,150,300}ep.npz",
    _TIMM.format("vit_small_patch16_224.augreg_in21k"),
  ),
  "S/8": (),
  "B/32": _paper(
    "ViT-B_32",
    _AUGREG.format("B_32"),
    _TIMM.format("vit_base_patch32_224.augreg_in21k"),
    _HF.format("vit-base-patch32-384"),
  ),
  "B/16": _paper(
    "ViT-B_16",
    _AUGREG.format("B_16"),
    _TIMM.format("vit_base_patch16_224.augreg_in21k"),
    _HF.format("vit-base-patch16-224"),
  ),
  "B/8": (
    _AUGREG.format("B_8"),
    _TIMM.format("vit_base_patch8_224.augreg_in21k"),
  ),
  "L/32": _paper(
    "ViT-L_32",
    _TIMM.format("vit_large_patch32_224.orig_in21k"),
    _HF.format("vit-large-patch32-384"),
  ),
  "L/16": _paper(
    "ViT-L_16",
    _AUGREG.format("L_16"),
    _TIMM.format("vit_large_patch16_224.augreg_in21k"),
    _HF.format("vit-large-patch16-224"),
  ),
  "H/14": (
    _I21K.format("ViT-H_14"),
    _TIMM.format("vit_huge_patch14_224.orig_in21k"),
    _HF.format("vit-huge-patch14-224-in21k"),
  ),
  "So400m/14": (),
  "g/14": (),
  "G/14": (),
  "e/14": (),
  "R+Ti/16": (
    _AUGREG.format("R_Ti_16"),
    _TIMM.format("vit_tiny_r_s16_p8_224.augreg_in21k"),
  ),
  "R26+S/32": (
    _AUGREG.format("R26_S_32"),
    _TIMM.format("vit_small_r26_s32_224.augreg_in21k"),
  ),
  "R26+B/32": (),
  "R50+B/32": (),
  "R50+B/16": _paper(
    "R50+ViT-B_16", _TIMM.format("vit_base_r50_s16_224.orig_in21k")
  ),
  "R50+L/32": (
    _AUGREG.format("R50_L_32"),
    _TIMM.format("vit_large_r50_s32_224.augreg_in21k"),
  ),
  "R50+L/16": (),
  "R26x1": (),
  "R50x1": (
    _BIT.format("R50x1"),
    _TIMM.format("resnetv2_50x1_bit.goog_in21k"),
  ),
  "R50x2": (),
  "R50x3": (
    _BIT.format("R50x3"),
    _TIMM.format("resnetv2_50x3_bit.goog_in21k"),
  ),
  "R101x1": (
    _BIT.format("R101x1"),
    _TIMM.format("resnetv2_101x1_bit.goog_in21k"),
  ),
  "R101x3": (
    _BIT.format("R101x3"),
    _TIMM.format("resnetv2_101x3_bit.goog_in21k"),
  ),
  "R152x1": (),
  "R152x2": (
    _BIT.format("R152x2"),
    _TIMM.format("resnetv2_152x2_bit.goog_in21k"),
  ),
  "R152x4": (
    _BIT.format("R152x4"),
    _TIMM.format("resnetv2_152x4_bit.goog_in21k"),
  ),
  "R200x3": (),
}


def config(name: str) -> ModelConfig:
  """Returns the model of a name in `FILES`, as its files have it."""
  return ModelConfig(name=family(name), variant=name)


def https(file: str) -> str:
  """Returns the https:// address of a file in a public bucket, gs://...

  Example:
    >>> https("gs://vit_models/imagenet21k/ViT-B_16.npz")
    'https://storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz'
  """
  return f"{HOST}/{urllib.parse.quote(file.removeprefix('gs://'))}"


def addresses(file: str) -> tuple[str, ...]:
  """Returns an entry of `FILES` as `vit_jax.load` takes it, braces expanded.

  Example:
    >>> addresses("gs://bit_models/BiT-{S,M}-R50x1.npz")[1]
    'gs://bit_models/BiT-M-R50x1.npz'
    >>> addresses("hf google/vit-base-patch16-224")
    ('hf-hub:google/vit-base-patch16-224',)
  """
  kind, _, name = file.partition(" ")
  if owner := {"timm": "hf-hub:timm/", "hf": "hf-hub:"}.get(kind):
    return (owner + name,)
  if "*" in file:
    return (f"{file} (all are named in {AUGREG_INDEX})",)
  before, *choices = re.split("[{}]", file, maxsplit=2)
  if not choices:
    return (file,)
  return tuple(before + c + choices[1] for c in choices[0].split(","))
