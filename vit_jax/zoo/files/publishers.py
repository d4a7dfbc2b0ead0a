"""What publishers do that files do not state, by their series of models.

How they prepare images, for files with nothing but arrays; and how they resize
positions, for all files.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.families.vit import ViTConfig
from vit_jax.weights import eval_preprocessing, normalisation
from vit_jax.weights.fitting import DEFAULT_SIZE, PUBLISHED, trained_at
from vit_jax.weights.identification import NEEDED, identify
from vit_jax.weights.weights_file import POS_EMBEDDING, Pixels, Weights
from vit_jax.zoo.families.modern import ModernConfig

IMAGENET = normalisation.NAMED["imagenet"]
CLIP = normalisation.NAMED["clip"]
AS_THEY_ARE = Pixels((0.0,) * 3, (1.0,) * 3)


class Publisher(NamedTuple):
  """A series of models that is recognised by its arrays.

  name: Its name.
  fits: Whether weights are of the series; the model is the result of
    `identify`.
  pixels: Normalisation of the images.
  share: Side of the crop / shorter side of the image; None to resize the whole
    image to a square.
  filter: Filter of the resizing.
  size: Side of the images in pixels, if the trained one is unknown or larger.
  also: Further facts for the user.
  posemb_filter: How the authors' own code resizes positions, a name of
    `models.resample.METHODS`, whatever the library of the file does.
  """

  name: str
  fits: Callable[[Weights, ModernConfig], bool]
  pixels: Pixels
  share: float | None = 0.875
  filter: str = "bicubic"
  size: int | None = None
  also: str = ""
  posemb_filter: str = "hf"


# The first one that fits counts.
# Source: the repositories of each; for TIPS v2, timm 1.0.31. They resize
#   positions in: DeiT and DeiT III, main.py; EVA-02,
#   asuka/run_class_finetuning.py; OpenCLIP, `resize_pos_embed` (OpenAI's CLIP
#   has a fixed size); BEiT, run_class_finetuning.py, with cubic splines instead
#   of timm's lines; DINO and DINOv2, `interpolate_pos_encoding` of
#   vision_transformer.py; MAE, util/pos_embed.py.
PUBLISHERS = (
  # Without its two heads, its token for distillation is read as a register.
  Publisher(
    "DeiT",
    lambda w, m: (
      m.distilled
      or (m.class_token and m.registers == 1 and m.layer_scale is None)
    ),
    IMAGENET,
  ),
  Publisher(
    "DINOv3",
    lambda w, m: m.rope == "dinov3",
    IMAGENET,
    share=None,
    filter="bilinear",
    size=256,
    also="; those trained on satellites have"
    " mean='0.430,0.411,0.296/0.213,0.156,0.143'",
  ),
  Publisher("EVA-02", lambda w, m: m.rope == "eva02", CLIP, share=1.0),
  Publisher(
    "CLIP",
    lambda w, m: m.pre_norm or w.format == "openclip",
    CLIP,
    share=1.0,
    posemb_filter="bicubic",
  ),
  Publisher(
    "BEiT",
    lambda w, m: m.posemb == "relative_bias",
    normalisation.HALF,
    also="; those of BEiT v2 have mean='imagenet'",
    posemb_filter="timm",
  ),
  Publisher(
    "TIPS v2",
    lambda w, m: m.class_token and m.registers == 1,
    AS_THEY_ARE,
    share=1.0,
    posemb_filter="bicubic",
  ),
  Publisher(
    "DINOv2",  # with registers
    lambda w, m: m.class_token and m.layer_scale is not None and m.registers,
    IMAGENET,
    size=224,
    posemb_filter="bicubic",
  ),
  Publisher(
    "DINOv2",
    lambda w, m: m.class_token and m.layer_scale is not None and w.has_cls_row,
    IMAGENET,
    size=224,
    posemb_filter="dinov2",
  ),
  Publisher(
    "DeiT III",
    lambda w, m: m.layer_scale is not None and m.class_token,
    IMAGENET,
    share=1.0,
  ),
  Publisher(
    "MAE",
    lambda w, m: m.final_norm == "pooled" and w.has_cls_row,
    IMAGENET,
  ),
)
# MAE as pre-trained: a family `vit` whose class token has a position of zeros.
MAE = Publisher("MAE", lambda w, m: _has_zero_row(w), IMAGENET)
# Others whose arrays are those of ViT. Google's images are in [-1, 1].
AS_VIT = (
  MAE,
  Publisher(
    "DINO",
    lambda w, m: (
      w.pixels == IMAGENET
      and "cls" in w.params
      and "head/kernel" not in w.params
    ),
    IMAGENET,
    posemb_filter="dinov2",
  ),
  Publisher("DeiT, I-JEPA", lambda w, m: w.pixels == IMAGENET, IMAGENET),
)


def _has_zero_row(weights: Weights) -> bool:
  """Whether the class token's position is zero, as in MAE's fixed sines."""
  if not weights.has_cls_row:
    return False
  return not np.asarray(weights.params[POS_EMBEDDING])[0, 0].any()


def posemb_filter(weights: Weights) -> str:
  """Returns how the authors of weights resize positions.

  It is the paper's "zoom" for ViT (also for SigLIP, whose authors' code is
  big_vision's), and timm's "bicubic" for a later model of no known series.

  Args:
    weights: Weights, with the normalisation of their images if it is known.

  Returns:
    A name of `models.resample.METHODS`.
  """
  if not {"embedding/kernel", *NEEDED} <= weights.params.keys():
    return "zoom"  # a ResNet, or no whole model
  model = identify(weights.params, weights.options)
  if isinstance(model, ModernConfig):
    known, other = PUBLISHERS, "bicubic"
  elif isinstance(model, ViTConfig) and weights.format not in PUBLISHED:
    known, other = AS_VIT, "zoom"
  else:
    return "zoom"
  filters = (p.posemb_filter for p in known if p.fits(weights, model))
  return next(filters, other)


def assume(weights: Weights) -> Weights:
  """Returns weights with their publisher's preprocessing, and a note.

  They do not change if their arrays belong to no known series. Without a known
  image size, only the normalisation is assumed.

  Args:
    weights: Weights whose file says nothing about images; a normalisation comes
      from the user.
  """
  if "embedding/kernel" not in weights.params:
    return weights
  model = identify(weights.params, weights.options)
  if isinstance(model, ModernConfig):
    known = PUBLISHERS
  elif isinstance(model, ViTConfig) and weights.format == "timm":
    known = (MAE,)
  else:
    return weights
  publisher = next((p for p in known if p.fits(weights, model)), None)
  if publisher is None:
    return weights
  size = weights.image_size or _size(weights, publisher)
  ops, share, facts = weights.ops, weights.crop_share, []
  if weights.pixels is None:
    mean, std = (list(x) for x in publisher.pixels)
    facts += [f"mean {mean}", f"deviation {std}"]
  if size is not None:
    path = eval_preprocessing.timm(
      size,
      publisher.share or 1.0,
      publisher.filter,
      "squash" if publisher.share is None else "center",
    )
    ops = ops or path.ops
    share = share or (publisher.share if path.short else None)
    facts.append(ops)
  if not facts:
    return weights
  note = (
    f"nothing states how images were prepared: {publisher.name}'s are assumed,"
    f" {', '.join(facts)}{publisher.also}; mean= (--mean, for training"
    " --config.init_mean) states others."
  )
  return dataclasses.replace(
    weights,
    image_size=size,
    pixels=weights.pixels or publisher.pixels,
    ops=ops,
    crop_share=share,
    notes=(*weights.notes, note),
  )


def _size(weights: Weights, publisher: Publisher) -> tuple[int, int] | None:
  """Returns (height, width) of images of weights that do not state it, pixels.

  None if the table has no square grid: it may have that of the user's images.
  """
  side = publisher.size or DEFAULT_SIZE
  if POS_EMBEDDING not in weights.params:
    return side, side
  try:
    size = trained_at(weights)
  except ValueError:
    return None
  return (side, side) if publisher.size and min(size) > side else size
