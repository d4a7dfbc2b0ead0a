"""Addresses of the published files of weights.

Source: README of google-research/vision_transformer and of big_vision for the
buckets; timm 1.0.31 for its tags, which also tell what each bucket has.
"""

import re
import urllib.parse

HOST = "https://storage.googleapis.com"  # of what is public in gs://

I21K = "gs://vit_models/imagenet21k/{}.npz"
BOTH = "gs://vit_models/imagenet21k+imagenet2012/{}.npz"
AUGREG = "gs://vit_models/augreg/{}-*.npz"
AUGREG_INDEX = "gs://vit_models/augreg/index.csv"
BUCKETS = ("gs://vit_models/", "gs://bit_models/", "gs://big_vision/")
TIMM = "timm {}"
HF = "hf google/{}"
BIT = "gs://bit_models/BiT-{{S,M}}-{}.npz"


def paper(google: str, *others: str) -> tuple[str, ...]:
  """Files of the ViT paper's models, which are in both of its buckets."""
  return (I21K.format(google), BOTH.format(google), *others)


def augreg(google: str, timm: str, *others: str) -> tuple[str, ...]:
  """Files of a model of arXiv:2106.10270: Google's, others, timm's."""
  return (AUGREG.format(google), *others, TIMM.format(f"{timm}.augreg_in21k"))


def https(file: str) -> str:
  """Returns the https:// address of a file in a public bucket, gs://...

  Example:
    >>> https("gs://vit_models/imagenet21k/ViT-B_16.npz")
    'https://storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz'
  """
  return f"{HOST}/{urllib.parse.quote(file.removeprefix('gs://'))}"


def addresses(file: str) -> tuple[str, ...]:
  """Returns the addresses of an entry of `PUBLISHED`, for `vit_jax.load`.

  Braces are expanded.

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
