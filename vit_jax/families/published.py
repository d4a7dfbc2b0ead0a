"""The published weight files, all in one list: `published.csv`.

A row is one set of weights, in one or several formats. Its columns:

- `series`: "ViT", "BiT", or a key of `vit_jax.zoo.families.later.LATER`.
- `variant`: Variant of the model.
- `pixels`: Side of the images.
- `files`: Its files as kind:name, see `PLACES`; "" for a model without files.
- `parameters`: Number of parameters without a classifier, with positions for
  images of these pixels. `python benchmarks/published_models.py` writes it.
- `classes`: Outputs of the classifier; "" without one.
- `linear`, `zero_shot`, `knn`: Published top-1 accuracy on ImageNet in percent
  of a linear classifier, of class names and of the nearest neighbours. That of
  the file's own classifier is in `vit_jax/tools/scoring/published_scores.csv`.
- `licence`: The licence that timm states; "" if timm has no such file.

Source: the READMEs of google-research/vision_transformer and big_vision for the
  buckets; timm 1.0.31 for its tags, which also name the files of each bucket,
  and for licences; the repositories of DINOv2 (its README also for linear and
  knn), MAE and big_vision (README_siglip2.md for zero_shot), and the model
  cards on Hugging Face, for the others.
"""

import csv
import functools
import pathlib
import urllib.parse
from typing import NamedTuple

HOST = "https://storage.googleapis.com"  # serves the public files of gs://

AUGREG_INDEX = "gs://vit_models/augreg/index.csv"
BUCKETS = ("gs://vit_models/", "gs://bit_models/", "gs://big_vision/")

# Kind of a file in the list -> its address.
PLACES = {
  "i21k": "gs://vit_models/imagenet21k/{}.npz",
  "i1k": "gs://vit_models/imagenet21k+imagenet2012/{}.npz",
  "augreg": "gs://vit_models/augreg/{}-*.npz",
  "bit_s": "gs://bit_models/BiT-S-{}.npz",
  "bit_m": "gs://bit_models/BiT-M-{}.npz",
  "big_vision": "gs://big_vision/{}.npz",
  "timm": "timm {}",
  # Of timm.create_model; the hub has the file under the name of another model,
  # which computes another GELU.
  "name": "timm.create_model {}",
  "hf": "hf google/{}",
  "hub": "hf {}",
  "bin": "pytorch_model.bin of {}",  # from the hub only by hand: a pickle
  "meta": "https://dl.fbaipublicfiles.com/{}",
}

_FILE = pathlib.Path(__file__).with_suffix(".csv")


class Row(NamedTuple):
  """A row of the list; see the module."""

  series: str
  variant: str
  pixels: int
  files: tuple[str, ...]
  parameters: int
  classes: int
  linear: float | None
  zero_shot: float | None
  knn: float | None
  licence: str


@functools.cache
def rows() -> tuple[Row, ...]:
  """Returns all rows of the list."""
  with _FILE.open() as stream:
    return tuple(map(_row, csv.DictReader(stream)))


def _row(cells: dict[str, str]) -> Row:
  files = [word.partition(":") for word in cells["files"].split()]
  percent = lambda key: float(cells[key]) if cells[key] else None
  return Row(
    cells["series"],
    cells["variant"],
    int(cells["pixels"]),
    tuple(PLACES[kind].format(name) for kind, _, name in files),
    int(cells["parameters"] or 0),
    int(cells["classes"] or 0),
    percent("linear"),
    percent("zero_shot"),
    percent("knn"),
    cells["licence"],
  )


def files(series: str) -> dict[str, tuple[str, ...]]:
  """Returns the files of each variant of a series.

  Example:
    >>> files("MAE")["L/16"][1:]
    ('timm vit_large_patch16_224.mae', 'hf facebook/vit-mae-large')
  """
  result: dict[str, tuple[str, ...]] = {}
  for row in rows():
    if row.series == series:
      result[row.variant] = result.get(row.variant, ()) + row.files
  return result


def https(file: str) -> str:
  """Returns the https:// address of a file in a public bucket, gs://...

  Example:
    >>> https("gs://vit_models/imagenet21k/ViT-B_16.npz")
    'https://storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz'
  """
  return f"{HOST}/{urllib.parse.quote(file.removeprefix('gs://'))}"


def addresses(file: str) -> tuple[str, ...]:
  """Returns the addresses of an entry of `PUBLISHED`, for `vit_jax.load`.

  Example:
    >>> addresses("hf google/vit-base-patch16-224")
    ('hf-hub:google/vit-base-patch16-224',)
  """
  kind, _, name = file.partition(" ")
  if kind == "timm.create_model":
    return ()
  if owner := {"timm": "hf-hub:timm/", "hf": "hf-hub:"}.get(kind):
    return (owner + name,)
  if "*" in file:
    return (f"{file} (all are named in {AUGREG_INDEX})",)
  return (file,)
