"""Addresses of the published weight files.

Source: the READMEs of google-research/vision_transformer and big_vision for the
  buckets; timm 1.0.31 for its tags, which also name the files of each bucket.
"""

import re
import urllib.parse

HOST = "https://storage.googleapis.com"  # serves the public files of gs://

AUGREG_INDEX = "gs://vit_models/augreg/index.csv"
BUCKETS = ("gs://vit_models/", "gs://bit_models/", "gs://big_vision/")

# Kind of a file in a table -> its addresses. The ViT paper's models are in two
# folders: pre-trained, and fine-tuned on ImageNet.
PLACES = {
  "i21k": ("gs://vit_models/imagenet21k/{}.npz",),
  "paper": (
    "gs://vit_models/imagenet21k/{}.npz",
    "gs://vit_models/imagenet21k+imagenet2012/{}.npz",
  ),
  "augreg": ("gs://vit_models/augreg/{}-*.npz",),
  "bit": ("gs://bit_models/BiT-{{S,M}}-{}.npz",),
  "big_vision": ("gs://big_vision/{}.npz",),
  "timm": ("timm {}",),
  "hf": ("hf google/{}",),
  "hub": ("hf {}",),
  "meta": ("https://dl.fbaipublicfiles.com/{}",),
}


def table(text: str) -> dict[str, tuple[str, ...]]:
  """Parses a table of files: a variant, then files as kind:name, see `PLACES`.

  Example:
    >>> table("B/16 augreg:B_16 timm:vit_base S/8")
    {'B/16': ('gs://vit_models/augreg/B_16-*.npz', 'timm vit_base'), 'S/8': ()}
  """
  files: dict[str, tuple[str, ...]] = {}
  for word in text.split():
    kind, colon, name = word.partition(":")
    if not colon:
      files[variant := word] = ()
    else:
      files[variant] += tuple(place.format(name) for place in PLACES[kind])
  return files


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
