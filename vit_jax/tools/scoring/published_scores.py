"""Sets of images, and published scores on them, in percent.

`published_scores.csv` has a row for each file and source. Its columns:

- `name`: name in timm.
- `file`: name of Google's file without its ending.
- `pixels`: side of the images.
- `protocol`: preprocessing, see `vit_jax.weights.eval_preprocessing`; for timm
  `share` is crop / shorter side.
- `mean`: mean of the normalisation: "0.5", "imagenet" or "clip".
- `source`: one of `SOURCES`.
- accuracies in percent: `imagenet2012` (the official validation set) with
  `top5`; `real` (images without a label do not count); `v2` (matched
  frequency); `a` and `r` (among their 200 classes); `sketch`; `a_clean` and
  `r_clean` (ImageNet's images of these classes, among these classes).

For a timm file that was converted from Google's, `file` is the file in timm's
table of addresses; for the tag `orig` it is the released file of the same model
and size.
"""

import csv
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

SOURCES = {
  "timm": "timm's results/ at aa4b585",
  "readme": "README of google-research/vision_transformer",
  "paper": "arXiv:2010.11929, Table 5, of another fine-tuning",
  "big_vision": "big_vision, configs/vit_s16_i1k.py",
}
CLASSES = 1000  # number of classes of all heads in the table


class Set(NamedTuple):
  """A set of images, and how it is scored.

  dataset: Name in TFDS.
  split: Name of the split.
  classes: Name in `subset.SUBSETS` of the classes that can be predicted; None:
    all classes.
  """

  dataset: str
  split: str
  classes: str | None = None


SETS = {
  "imagenet2012": Set("imagenet2012", "validation"),
  "real": Set("imagenet2012_real", "validation"),
  "v2": Set("imagenet_v2", "test"),
  "a": Set("imagenet_a", "test", "imagenet_a"),
  "r": Set("imagenet_r", "test", "imagenet_r"),
  "sketch": Set("imagenet_sketch", "test"),
  "a_clean": Set("imagenet2012", "validation", "imagenet_a"),
  "r_clean": Set("imagenet2012", "validation", "imagenet_r"),
}
AVAILABLE = "available"  # stands for all of `SETS` that are on disk

_FILE = pathlib.Path(__file__).with_suffix(".csv")
_FACTS = (
  *("name", "file", "pixels", "protocol", "share", "mean", "source"),
  "top5",
)
_ENDINGS = (".npz", ".safetensors", ".pth", ".pt", ".bin")


@dataclasses.dataclass(frozen=True)
class Published:
  """A row of published scores.

  Attributes:
    name: Name in timm, or "".
    file: Name of Google's file without its ending, or "".
    pixels: Side of the images, pixels.
    protocol: "timm", "google" or "big_vision".
    share: timm's crop / shorter side; None for other protocols.
    mean: "0.5", or "imagenet" or "clip" for their mean and standard deviation.
    source: A key of `SOURCES`.
    top1: Name of a set of images, such as "imagenet2012" -> percent.
    top5: The same for the five most probable classes.
  """

  name: str
  file: str
  pixels: int
  protocol: str
  share: float | None
  mean: str
  source: str
  top1: dict[str, float]
  top5: dict[str, float]

  @property
  def ops(self) -> str:
    """The preprocessing of the score, in the language of `config.data.ops`."""
    # Imports jax, which `vit-jax models` does without.
    from vit_jax.weights import eval_preprocessing

    size = self.pixels, self.pixels
    return eval_preprocessing.of_protocol(self.protocol, size, self.share).ops


@functools.cache
def rows() -> tuple[Published, ...]:
  """Returns all rows of the file."""
  with _FILE.open() as stream:
    return tuple(map(_row, csv.DictReader(stream)))


def find(
  path: str, image_size: tuple[int, int], num_classes: int
) -> tuple[Published, ...]:
  """Returns the rows of a file of weights, which is known by its name.

  Image size and number of classes tell Google's files of the same name apart.

  Args:
    path: As for `vit_jax.load`. Its name is the name of the file, the folder,
      the folder with model.safetensors, or the repository of the hub.
    image_size: (height, width) of the training images, pixels.
    num_classes: Number of outputs of the head.

  Example:
    >>> rows = find("ViT-B_16.npz", (384, 384), 1000)
    >>> [(row.source, row.top1["imagenet2012"]) for row in rows]
    [('timm', 84.21)]
  """
  if num_classes != CLASSES:
    return ()
  known = name_of(path)
  return tuple(
    row
    for row in rows()
    if known in (row.name, row.file) and image_size == (row.pixels,) * 2
  )


def top1(paths: Iterable[str], pixels: int) -> float | None:
  """Returns the published accuracy of weights on ImageNet, percent, or None.

  Args:
    paths: The same weights in several files; see `find`.
    pixels: Side of the images.

  Example:
    >>> top1(["hf-hub:timm/deit_base_patch16_384.fb_in1k"], 384)
    83.11
  """
  names = {name_of(path) for path in paths}
  for row in rows():
    name = row.name or row.file
    if name in names and row.pixels == pixels and row.source != "paper":
      return row.top1["imagenet2012"]
  return None


def name_of(path: str) -> str:
  """Returns the name of a file of weights; see `find`.

  Example:
    >>> name_of("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k@main")
    'vit_tiny_patch16_224.augreg_in21k_ft_in1k'
  """
  text = re.sub(r"^hf-hub:([^@]*)(@.*)?$", r"\1", str(path)).rstrip("/")
  *folders, name = text.split("/")
  if name in ("model.safetensors", "pytorch_model.bin") and folders:
    return folders[-1]
  for ending in _ENDINGS:
    name = name.removesuffix(ending)
  return name


def _row(values: dict[str, str]) -> Published:
  scores = {k: float(v) for k, v in values.items() if k not in _FACTS and v}
  return Published(
    values["name"],
    values["file"],
    int(values["pixels"]),
    values["protocol"],
    float(values["share"]) if values["share"] else None,
    values["mean"],
    values["source"],
    top1=scores,
    top5={"imagenet2012": float(values["top5"])} if values["top5"] else {},
  )
